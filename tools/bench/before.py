"""This build against an earlier one (`--before DIR`, its binaries): what a change costs or gains, each side with plans of its own."""

import copy

import disk
import measure
import speed
from splitting import huge_model
from table import compared

TARGET = 0.99


def against_before(shop):
    if shop.before is None:
        raise measure.Failed("before: name the directory of the earlier build's binaries with --before DIR")
    earlier = copy.copy(shop)
    earlier.target = shop.before
    rows = []
    for dtype in ("int4", "fp32"):
        for partitions in (1, 8):
            rows += in_memory(shop, earlier, dtype, partitions)
    for dtype, model in disk.large_models(shop):
        for part in (0.5, 0.25):
            rows.append(from_disk(shop, earlier, (dtype, model), part))
    rows.append(planning(shop, earlier))
    return rows


def in_memory(shop, earlier, dtype, partitions):
    """Decode and first token of the decoder of 350 M parameters."""
    plans = [speed.plan_of(side, dtype, partitions, name) for side, name in ((shop, "speed"), (earlier, "before"))]
    runs = measure.in_turns(shop.rounds, now=lambda: speed.ours(shop, plans[0]), before=lambda: speed.ours(earlier, plans[1]))
    decode, first = ([measure.values(runs[side], key) for side in ("now", "before")] for key in ("decode", "ttft"))
    where = f"{dtype}, {partitions} partition{'s' if partitions > 1 else ''}"
    return [
        compared(f"decode over the earlier build, {where}", *decode, TARGET, "tok/s"),
        compared(f"time to first token over the earlier build, {where}", *first, TARGET, "s", smaller_is_better=True),
    ]


def from_disk(shop, earlier, model, part):
    """Decode under a memory limit."""
    dtype, path = model
    limit = disk.limit_of(path, part)
    sides = {}
    for side, name in ((shop, "now"), (earlier, "before")):
        plan, _ = side.split(path, f"before/{dtype}-{part}-{name}", *disk.plan_options(limit))
        # Weights in the kernels' layout are written once, before anything is measured.
        disk.bench(side, plan, None)
        sides[name] = lambda side=side, plan=plan: disk.speed(disk.cold(side, path, plan, limit))
    runs = measure.in_turns(shop.rounds, **sides)
    what = f"decode with {part:.0%} of the model's size as memory over the earlier build, {dtype}"
    return compared(what, runs["now"], runs["before"], TARGET, "tok/s")


def planning(shop, earlier):
    """Wall time of hpp-split on the 65 GB model, planning with streaming included."""
    model = huge_model(shop)
    sides = {name: lambda side=side, name=name: side.split(model, f"before/huge-{name}", "--vram", "8G", "--mechanisms", "all")[1]["seconds"]
             for side, name in ((shop, "now"), (earlier, "before"))}
    runs = measure.in_turns(shop.rounds, **sides)
    return compared("hpp-split on 65 GB over the earlier build", runs["now"], runs["before"], TARGET, "s", smaller_is_better=True)
