"""`hpp-split --active-neurons`: networks with ReLU in host memory whose inactive neurons are neither read nor computed, over all neurons,
and over the bound that `--explain` names; and the error of the planner's prediction.

The models have random weights and about 1 GB; what is subtracted before each ReLU leaves a tenth of the neurons active.
"""

import json
import os
import shutil

import measure
from rounds import Rounds, ratios
from table import compared, row
from workshop import OUT

LAYERS = {"fp32": 4, "fp16": 8}
SHAPE = ("--hidden", 2048, "--intermediate", 8192, "--heads", 16, "--kv-heads", 4, "--vocab", 8000)
# The standard normal distribution exceeds 1.28 with a probability of a tenth.
ACTIVATION = ("--activation", "relu", "--relu-threshold", 1.28)
CONTEXT, PROMPT, LONG_PROMPT, NEW = 1024, 64, 256, 32
SIDES = {"active": ("--active-neurons",), "all": ()}


def active(shop):
    return [result for dtype in LAYERS for result in of(shop, dtype)]


def of(shop, dtype):
    """The rows of one data type."""
    layers = 2 if shop.small else LAYERS[dtype]
    model = shop.model(f"relu-{layers}-{dtype}", "--layers", layers, *SHAPE, *ACTIVATION, "--context", CONTEXT, "--dtype", dtype)
    options = ("--vram", 0, "--context", CONTEXT, "--prompt-tokens", PROMPT, "--new-tokens", NEW, "--profile", profiled(shop, dtype, model))
    plans = {side: shop.split(model, f"neurons/{dtype}-{side}", *options, *more)[0] for side, more in SIDES.items()}
    said = {side: planned(shop, model, *options, *more) for side, more in SIDES.items()}
    runs = measure.in_turns(shop.rounds, **{side: lambda plan=plan: bench(shop, plan, PROMPT) for side, plan in plans.items()})
    long = measure.in_turns(shop.rounds, **{side: lambda plan=plan: bench(shop, plan, LONG_PROMPT) for side, plan in plans.items()})
    decode = {side: [run["decode_tokens_per_second"]["median"] for run in runs[side]] for side in SIDES}
    prompt = {side: [LONG_PROMPT / run["time_to_first_token_ms"]["median"] * 1000 for run in long[side]] for side in SIDES}
    host = said["active"]["explanation"]["neurons_in_memory"]["host"]
    what = f"a tenth of the neurons active, {dtype}"
    over_all = compared(f"{what}: decode, active neurons over all", decode["active"], decode["all"], None, "tok/s")
    over_all["result"] += f", at most {host['at_most']:.2f}x by the bytes read with {host['active']:.0%} active"
    rows = [
        over_all,
        row(f"{what}: decode over that bound", "", "", reached(decode, host["at_most"]).text(unit="x"), "reported"),
        compared(f"{what}: prompt of {LONG_PROMPT}, active neurons over all", prompt["active"], prompt["all"], None, "tok/s"),
        *(predicted(f"{what}: decode of {side}, predicted", said[side], decode[side]) for side in SIDES),
    ]
    for plan in plans.values():
        shutil.rmtree(plan)
    return rows


def reached(decode, at_most):
    """The share of the bound that the speedup reaches, by round."""
    return Rounds(speedup / at_most for speedup in ratios(decode["active"], decode["all"]).values)


def profiled(shop, dtype, model):
    """A quick profile with a corpus of two prompts, which says how many neurons are active."""
    prompts, path = (os.path.join(OUT, name) for name in ("corpus-neurons.jsonl", f"profile-neurons-{dtype}.yaml"))
    with open(prompts, "w", encoding="utf-8") as out:
        out.writelines(json.dumps({"tokens": [factor * token % 7000 + 300 for token in range(48)]}) + "\n" for factor in (7, 11))
    measure.run([shop.binary("hpp-profile"), model, "--quick", "--providers", "cpu", "--contexts", PROMPT, "--prefill-tokens", f"16,{PROMPT}",
                 "--prompts", prompts, "--out", path, "--force", "--threads", shop.threads, "--quiet"])
    return path


def planned(shop, model, *options):
    cost = measure.run([shop.binary("hpp-split"), model, "--dry-run", "--explain", "--json", *options])
    return json.loads(cost["stdout"])


def bench(shop, plan, tokens):
    return shop.exec_json("bench", plan, "--prompt-tokens", tokens, "--new-tokens", NEW, "--runs", 1)


def predicted(what, said, measured):
    """The plan's time of a token beside the measured ones."""
    expected = 1000 / said["plan"]["predictions"]["decode_ms"]
    error = Rounds(expected / speed - 1 for speed in measured)
    return row(what, f"{expected:.3g} tok/s", f"{Rounds(measured).median:.3g} tok/s",
               f"{error.median:+.0%} ({error.spread[0]:+.0%} to {error.spread[1]:+.0%})", "within 20 %", error.verdict(-0.2, 0.2))
