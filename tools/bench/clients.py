"""OpenAI's own Python client against a running `hpp-exec serve`, for every part of the API that we serve.

    pip install openai
    hpp-exec serve plan/ hidden=plan-with-hidden-states/ &
    python3 tools/bench/clients.py http://127.0.0.1:8080 CHAT-MODEL [EMBEDDING-MODEL]

Prints one line for each check, and ends with exit code 1 if one fails."""

import json
import sys

import openai

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def refused(kind, call, param=None):
    try:
        call()
    except kind as error:
        assert param is None or error.param == param, (error.param, error.message)
        assert error.message, error
        return error
    raise AssertionError(f"not refused with {kind.__name__}")


MESSAGES = [{"role": "user", "content": "What is ownership?"}]
TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds a page", "parameters": {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"],
    "additionalProperties": False}}}]


@check
def models(client, chat, _):
    names = [model.id for model in client.models.list()]
    assert chat in names, names
    assert client.models.retrieve(chat).id == chat


@check
def chat_whole_and_streamed(client, chat, _):
    whole = client.chat.completions.create(model=chat, messages=MESSAGES, max_tokens=30, temperature=0)
    choice = whole.choices[0]
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = client.chat.completions.create(model=chat, messages=MESSAGES, max_completion_tokens=30, temperature=0, stream=True,
                                            stream_options={"include_usage": True})
    text, usage, finish = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text, finish = text + (choice.delta.content or ""), choice.finish_reason or finish
    assert text == whole.choices[0].message.content, (text, whole)
    assert usage.total_tokens == whole.usage.total_tokens and finish == whole.choices[0].finish_reason


@check
def the_streaming_helper(client, chat, _):
    with client.chat.completions.stream(model=chat, messages=MESSAGES) as stream:
        kinds = {event.type for event in stream}
        assert {"chunk", "content.delta"} <= kinds, kinds
        assert stream.get_final_completion().choices[0].message.content


@check
def logprobs(client, chat, _):
    answer = client.chat.completions.create(model=chat, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3)
    for token in answer.choices[0].logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3 and bytes(token.bytes) is not None
    answer = client.completions.create(model=chat, prompt="Once", max_tokens=5, logprobs=2, echo=True)
    assert answer.choices[0].logprobs.token_logprobs[0] is None and answer.choices[0].text.startswith("Once")


@check
def several_answers_seeds_and_stops(client, chat, _):
    answer = client.chat.completions.create(model=chat, messages=MESSAGES, n=3, max_tokens=8, temperature=1.5, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    again = client.chat.completions.create(model=chat, messages=MESSAGES, n=3, max_tokens=8, temperature=1.5, seed=3)
    assert [c.message.content for c in answer.choices] == [c.message.content for c in again.choices]
    stopped = client.completions.create(model=chat, prompt="Once upon", max_tokens=40, stop=["e"])
    assert "e" not in stopped.choices[0].text


@check
def required_tools(client, chat, _):
    answer = client.chat.completions.create(model=chat, messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=200,
                                            parallel_tool_calls=False)
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "find"
    assert "name" in json.loads(call.function.arguments)
    talk = [*MESSAGES, answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "a page"}]
    assert client.chat.completions.create(model=chat, messages=talk, tools=TOOLS, max_tokens=5).choices
    stream = client.chat.completions.create(model=chat, messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=200,
                                            parallel_tool_calls=False, stream=True)
    arguments = "".join(call.function.arguments for chunk in stream for choice in chunk.choices
                        for call in choice.delta.tool_calls or [])
    assert json.loads(arguments) == json.loads(answer.choices[0].message.tool_calls[0].function.arguments)


@check
def json_of_a_schema(client, chat, _):
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"],
              "additionalProperties": False}
    answer = client.chat.completions.create(model=chat, messages=MESSAGES, max_tokens=60, response_format={
        "type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}})
    assert list(json.loads(answer.choices[0].message.content)) == ["name"]


@check
def embeddings(client, chat, hidden):
    if hidden:
        floats = client.embeddings.create(model=hidden, input=["a text", "another"], encoding_format="float")
        # Without a format the client asks for base64 and decodes it.
        decoded = client.embeddings.create(model=hidden, input=["a text", "another"])
        for ours, theirs in zip(floats.data, decoded.data, strict=True):
            assert max(abs(a - b) for a, b in zip(ours.embedding, theirs.embedding, strict=True)) < 1e-6
        assert decoded.usage.total_tokens > 0
    refused(openai.BadRequestError, lambda: client.embeddings.create(model=chat, input="x"), "model")


@check
def errors(client, chat, _):
    refused(openai.NotFoundError, lambda: client.chat.completions.create(model="none", messages=MESSAGES), "model")
    bad = [("temperature", {"temperature": -1}), ("n", {"n": 0}), ("logit_bias", {"logit_bias": {"5": 3}}),
           ("response_format", {"response_format": {"type": "xml"}}), ("messages", {"messages": []})]
    for param, more in bad:
        refused(openai.BadRequestError, lambda more=more: client.chat.completions.create(
            **{"model": chat, "messages": MESSAGES, **more}), param)
    refused(openai.NotFoundError, lambda: client.responses.create(model=chat, input="x"))


@check
def a_client_that_leaves(client, chat, _):
    stream = client.chat.completions.create(model=chat, messages=MESSAGES, max_tokens=300, stream=True)
    next(iter(stream))
    stream.close()
    assert client.chat.completions.create(model=chat, messages=MESSAGES, max_tokens=2).choices


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    url, chat, hidden = sys.argv[1], sys.argv[2], (sys.argv[3:] + [None])[0]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)
    failed = 0
    for function in CHECKS:
        try:
            function(client, chat, hidden)
            print("ok    ", function.__name__.replace("_", " "))
        except Exception as error:
            failed += 1
            print("FAILED", function.__name__.replace("_", " "), f"{type(error).__name__}: {error}")
    print(f"openai {openai.__version__}: {len(CHECKS) - failed} of {len(CHECKS)}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
