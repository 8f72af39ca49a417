//! Tools in chat completions: calls that are required or named, whole and streamed; results in the conversation; what is refused.

mod support;

use serde_json::{Value, json};
use support::PlanDir;
use support::server::{MODEL, Server, user};

const CHAT: &str = "/v1/chat/completions";

/// Shows tools and calls as Hermes' models do.
const TEMPLATE: &str = "{{ bos_token }}{% if tools %}<|system|>Call functions like this: <tool_call>{\"name\": ..., \
    \"arguments\": ...}</tool_call>{{ tools | tojson }}<|end|>{% endif %}{% for message in messages %}<|{{ message.role }}|>\
    {{ message.name }}{{ message.content }}{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}\
    </tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

fn server(template: Option<&str>) -> Server {
    let mut plan = PlanDir::new(MODEL, 512);
    let name = "tools.jinja";
    std::fs::write(plan.file(name), template.unwrap_or(TEMPLATE)).unwrap();
    plan.plan.generation.as_mut().unwrap().chat_template = Some(name.into());
    plan.save();
    Server::start(plan, &[])
}

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "find_method", "description": "Finds a method.", "parameters": {
            "type": "object", "properties": {"of": {"enum": ["Vec", "String"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["of", "count"], "additionalProperties": false}}},
        {"type": "function", "function": {"name": "now", "parameters":
            {"type": "object", "properties": {}, "additionalProperties": false}}}
    ])
}

fn request(more: Value) -> Value {
    let mut request = json!({"messages": user("Which method adds to a Vec?"), "max_tokens": 200, "tools": tools()});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

#[track_caller]
fn assert_call(call: &Value) {
    assert_eq!(call["type"], "function");
    let id = call["id"].as_str().unwrap();
    assert!(id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()), "{id}");
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    match call["function"]["name"].as_str().unwrap() {
        "find_method" => {
            assert!(["Vec", "String"].contains(&arguments["of"].as_str().unwrap()), "{arguments}");
            assert!((1..=9).contains(&arguments["count"].as_i64().unwrap()), "{arguments}");
        }
        "now" => assert_eq!(arguments, json!({})),
        other => panic!("{other}"),
    }
}

#[test]
fn a_required_or_named_call_is_made_whole_and_streamed() {
    let server = server(None);
    let required = json!({"tool_choice": "required", "parallel_tool_calls": false});
    let answer = server.ok(CHAT, &request(required.clone()));
    let choice = &answer["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &Value::Null));
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 1);
    assert_call(&calls[0]);

    let chunks = server.stream(CHAT, &request(required));
    let streamed: Vec<&Value> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array()).flatten().collect();
    assert_eq!(streamed.len(), 1);
    assert_eq!((&streamed[0]["function"], &streamed[0]["index"]), (&calls[0]["function"], &json!(0)));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    let said: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(said, "", "a call is no text");

    for name in ["find_method", "now"] {
        let named = json!({"tool_choice": {"type": "function", "function": {"name": name}}, "temperature": 2.0, "seed": 3, "n": 3});
        for choice in server.ok(CHAT, &request(named))["choices"].as_array().unwrap() {
            let calls = choice["message"]["tool_calls"].as_array().unwrap();
            assert_eq!((calls.len(), &calls[0]["function"]["name"]), (1, &json!(name)));
            assert_call(&calls[0]);
        }
    }
    let several = json!({"tool_choice": "required", "temperature": 90.0, "seed": 1, "n": 8, "max_tokens": 150});
    let answer = server.ok(CHAT, &request(several));
    let counts: Vec<usize> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| {
            let calls = choice["message"]["tool_calls"].as_array().unwrap();
            calls.iter().for_each(assert_call);
            calls.len()
        })
        .collect();
    assert!(counts.iter().any(|count| *count > 1), "parallel calls are possible: {counts:?}");
    let cut = server.ok(CHAT, &request(json!({"tool_choice": "required", "max_tokens": 3})));
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    assert!(cut["choices"][0]["message"].get("tool_calls").is_none(), "{cut}");
}

#[test]
fn the_model_sees_tools_calls_and_results_and_may_answer_with_text() {
    let server = server(None);
    let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let plain = json!({"messages": user("Which method adds to a Vec?"), "max_tokens": 20});
    let without = server.ok(CHAT, &plain);
    let auto = server.ok(CHAT, &request(json!({"max_tokens": 20})));
    assert!(tokens(&auto) > tokens(&without) + 50, "the tools are in the prompt: {auto}");
    assert!(!auto["choices"][0]["message"]["content"].as_str().unwrap().is_empty());
    let none = server.ok(CHAT, &request(json!({"max_tokens": 20, "tool_choice": "none"})));
    assert_eq!(none["choices"], without["choices"]);

    let call = json!({"id": "abcdefghi", "type": "function", "function": {"name": "find_method", "arguments": "{\"of\": \"Vec\"}"}});
    let talk = json!([
        {"role": "user", "content": "Which method adds to a Vec?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "Vec::push"}
    ]);
    let answer = server.ok(CHAT, &json!({"messages": talk, "max_tokens": 1}));
    // The template repeats the name of the function with the result.
    let text = "<|bos|><|user|>Which method adds to a Vec?<|end|><|assistant|><tool_call>{\"name\": \"find_method\", \"arguments\": \
        {\"of\": \"Vec\"}}</tool_call><|end|><|tool|>find_methodVec::push<|end|><|assistant|>";
    let expected = server.ok("/tokenize", &json!({"content": text}))["tokens"].as_array().unwrap().len() as u64;
    assert_eq!(tokens(&answer) + 1, expected, "/tokenize adds another start token");

    let format = json!({"type": "json_schema", "json_schema": {"schema": {"enum": ["Vec::push", "Vec::pop"]}}});
    let restricted =
        server.ok(CHAT, &request(json!({"response_format": format, "temperature": 1.5, "seed": 1, "n": 4})));
    for choice in restricted["choices"].as_array().unwrap() {
        match choice["message"]["tool_calls"].as_array() {
            Some(calls) => calls.iter().for_each(assert_call),
            None => {
                let text = choice["message"]["content"].as_str().unwrap();
                assert!(["\"Vec::push\"", "\"Vec::pop\""].contains(&text), "{text}");
            }
        }
    }
}

#[test]
fn wrong_tools_are_refused_by_name() {
    let with_tools = server(None);
    for (more, param) in [
        (json!({"tools": {}}), "tools"),
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0]"),
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "function": {"name": "missing"}}}), "tool_choice"),
        (json!({"functions": [{"name": "old"}]}), "functions"),
        (
            json!({"tool_choice": "required", "tools": [{"type": "function", "function":
            {"name": "f", "strict": true, "parameters": {"type": "colour"}}}]}),
            "tools",
        ),
    ] {
        let (status, error) = with_tools.refused(CHAT, &request(more));
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{error}");
    }
    let (status, error) = with_tools.refused("/v1/completions", &json!({"prompt": "x", "tools": tools()}));
    assert_eq!((status, &error["param"]), (400, &json!("tools")), "{error}");
    let without = server(Some("{% for message in messages %}{{ message.content }}{% endfor %}"));
    let (status, error) = without.refused(CHAT, &request(json!({})));
    assert_eq!((status, &error["param"]), (400, &json!("tools")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("template"), "{error}");
}
