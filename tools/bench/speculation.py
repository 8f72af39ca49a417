"""Speculative decoding on grown models: the trained model of fixtures/models made gigabytes large, with the same behaviour."""

import json
import os
import statistics

import disk
import measure
from limit import Limit
from table import compared
from workshop import ROOT

CONTEXT, NEW = 128, 48
# Answers for draft models are longer: the first two passes of an answer draft nothing, or little.
LONG_CONTEXT, LONG = 192, 128
# Layers and width of each MLP: 1.8 GB in fp32, 0.8 GB in int4.
GROWN = {"fp32": (64, 12288), "int4": (192, 12288)}
# The model has no memory of long texts, but it repeats an answer that it finds in the conversation.
QUESTION = "What is ownership?"
# A text of the kind that the models were trained on, to be continued.
PROSE = ("-p", "Returns the number of elements in the vector, also referred to as its length.", "--temperature", 0)
# Random choices do not repeat what was said.
PLAIN = ("--chat", "-p", "What does Vec::push do?", "--temperature", 1, "--seed", 3)


def grown(shop, dtype):
    """The trained model in this element type, grown; made once and kept."""
    layers, width = GROWN[dtype]
    source = os.path.join(ROOT, "fixtures", "models", "genai", f"learned-llama-{dtype}-cpu")
    return shop.made(f"grown-{dtype}-{layers}-{width}", "grow", source, "--layers", layers, "--intermediate", width)


def tokens_per_second(shop, plan, limit, prompt, *options, new=NEW):
    """Tokens per second of decoding, prompt and loading excluded, under a memory limit with a cold cache if there is one; and the answer."""
    command = [shop.binary("hpp-exec"), plan, *prompt, "-n", new, "--json", "--ignore-eos", "--threads", shop.threads, "--quiet", *options]
    if limit is None:
        answer = json.loads(measure.run(command)["stdout"])
    else:
        disk.forget(plan)
        with Limit(limit) as group:
            answer = json.loads(measure.run(group.command(command))["stdout"])
    return answer["timings"]["decode_tokens_per_second"], answer


def editing(shop, draft):
    """A prompt whose second half the answer repeats: a question with its answer, and the question again. All models answer alike."""
    _, answer = tokens_per_second(shop, draft, None, ("--chat", "-p", QUESTION, "--temperature", 0))
    question = answer["prompt_token_ids"]
    return ("--tokens", ",".join(map(str, question + answer["tokens"] + question)), "--temperature", 0)


def over_off(shop, what, plan, limit, prompt, wanted, *options, exact, drafting=None, new=NEW):
    """A row for drafts over none, with the plan `drafting` if it is another. With `exact` the tokens must be the same; rounding of activations may decide near ties differently."""
    runs = measure.in_turns(shop.rounds, on=lambda: tokens_per_second(shop, drafting or plan, limit, prompt, *options, new=new),
                            off=lambda: tokens_per_second(shop, plan, limit, prompt, new=new))
    on, off = ([speed for speed, _ in runs[side]] for side in ("on", "off"))
    changed = sum(drafted["tokens"] != plain["tokens"] for (_, drafted), (_, plain) in zip(runs["on"], runs["off"]))
    if changed and exact:
        raise measure.Failed(f"{what}: drafts changed the answer")
    result = compared(what, on, off, wanted, "tok/s")
    per_pass = statistics.median(answer["timings"]["speculation"]["tokens_per_pass"] for _, answer in runs["on"])
    result["result"] += f", {per_pass:.2f} tokens a pass"
    if changed:
        result["result"] += f", near ties decided differently in {changed} of {shop.rounds} answers"
    return result


def under(shop, model, name, part, *options, context=CONTEXT, kernel=disk.KERNEL):
    """A plan for a share of the model's size as memory, less what the kernel takes, with its weights prepared."""
    limit = disk.limit_of(model, part)
    plan, _ = shop.split(model, f"speculation/{name}", "--context", context, "--ram", f"{limit - kernel}B", "--prompt-tokens", 64, *options)
    tokens_per_second(shop, plan, None, PLAIN)
    return plan, limit


def own_draft(shop):
    """Rows for a draft of the model itself, inside the same memory, over the plan without a draft."""
    rows, model = [], grown(shop, "fp32")
    for part, wanted in ((0.25, 6), (0.45, 4)):
        # A quarter of the model holds the draft only without the kernel's share: both plans then do without it.
        kernel = 0 if part == 0.25 else disk.KERNEL
        plain, limit = under(shop, model, f"fp32-alone-{part}", part, context=LONG_CONTEXT, kernel=kernel)
        drafting, _ = under(shop, model, f"fp32-own-draft-{part}", part, "--draft", "int4", "--draft-block", 64, context=LONG_CONTEXT, kernel=kernel)
        what = f"fp32 from disk, RAM for {part:.0%}, the draft inside"
        rows.append(over_off(shop, f"draft of the model itself over off, {what}", plain, limit, PROSE, wanted, exact=True, drafting=drafting, new=LONG))
    return rows


def speculation(shop):
    rows = own_draft(shop)
    draft, _ = shop.split(os.path.join(ROOT, "fixtures", "models", "genai", "learned-llama-int4-cpu"), "speculation/draft", "--context", LONG_CONTEXT)
    task = editing(shop, draft)
    for dtype, wanted in (("int4", 2), ("fp32", 2.5)):
        model = grown(shop, dtype)
        plan, limit = under(shop, model, f"{dtype}-disk", 0.25)
        what = f"{dtype} from disk, RAM for 25%"
        ngram, exact = ("--speculate", "ngram"), dtype == "fp32"
        rows.append(over_off(shop, f"the answer repeats half of the prompt, ngram over off, {what}", plan, limit, task, wanted, *ngram, exact=exact))
        rows.append(over_off(shop, f"text that does not repeat, ngram over off, {what}", plan, limit, PLAIN, 0.98, *ngram, exact=exact))
        if dtype == "fp32":
            # The draft takes about 30 MB of its own.
            more = limit + (64 << 20)
            # Behind the end of a short answer the text means nothing, and no draft model knows it.
            long, _ = under(shop, model, f"{dtype}-disk-long", 0.25, context=LONG_CONTEXT)
            rows.append(over_off(shop, f"draft model over off, prose, {LONG} tokens, {what}", long, more, PROSE, 8, "--draft", draft, exact=exact, new=LONG))
            rows.append(over_off(shop, f"draft model over off, beyond the end of an answer, {what}", plan, more, (*PLAIN[:3], "--temperature", 0), None, "--draft", draft, exact=exact))
        resident, _ = shop.split(model, f"speculation/{dtype}-resident", "--context", CONTEXT)
        target = 1.5 if dtype == "fp32" else None
        rows.append(over_off(shop, f"the answer repeats half of the prompt, ngram over off, {dtype} in RAM", resident, None, task, target, *ngram, exact=exact))
        rows.append(over_off(shop, f"text that does not repeat, ngram over off, {dtype} in RAM", resident, None, PLAIN, 0.98, *ngram, exact=exact))
    return rows
