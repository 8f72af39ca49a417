"""Many sequences in one walk through streamed weights: tokens per second of `hpp-exec jobs` by the number of sequences at once."""

import contextlib
import json
import os
import random
import statistics

import disk
import measure
import planning
from limit import Limit
from rounds import Rounds, ratios
from table import compared, row
from workshop import OUT

PROMPT, NEW = 16, 12
# Of the models of all measurements, `--small` included.
SMALLEST_VOCABULARY = 8000
# Tokens of a prompt and its answer: KV caches take memory that weights would have.
CONTEXT = 64
SEQUENCES = (1, 2, 4, 8, 16)
# At 8 sequences over one, by element type and share of the model's size as memory.
WANTED = {("int4", 0.5): 4, ("int4", 0.25): 6, ("fp32", 0.5): 6, ("fp32", 0.25): 7}
# Batched rows with all weights in memory: tokens of each answer, and 8 sequences over the same without batching.
ROWS_NEW, WANTED_ROWS = 48, {"int4": 2, "fp32": 4}
# Further tokens of longer answers, whose time is that of as many passes; sequences whose passes are predicted, and how well.
MORE, PREDICTED, WANTED_ERROR = 24, (1, 8), 0.2
# float32 rows from disk in one product whose sums round differently, which users may ask for.
ROUNDED = (8, 16)
# Prompts of a whole job, and what it must gain over one prompt after the other, of which every `MEASURED`th is measured.
JOB, MEASURED, WANTED_JOB = 256, 32, {"int4": 6, "fp32": 10}


def prompts(count, new, every=1):
    """A file of every `every`th of `count` prompts of different lengths, about `PROMPT` tokens each, and the answers' length."""
    path = os.path.join(OUT, f"prompts-{count}-{new}-{every}.jsonl")
    chosen = random.Random(count)
    with open(path, "w", encoding="utf-8") as out:
        for number in range(count):
            tokens = [chosen.randrange(1, SMALLEST_VOCABULARY) for _ in range(chosen.randrange(PROMPT // 2, PROMPT * 3 // 2))]
            if number % every == 0:
                out.write(json.dumps({"id": number, "tokens": tokens, "max_new": new, "ignore_eos": True, "temperature": 0}) + "\n")
    return path


def run(shop, model, plan, limit, sequences, count=None, new=NEW, rows="exact", every=1):
    """Answers every `every`th of `count` prompts, `sequences` at once, under a memory limit, with a cold page cache; tokens per second without
    loading."""
    answers = os.path.join(OUT, "answers.jsonl")
    if os.path.exists(answers):
        os.remove(answers)
    disk.forget(model, plan)
    command = [shop.binary("hpp-exec"), "jobs", plan, "--in", prompts(count or sequences, new, every), "--out", answers, "--json",
               "--max-sequences", sequences, "--row-batching", rows, "--threads", shop.threads, "--quiet"]
    with Limit(limit) if limit else contextlib.nullcontext() as group:
        summary = json.loads(measure.run(group.command(command) if group else command)["stdout"])
    if summary["sequences"] != sequences or summary["errors"]:
        raise measure.Failed(f"{sequences} sequences were asked for: {summary}")
    return summary["tokens"] / summary["seconds"]


def plan_under(shop, model, name, part):
    """A plan for a share of the model's size as memory, with its weights prepared, and the limit."""
    limit = disk.limit_of(model, part)
    options = ("--context", CONTEXT, "--ram", f"{limit - disk.KERNEL}B", "--prompt-tokens", PROMPT, "--new-tokens", NEW)
    plan, _ = shop.split(model, f"jobs/{name}", *options)
    run(shop, model, plan, None, 1)
    return plan, limit


def under(shop, dtype, model, part):
    """The rows of one model and one limit."""
    plan, limit = plan_under(shop, model, f"{dtype}-{part}", part)
    sides = {str(count): lambda count=count: run(shop, model, plan, limit, count) for count in SEQUENCES}
    rounded = ROUNDED if dtype == "fp32" else ()
    sides |= {f"{count} on": lambda count=count: run(shop, model, plan, limit, count, rows="on") for count in rounded}
    runs = measure.in_turns(shop.rounds, **sides)
    what = f"{part:.0%} of the model's size as memory, {dtype}"
    rows = [
        compared(f"{count} sequences over 1, {what}", runs[str(count)], runs["1"], WANTED[dtype, part] if count == 8 else None, "tok/s")
        for count in SEQUENCES[1:]
    ]
    for count in rounded:
        on = runs[f"{count} on"]
        rows.append(compared(f"{count} sequences over 1, --row-batching on, {what}", on, runs["1"], WANTED[dtype, part] if count == 8 else None,
                             "tok/s"))
        rows.append(compared(f"{count} sequences, --row-batching on over exact, {what}", on, runs[str(count)], None, "tok/s"))
    steps = [ratios(runs[str(more)], runs[str(fewer)]).median for fewer, more in zip(SEQUENCES, SEQUENCES[1:])]
    rows.append(row(f"each doubling of the sequences, {what}", ", ".join(f"{step:.2f}x" for step in steps), "", "", "rising",
                    min(steps) > 1))
    return rows


def many_sequences(shop):
    rows = []
    for dtype, model in disk.large_models(shop):
        for part in (0.5, 0.25):
            rows += under(shop, dtype, model, part)
    return rows


def whole_jobs(shop):
    """Jobs of many prompts with RAM for 25 % of the model."""
    rows = []
    for dtype, model in disk.large_models(shop):
        plan, limit = plan_under(shop, model, f"{dtype}-0.25", 0.25)
        rows.append(whole_job(shop, dtype, model, plan, limit))
    return rows


def pass_ms(shop, model, plan, limit, sequences):
    """Milliseconds of a pass after the prompts: what longer answers take beyond shorter ones."""
    seconds = [sequences * new / run(shop, model, plan, limit, sequences, new=new) for new in (NEW, NEW + MORE)]
    return 1e3 * (seconds[1] - seconds[0]) / MORE


def predictions(shop):
    """Passes of one and of several sequences from disk: predicted with a quick profile of the same minutes, over measured."""
    results = []
    for dtype, model in disk.large_models(shop):
        for part in (0.5, 0.25):
            limit = disk.limit_of(model, part)
            profile = os.path.join(OUT, f"jobs-profile-{dtype}.yaml")
            measure.run([shop.binary("hpp-profile"), model, "--quick", "--providers", "cpu", "--out", profile, "--force", "--threads",
                         shop.threads, "--quiet"])
            options = ("--profile", profile, "--context", CONTEXT, "--ram", f"{limit - disk.KERNEL}B", "--prompt-tokens", PROMPT,
                       "--new-tokens", NEW + MORE)
            plan, _ = shop.split(model, f"jobs/predicted-{dtype}-{part}", *options)
            passes = planning.dry_run(shop, model, *options)["plan"]["predictions"]["throughput"]["passes"]
            said = {each["sequences"]: each["ms"] for each in passes if each["tokens"] == 1}
            run(shop, model, plan, None, 1)
            runs = measure.in_turns(shop.rounds, **{
                str(count): lambda count=count: pass_ms(shop, model, plan, limit, count) for count in PREDICTED
            })
            for count in PREDICTED:
                over = Rounds(said[count] / took for took in runs[str(count)])
                results.append(row(
                    f"pass of {count} sequences, predicted over measured, {part:.0%} of the model's size as memory, {dtype}",
                    f"{said[count]:.0f} ms", f"{statistics.median(runs[str(count)]):.0f} ms", over.text(2, "x"), f"within {WANTED_ERROR:.0%}",
                    over.verdict(at_least=1 - WANTED_ERROR, at_most=1 + WANTED_ERROR)))
    return results


def batched_rows(shop):
    """All weights in memory: the tokens of 8 and of 16 sequences as rows of one run, over one sequence after the other."""
    results = []
    for dtype in ("int4", "fp32"):
        model = shop.decoder(dtype)
        plan, _ = shop.split(model, f"rows/{dtype}", "--context", 256)
        for count in (8, 16):
            job = lambda how, count=count, plan=plan, model=model: run(shop, model, plan, None, count, new=ROWS_NEW, rows=how)
            runs = measure.in_turns(shop.rounds, exact=lambda: job("exact"), off=lambda: job("off"))
            results.append(compared(f"{count} sequences in memory, rows of one run over one after the other, {dtype}", runs["exact"],
                                    runs["off"], WANTED_ROWS[dtype] if count == 8 else None, "tok/s"))
    return results


def whole_job(shop, dtype, model, plan, limit):
    """A job of many prompts over the same prompts one after the other, of which a part is measured. float32 rows are computed together, which
    rounds differently: computing them one by one is a row of `under`."""
    rows = "on" if dtype == "fp32" else "exact"
    runs = measure.in_turns(min(shop.rounds, 3), together=lambda: run(shop, model, plan, limit, 16, JOB, rows=rows),
                            alone=lambda: run(shop, model, plan, limit, 1, JOB, every=MEASURED))
    rate = statistics.median(runs["together"])
    what = f"{JOB} prompts as a job (rows {rows}) over {JOB // MEASURED} of them one after the other"
    result = compared(f"{what}, 25% of the model's size as memory, {dtype}", runs["together"], runs["alone"], WANTED_JOB[dtype], "tok/s")
    result["result"] += f", {JOB * NEW / rate:.0f} s"
    return result
