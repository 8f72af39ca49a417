"""Many sequences that share each pass over weights that do not fit a GPU, over one sequence after the other."""

import json
import os
import random
import statistics

import measure
import timeline
from gpu_rows import accuracy
from table import compared, row
from workshop import OUT

# Tokens of each prompt and of each answer, sequences of a job, and how many of them are measured alone.
PROMPT, NEW, COUNT, ALONE = 16, 64, 32, 2
# What every generated model's vocabulary has.
VOCABULARY = 500


def jobs(bench):
    """Tokens per second of a job: as planned for throughput, over the same plan with one sequence at a time, over the plan that decodes one
    sequence fastest, and over the best plan without streaming with as many sequences."""
    new, count = (4, 4) if bench.shop.small else (NEW, COUNT)
    work = {"prompt": PROMPT, "new": new}
    planned, said = bench.plan("jobs-planned", "--mechanisms", "all", "--objective", "throughput", **work)
    host, _ = bench.plan("jobs-host", "--mechanisms", "resident,cpu", "--objective", "throughput", **work)
    single, _ = bench.plan("jobs-single", "--mechanisms", "all", "--objective", "decode", **work)
    sides = {
        "together": lambda: run(bench, planned, new, count),
        # Batched rows take hardly longer than one, so all sequences run at once.
        "rounded": lambda: run(bench, planned, new, count, count, rows="on"),
        "alone": lambda: run(bench, planned, new, ALONE, 1),
        "single": lambda: run(bench, single, new, ALONE, 1),
        "host": lambda: run(bench, host, new, count),
        "host rounded": lambda: run(bench, host, new, count, count, rows="on"),
    }
    runs = measure.in_turns(bench.shop.rounds, **sides)
    rate = {side: [each["rate"] for each in runs[side]] for side in sides}
    at_once = sorted({each["sequences"] for each in runs["together"]})
    name = f"job of {count} prompts, {'/'.join(map(str, at_once))} at once, {new} tokens each, {bench.dtype}"
    rows = [
        compared(f"{name}: as planned over one at a time", rate["together"], rate["alone"], 4, "tok/s"),
        compared(f"{name}: as planned over the plan for one sequence, one at a time", rate["together"], rate["single"], 1, "tok/s"),
        compared(f"{name}: as planned over the best plan without streaming", rate["together"], rate["host"], 1, "tok/s"),
        compared(f"{name}: as planned over the best plan without streaming, both with --row-batching on", rate["rounded"],
                 rate["host rounded"], 1, "tok/s"),
        compared(f"{name}: --row-batching on over exact", rate["rounded"], rate["together"], None, "tok/s"),
    ]
    together, alone = runs["together"][-1]["answers"], runs["alone"][-1]["answers"]
    same = sum(together[number] == tokens for number, tokens in alone.items())
    rows.append(row(f"{name}: answers as alone", f"{same} of {len(alone)}", "", "", "all", same == len(alone)))
    batched = ", ".join(f"{side} {sum(each['batched'] for each in runs[side]) // len(runs[side])}" for side in sides if side not in ("alone", "single"))
    rows.append(row(f"{name}: tokens computed as rows of a batch, of {count * new}", batched, "", "", "reported"))
    passes = "; ".join(f"{side} {runs[side][-1]['first']:.0f} and {runs[side][-1]['later']:.1f} ms" for side in sides)
    rows.append(row(f"{name}: the first pass and the median of the later ones", passes, "", "", "reported"))
    rows.append(accuracy(f"{name}, as planned", said["predictions"]["throughput"]["tokens_per_second"], rate["together"], "tok/s"))
    return rows


def run(bench, plan, new, count, at_once=None, rows="exact"):
    """A job's tokens per second without loading, the most sequences at once, its answers by number, and the milliseconds of its passes."""
    prompts, answers = os.path.join(OUT, "gpu-prompts.jsonl"), os.path.join(OUT, "gpu-answers.jsonl")
    if os.path.exists(answers):
        os.remove(answers)
    numbers = random.Random(7)
    with open(prompts, "w", encoding="utf-8") as out:
        for number in range(count):
            tokens = [numbers.randrange(1, VOCABULARY) for _ in range(PROMPT)]
            out.write(json.dumps({"id": number, "tokens": tokens, "max_new": new, "ignore_eos": True, "temperature": 0}) + "\n")
    limited = ("--max-sequences", at_once) if at_once else ()
    trace = f"{plan}.jobs.json"
    summary = bench.shop.exec_json("jobs", plan, "--in", prompts, "--out", answers, "--row-batching", rows, "--providers",
                                   f"{bench.provider},cpu", "--trace", trace, *limited)
    if summary["errors"]:
        raise measure.Failed(f"a job failed: {summary}")
    with open(answers, encoding="utf-8") as file:
        told = {line["id"]: line["tokens"] for line in map(json.loads, file)}
    first, *later = timeline.passes(trace)
    return {"rate": summary["tokens"] / summary["seconds"], "sequences": summary["sequences"], "answers": told, "batched": summary["batched_rows"],
            "first": first, "later": statistics.median(later)}
