"""llama.cpp on models of the same shapes: in memory, under a memory limit, with several sequences in a batch, with experts, and its server.

The weights differ, since no tool converts random ones to GGUF; their distribution is the same."""

import json
import os
import shutil
import sys

import disk
import experts
import jobs
import measure
import speculation
import speed
from limit import Limit
from table import compared
from workshop import OUT

HERE = os.path.dirname(os.path.abspath(__file__))
KINDS = {"int4": "q4_0", "fp32": "f32"}
# Of 8 sequences, by the share of the model's size as memory.
SEQUENCES, WANTED_BATCH = 8, {0.5: 2, 0.25: 1.5}
WANTED_EXPERTS = {"uniform": 1.5, "skewed": 2}


def gguf(name, *options):
    """A model in GGUF by its name, with the options of `hpp-fixtures llama`; made if it is missing."""
    path = os.path.join(OUT, "models", f"{name}.gguf")
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        measure.run([sys.executable, os.path.join(HERE, "write_gguf.py"), f"{path}.part", *options])
        os.replace(f"{path}.part", path)
    return path


def decoder(shop, dtype):
    """The decoder of the speed measurements in GGUF."""
    return gguf(f"llama-{4 if shop.small else 24}-{dtype}", *shop.decoder_shape(dtype))


def run(shop, model, limit, *options):
    """A run of llama.cpp; under a memory limit with its weights as they are in the file and a cold page cache."""
    command = [sys.executable, os.path.join(HERE, "run_llama_cpp.py"), model, "--threads", shop.threads, *options]
    if limit is None:
        said = measure.run(command)["stdout"]
    else:
        # llama.cpp is killed with repacked 4-bit weights, which are not mapped.
        disk.forget(os.path.dirname(model))
        with Limit(limit) as group:
            said = measure.run(group.command([*command, "--mapped"]))["stdout"]
    return json.loads(said.strip().splitlines()[-1])


def in_memory(shop):
    """Decode and prefill with all weights in memory; reported without a target."""
    rows = []
    for dtype, kind in KINDS.items():
        plan, model = speed.plan_of(shop, dtype, 1), decoder(shop, dtype)
        sizes = ("--prompt", speed.PROMPT, "--new", speed.NEW, "--context", speed.CONTEXT)
        runs = measure.in_turns(shop.rounds, ours=lambda: speed.ours(shop, plan), theirs=lambda: run(shop, model, None, *sizes))
        decode = [measure.values(runs[side], "decode") for side in ("ours", "theirs")]
        prefill = [[speed.PROMPT / seconds for seconds in measure.values(runs[side], "ttft")] for side in ("ours", "theirs")]
        for what, sides in (("decode", decode), ("prefill", prefill)):
            rows.append(compared(f"{what} beside llama.cpp, {dtype} and {kind}", *sides, None, "tok/s"))
    return rows


def large_models(shop):
    """The name of each element type, the model and its counterpart, larger than the memory they may use."""
    for dtype, (name, shape) in disk.large_shapes(shop).items():
        yield f"{dtype} and {KINDS[dtype]}", shop.model(name, *shape), gguf(name, *shape)


def from_disk(shop):
    """Decode under the same limits."""
    rows = []
    for what, model, theirs in large_models(shop):
        for part, wanted in ((0.5, 1.5), (0.25, 1.2)):
            limit = disk.limit_of(model, part)
            plan, _ = shop.split(model, f"llama-cpp/disk-{part}", "--context", disk.CONTEXT, "--ram", f"{limit - disk.KERNEL}B",
                                 "--prompt-tokens", disk.PROMPT)
            # Weights are prepared once, before the measurements.
            disk.bench(shop, plan, None)
            sizes = ("--prompt", disk.PROMPT, "--new", disk.NEW, "--context", disk.CONTEXT)
            runs = measure.in_turns(shop.rounds, ours=lambda: disk.cold(shop, model, plan, limit),
                                    theirs=lambda: run(shop, theirs, limit, *sizes))
            rows.append(compared(f"decode with {part:.0%} of the model's size as memory, {what}: over llama.cpp",
                                 list(map(disk.speed, runs["ours"])), measure.values(runs["theirs"], "decode"), wanted, "tok/s"))
    return rows


def in_a_batch(shop):
    """`hpp-exec jobs` with 8 sequences over llama.cpp with the same prompts in one batch, under the same limits."""
    rows = []
    for what, model, theirs in large_models(shop):
        for part, wanted in WANTED_BATCH.items():
            plan, limit = jobs.plan_under(shop, model, f"llama-cpp/{part}", part)
            prompts = jobs.prompts(SEQUENCES, jobs.NEW)
            runs = measure.in_turns(shop.rounds, ours=lambda: jobs.run(shop, model, plan, limit, SEQUENCES),
                                    theirs=lambda: run(shop, theirs, limit, "--batch", prompts, "--context", jobs.CONTEXT))
            rows.append(compared(f"{SEQUENCES} sequences, {part:.0%} of the model's size as memory, {what}: over llama.cpp with one batch",
                                 runs["ours"], measure.values(runs["theirs"], "tokens_per_second"), wanted, "tok/s"))
    return rows


def with_experts(shop):
    """Decode of a mixture with RAM for a quarter of it; llama.cpp maps its file, so the system decides which experts stay in memory."""
    rows = []
    for router, wanted in WANTED_EXPERTS.items():
        model, theirs = experts.model_of(shop, router), gguf(experts.name_of(shop, router), *experts.shape(shop, router))
        limit = disk.limit_of(model, experts.PART)
        plan, _ = shop.split(model, f"llama-cpp/{router}", *experts.options_under(limit))
        # Weights are prepared once, before the measurements.
        speculation.tokens_per_second(shop, plan, None, experts.PROMPT)
        sizes = ("--prompt", experts.PROMPT_TOKENS, "--new", experts.NEW, "--context", disk.CONTEXT, "--drawn")
        runs = measure.in_turns(shop.rounds, ours=lambda: speculation.tokens_per_second(shop, plan, limit, experts.PROMPT)[0],
                                theirs=lambda: run(shop, theirs, limit, *sizes)["decode"])
        rows.append(compared(f"{router} routers, 25 % of the size as memory: experts by demand over llama.cpp with mmap", runs["ours"],
                             runs["theirs"], wanted, "tok/s"))
        shutil.rmtree(plan)
    return rows + experts_in_memory(shop, "skewed")


def experts_in_memory(shop, router):
    """Decode and prefill of a mixture with all weights in memory. llama.cpp rounds activations to 8 bits, as `--int8-activations` does."""
    model, theirs = experts.model_of(shop, router), gguf(experts.name_of(shop, router), *experts.shape(shop, router))
    sides = {"int8": ("--int8-activations",), "exported": ()}
    plans = {side: shop.split(model, f"llama-cpp/{side}", "--context", experts.LONG_CONTEXT, *options)[0] for side, options in sides.items()}
    sizes = ("--prompt", experts.LONG_PROMPT, "--new", experts.NEW, "--context", experts.LONG_CONTEXT, "--drawn")
    runs = measure.in_turns(shop.rounds, theirs=lambda: run(shop, theirs, None, *sizes),
                            **{side: lambda plan=plan: experts.in_memory(shop, plan) for side, plan in plans.items()})
    decode, ttft = (measure.values(runs["theirs"], value) for value in ("decode", "ttft"))
    rows = []
    for side, what in (("int8", "with --int8-activations"), ("exported", "activations as exported")):
        speeds, prompts = zip(*runs[side])
        rows.append(compared(f"mixture in memory, {what}: decode over llama.cpp", speeds, decode, None, "tok/s"))
        rows.append(compared(f"mixture in memory, {what}: prefill of {experts.LONG_PROMPT} tokens over llama.cpp", prompts,
                             [experts.LONG_PROMPT / seconds for seconds in ttft], None, "tok/s"))
    for plan in plans.values():
        shutil.rmtree(plan)
    return rows
