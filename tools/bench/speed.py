"""Decode and prefill speed: N partitions against one, and ours against ONNX Runtime GenAI and llama.cpp."""

import json
import os
import shutil
import sys

import measure
from table import ratio_row, row
from workshop import OUT

HERE = os.path.dirname(os.path.abspath(__file__))
PROMPT, NEW, CONTEXT = 512, 64, 1024


def ours(shop, plan):
    """One measured run of hpp-exec (after one that warms it up)."""
    answer = shop.exec_json("bench", plan, "--prompt-tokens", PROMPT, "--new-tokens", NEW, "--runs", 1)
    return {
        "decode": answer["decode_tokens_per_second"]["median"],
        "ttft": answer["time_to_first_token_ms"]["median"] / 1000,
        "peak_rss": answer["peak_rss"],
    }


def plan_of(shop, dtype, partitions):
    return shop.split(shop.decoder(dtype), f"speed/{dtype}-{partitions}", "--partitions", partitions, "--context", CONTEXT)[0]


def split_overhead(shop):
    """The same model through the same runtime, in one partition and in several."""
    rows = []
    for dtype in ("int4", "fp32"):
        plans = {count: plan_of(shop, dtype, count) for count in (1, 4, 8)}
        runs = measure.in_turns(shop.rounds, **{f"in{count}": lambda plan=plan: ours(shop, plan) for count, plan in plans.items()})
        one = measure.median(runs["in1"], "decode")
        for count in (4, 8):
            many = measure.median(runs[f"in{count}"], "decode")
            rows.append(ratio_row(f"decode in {count} partitions over 1, {dtype}", many, one, many / one, 0.98, "tok/s"))
    return rows


def genai_model(shop, dtype):
    """The same model, told to use the same number of threads: hard links and a changed configuration."""
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
        mine, other = runs["ours"], runs["theirs"]
        decode = measure.median(mine, "decode"), measure.median(other, "decode")
        ttft = measure.median(mine, "ttft"), measure.median(other, "ttft")
        peak = measure.median(mine, "peak_rss"), measure.median(other, "peak_rss")
        rows += [
            ratio_row(f"decode over GenAI, {dtype}", *decode, decode[0] / decode[1], 1.0, "tok/s"),
            ratio_row(f"time to first token ({PROMPT}) over GenAI, {dtype}", *ttft, ttft[1] / ttft[0], 1.0, "s"),
            row(f"peak RSS over GenAI, {dtype}", f"{peak[0] / 2**20:.0f} MiB", f"{peak[1] / 2**20:.0f} MiB",
                f"{peak[0] / peak[1]:.3f}x", "<= 1.0x", peak[0] <= peak[1]),
        ]
    return rows


def against_llama_cpp(shop):
    """The same shape in GGUF; other weights, since nothing converts random ones, and no target: reported only."""
    rows = []
    layers = 4 if shop.small else 24
    for dtype, kind in (("int4", "q4_0"), ("fp32", "f32")):
        plan = plan_of(shop, dtype, 1)
        gguf = os.path.join(OUT, "models", f"llama-{layers}-{kind}.gguf")
        if not os.path.exists(gguf):
            measure.run([sys.executable, os.path.join(HERE, "write_gguf.py"), gguf, kind, layers])

        def theirs(gguf=gguf):
            cost = measure.run([sys.executable, os.path.join(HERE, "run_llama_cpp.py"), gguf, PROMPT, NEW, CONTEXT, shop.threads])
            return json.loads(cost["stdout"].strip().splitlines()[-1])

        runs = measure.in_turns(shop.rounds, ours=lambda plan=plan: ours(shop, plan), theirs=theirs)
        decode = [measure.median(runs[side], "decode") for side in ("ours", "theirs")]
        prefill = [PROMPT / measure.median(runs[side], "ttft") for side in ("ours", "theirs")]
        for what, (mine, other) in (("decode", decode), ("prefill", prefill)):
            rows.append(row(f"{what} beside llama.cpp, {dtype} and {kind}", f"{mine:.4g} tok/s", f"{other:.4g} tok/s",
                            f"{mine / other:.3f}x", "reported"))
    return rows
