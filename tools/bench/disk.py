"""Models larger than memory: decode speed under a memory limit, compared with the disk's rate and with plain mmap."""

import ctypes
import json
import mmap
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import measure
from limit import Limit, ReadRate
from rounds import Rounds
from table import compared, row
from workshop import OUT

PROMPT, NEW, CONTEXT = 64, 12, 256
SHAPES = {
    "int4": ("--layers", 32, "--hidden", 2048, "--intermediate", 5632, "--heads", 32, "--kv-heads", 8, "--vocab", 32000,
             "--context", 2048, "--dtype", "int4"),
    "fp32": ("--layers", 24, "--hidden", 1536, "--intermediate", 4096, "--heads", 24, "--kv-heads", 8, "--vocab", 32000,
             "--context", 2048, "--dtype", "fp32"),
}
# Smaller models are useless here: the process itself would take most of the limit.
SMALL = {
    "fp32": ("--layers", 24, "--hidden", 1024, "--intermediate", 2816, "--heads", 16, "--kv-heads", 8, "--vocab", 32000,
             "--context", 2048, "--dtype", "fp32"),
}
# The part of the limit for kernel memory and pages of programs.
KERNEL = 16 << 20
# Bytes per second of a disk slower than the machine's own.
SLOW_DISK = int(1e9)
BLOCK, AT_ONCE = 2 << 20, 8


def direct_rate(path, seconds=1.5):
    """Bytes per second of sequential direct reads into huge pages, several in flight: the highest rate of this disk."""
    size, stop = os.path.getsize(path), time.monotonic() + seconds
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(first):
        # mmap's default is shared memory, which has no huge pages; disks fill huge pages twice as fast.
        memory, at, done = mmap.mmap(-1, 2 * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), first * BLOCK, 0
        memory.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        block = memoryview(memory)[-address % BLOCK:][:BLOCK]
        while time.monotonic() < stop:
            done += os.preadv(file, [block], at)
            at = at + AT_ONCE * BLOCK if at + (AT_ONCE + 1) * BLOCK < size else first * BLOCK
        return done

    try:
        start = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as threads:
            done = sum(threads.map(read, range(AT_ONCE)))
        return done / (time.monotonic() - start)
    finally:
        os.close(file)


def forget(*folders):
    """Drops the page cache, so that no run profits from the reads of another."""
    for folder in folders:
        for path, _, names in os.walk(folder):
            for name in names:
                file = os.open(os.path.join(path, name), os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)


def bench(shop, plan, limit, *options):
    """One `hpp-exec bench` with one measured run after a warm-up run, under a limit if there is one: bytes of memory, or a `Limit`."""
    command = [shop.binary("hpp-exec"), "bench", plan, "--prompt-tokens", PROMPT, "--new-tokens", NEW, "--runs", 1, "--json",
               "--threads", shop.threads, "--quiet", *options]
    if limit is None:
        return json.loads(measure.run(command)["stdout"])
    with limit if isinstance(limit, Limit) else Limit(limit) as group:
        return json.loads(measure.run(group.command(command))["stdout"])


def speed(answer):
    return answer["decode_tokens_per_second"]["median"]


def weight_file(model):
    return os.path.join(model, "model.onnx.data")


def limit_of(model, part):
    """A share of the model's weights, in bytes: the memory limit of a run."""
    return int(os.path.getsize(weight_file(model)) * part)


def plan_options(limit):
    """What hpp-split is told for a run under `limit` bytes."""
    return ("--context", CONTEXT, "--ram", f"{limit - KERNEL}B", "--prompt-tokens", PROMPT, "--new-tokens", NEW)


def cold(shop, model, plan, limit, *options):
    """A run under a limit that finds nothing in the page cache."""
    forget(model, plan)
    return bench(shop, plan, limit, *options)


def large_shapes(shop):
    """Names and shapes of models, by element type."""
    suffix = "-small" if shop.small else ""
    return {dtype: (f"large-{dtype}{suffix}", shape) for dtype, shape in (SMALL if shop.small else SHAPES).items()}


def large_models(shop):
    """Pairs of element type and model."""
    return [(dtype, shop.model(name, *shape)) for dtype, (name, shape) in large_shapes(shop).items()]


def larger_than_memory(shop):
    rows = []
    for dtype, model in large_models(shop):
        whole, _ = shop.split(model, f"disk/{dtype}-whole", "--context", CONTEXT)
        compute = 1 / speed(bench(shop, whole, None))
        measured = profiled(shop, dtype, model)
        for part in (0.5, 0.25):
            rows += under(shop, (dtype, model), part, compute, measured)
    return rows


def profiled(shop, dtype, model, *options):
    """A quick profile of this machine and model, for plans that know the disk's rate."""
    path = os.path.join(OUT, f"profile-large-{dtype}.yaml")
    measure.run([shop.binary("hpp-profile"), model, "--quick", "--providers", "cpu", "--contexts", PROMPT, "--prefill-tokens",
                 f"16,{PROMPT}", "--out", path, "--force", "--threads", shop.threads, "--quiet", *options])
    return path


def under(shop, model, part, compute, measured):
    """The rows of one model and one limit; `measured` is a profile."""
    dtype, model = model
    data, limit = weight_file(model), limit_of(model, part)
    what = f"decode with {part:.0%} of the model's size as memory, {dtype}"
    asked = (*plan_options(limit), "--profile", measured)
    plan, _ = shop.split(model, f"disk/{dtype}-{part}", *asked)
    expected = json.loads(measure.run([shop.binary("hpp-split"), model, "--dry-run", "--json", *asked])["stdout"])
    expected = expected["predictions"]["decode_ms"]
    # Weights are prepared once, before the measurements.
    bench(shop, plan, None)
    rates = []

    def streamed():
        # The bound of this round is the disk's rate, measured before and after.
        before = direct_rate(data)
        answer = cold(shop, model, plan, limit)
        rates.append((before + direct_rate(data)) / 2)
        return answer

    def mapped():
        return cold(shop, model, plan, limit, "--weights", "mapped")

    runs = measure.in_turns(shop.rounds, ours=streamed, theirs=mapped)
    mine, other = list(map(speed, runs["ours"])), list(map(speed, runs["theirs"]))
    read = runs["ours"][-1]["disk"]["bytes"] / NEW
    bounds = [1 / max(compute, read / rate) for rate in rates]
    over_bound = compared(f"{what}: over the bound", mine, bounds, 0.9, "tok/s")
    over_bound["result"] += f", {read / 2**20:.0f} MiB a token, disk {statistics.median(rates) / 1e9:.2f} GB/s"
    predicted = 1000 / expected
    error = Rounds(predicted / measured - 1 for measured in mine)
    return [
        over_bound,
        compared(f"{what}: over plain mmap", mine, other, 1.8 if part == 0.5 else 1.25, "tok/s"),
        row(f"{what}: predicted with a quick profile", f"{predicted:.3g} tok/s", f"{statistics.median(mine):.3g} tok/s",
            f"{error.median:+.0%} ({error.spread[0]:+.0%} to {error.spread[1]:+.0%})", "within 15 %", error.verdict(-0.15, 0.15)),
    ]


def rounded(shop):
    """Name and shape of the float32 model whose weights have the precision of bfloat16."""
    name, shape = large_shapes(shop)["fp32"]
    return (name.replace("fp32", "fp32-bf16"), *shape, "--rounded", "bf16")


def compressed(shop):
    """float32 weights of bfloat16 precision from disk: compressed as the planner decides, over reading them as they are."""
    model = shop.model(*rounded(shop))
    limit, measured, rows = limit_of(model, 0.25), profiled(shop, "fp32-bf16", model), []
    sides = {}
    for side in ("auto", "never"):
        asked = (*plan_options(limit), "--profile", measured, "--compress", side)
        plan, _ = shop.split(model, f"disk/compressed-{side}", *asked)
        expected = json.loads(measure.run([shop.binary("hpp-split"), model, "--dry-run", "--json", *asked])["stdout"])
        # Copies are written once, before the measurements.
        bench(shop, plan, None)
        sides[side] = (plan, 1000 / expected["predictions"]["decode_ms"])
    runs = measure.in_turns(shop.rounds, **{side: lambda plan=plan: cold(shop, model, plan, limit) for side, (plan, _) in sides.items()})
    what = "decode with 25% of the model's size as memory, fp32 of bf16 precision"
    on, off = (list(map(speed, runs[side])) for side in ("auto", "never"))
    over = compared(f"{what}: compressed over plain", on, off, 1.25, "tok/s")
    read = [runs[side][-1]["disk"]["bytes"] / NEW / 2**20 for side in ("auto", "never")]
    over["result"] += f", {read[0]:.0f} and {read[1]:.0f} MiB a token"
    rows.append(over)
    for side, values in (("auto", on), ("never", off)):
        predicted = sides[side][1]
        error = Rounds(predicted / measured - 1 for measured in values)
        rows.append(row(f"{what}, --compress {side}: predicted with a quick profile", f"{predicted:.3g} tok/s",
                        f"{statistics.median(values):.3g} tok/s",
                        f"{error.median:+.0%} ({error.spread[0]:+.0%} to {error.spread[1]:+.0%})", "within 15 %", error.verdict(-0.15, 0.15)))
    rows.append(compressed_on_slow_disk(shop, model, limit, sides["never"][0], what))
    return rows


def compressed_on_slow_disk(shop, model, limit, plain, what):
    """Copies over none with the rate of reads limited, whatever the planner decides for the disk as it is."""
    always, _ = shop.split(model, "disk/compressed-always", *plan_options(limit), "--compress", "always")
    bench(shop, always, None)
    slow = ReadRate(model, SLOW_DISK, limit)
    what = f"{what}, reads limited to {SLOW_DISK / 1e9:.1f} GB/s: compressed over plain"
    try:
        runs = measure.in_turns(shop.rounds, always=lambda: cold(shop, model, always, slow), never=lambda: cold(shop, model, plain, slow))
    except OSError as error:
        return row(what, result=f"no read rate can be set here: {error}")
    return compared(what, *(list(map(speed, runs[side])) for side in ("always", "never")), 1.25, "tok/s")


def model_that_fits(shop):
    """A plan with a memory budget that holds everything, over one without a budget: the overhead of the tiers if they are not needed."""
    rows = []
    for dtype in ("int4", "fp32"):
        model = shop.decoder(dtype)
        plain, _ = shop.split(model, f"disk/{dtype}-plain", "--context", CONTEXT)
        tiers, _ = shop.split(model, f"disk/{dtype}-fits", "--context", CONTEXT, "--ram", "8G")
        runs = measure.in_turns(shop.rounds, plain=lambda plan=plain: bench(shop, plan, None),
                                tiers=lambda plan=tiers: bench(shop, plan, None))
        on, off = (list(map(speed, runs[side])) for side in ("tiers", "plain"))
        rows.append(compared(f"decode of a model that fits, tiers on over off, {dtype}", on, off, 0.99, "tok/s"))
    return rows
