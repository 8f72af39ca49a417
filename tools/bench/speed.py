"""Decode and prefill speed: N partitions against one, and ours against ONNX Runtime GenAI and llama.cpp."""

import json
import os
import shutil
import sys

import measure
from rounds import ratios
from table import compared, mib, row

HERE = os.path.dirname(os.path.abspath(__file__))
PROMPT, NEW, CONTEXT = 512, 64, 1024


def ours(shop, plan):
    """One measured run of hpp-exec, after a warm-up."""
    answer = shop.exec_json("bench", plan, "--prompt-tokens", PROMPT, "--new-tokens", NEW, "--runs", 1)
    return {
        "decode": answer["decode_tokens_per_second"]["median"],
        "ttft": answer["time_to_first_token_ms"]["median"] / 1000,
        "peak_rss": answer["peak_rss"],
    }


def plan_of(shop, dtype, partitions, folder="speed"):
    return shop.split(shop.decoder(dtype), f"{folder}/{dtype}-{partitions}", "--partitions", partitions, "--context", CONTEXT)[0]


def split_overhead(shop):
    """The same model in the same runtime, in one partition and in several."""
    rows = []
    for dtype in ("int4", "fp32"):
        plans = {count: plan_of(shop, dtype, count) for count in (1, 4, 8)}
        runs = measure.in_turns(shop.rounds, **{f"in{count}": lambda plan=plan: ours(shop, plan) for count, plan in plans.items()})
        one = measure.values(runs["in1"], "decode")
        for count in (4, 8):
            many = measure.values(runs[f"in{count}"], "decode")
            rows.append(compared(f"decode in {count} partitions over 1, {dtype}", many, one, 0.98, "tok/s"))
    return rows


def genai_model(shop, dtype):
    """The same model with a changed configuration for the same number of threads; files are hard links."""
    model = shop.decoder(dtype)
    copy = f"{model}-genai"
    shutil.rmtree(copy, ignore_errors=True)
    os.makedirs(copy)
    for name in os.listdir(model):
        if name != "genai_config.json":
            os.link(os.path.join(model, name), os.path.join(copy, name))
    with open(os.path.join(model, "genai_config.json"), encoding="utf-8") as source:
        config = json.load(source)
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = shop.threads
    with open(os.path.join(copy, "genai_config.json"), "w", encoding="utf-8") as out:
        json.dump(config, out)
    return copy


def against_genai(shop):
    rows = []
    for dtype in ("int4", "fp32"):
        plan, copy = plan_of(shop, dtype, 1), genai_model(shop, dtype)

        def theirs(copy=copy):
            cost = measure.run([sys.executable, os.path.join(HERE, "run_genai.py"), copy, PROMPT, NEW, CONTEXT])
            answer = json.loads(cost["stdout"])
            return dict(answer, peak_rss=cost["peak_rss"] - answer["bare_rss"])

        runs = measure.in_turns(shop.rounds, ours=lambda plan=plan: ours(shop, plan), theirs=theirs)
        decode, first, peak = ([measure.values(runs[side], key) for side in ("ours", "theirs")] for key in ("decode", "ttft", "peak_rss"))
        memory = ratios(*peak)
        rows += [
            compared(f"decode over GenAI, {dtype}", *decode, 1.0, "tok/s"),
            compared(f"time to first token ({PROMPT}) over GenAI, {dtype}", *first, 1.0, "s", smaller_is_better=True),
            row(f"peak RSS over GenAI, {dtype}", *(mib(measure.median(runs[side], "peak_rss")) for side in ("ours", "theirs")),
                memory.text(unit="x"), "<= 1.0x", memory.verdict(at_most=1.0)),
        ]
    return rows
