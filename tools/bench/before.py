"""This build against an earlier one (`--before DIR`, its binaries): what a change costs or gains, each side with plans of its own."""

import copy

import disk
import experts
import measure
import speculation
import speed
from splitting import huge_model
from table import compared

TARGET = 0.99


def earlier_build(shop):
    """The same workshop with the earlier build's binaries."""
    if shop.before is None:
        raise measure.Failed("name the directory of the earlier build's binaries with --before DIR")
    earlier = copy.copy(shop)
    earlier.target = shop.before
    return earlier


def against_before(shop):
    earlier, rows = earlier_build(shop), []
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


def together(shop):
    """Decoding with a quarter of the model's size as memory, each build with what it does about that: the earlier one with its defaults, this
    one with a draft of the model itself, compressed copies, and experts by demand. The same tokens are required."""
    earlier = earlier_build(shop)
    learned = speculation.grown(shop, "fp32")
    # The large one, 6 GB, takes half an hour.
    small = copy.copy(shop)
    small.small = True
    mixture = experts.model_of(small, "skewed")
    rounded = shop.model(*disk.rounded(shop))
    cases = [
        # A quarter of this model holds the draft only without the kernel's share.
        ("trained Llama of 1.8 GB in fp32, with a draft of itself", learned, speculation.PROSE, speculation.LONG_CONTEXT, speculation.LONG, 0,
         ("--draft", "int4", "--draft-block", 64)),
        ("mixture of 1.6 GB, 128 experts in int4, skewed router", mixture, experts.PROMPT, disk.CONTEXT, experts.NEW, disk.KERNEL, ()),
        # The planner compresses only with a profile that measured the disk.
        ("random Llama of 2.8 GB in fp32 of bf16 precision, compressed copies", rounded, experts.PROMPT, disk.CONTEXT, experts.NEW, disk.KERNEL,
         ("--compress", "always")),
    ]
    return [case(shop, earlier, *about) for about in cases]


def case(shop, earlier, what, model, prompt, context, new, kernel, more):
    """One model: tokens per second of both builds in turn, from a cold page cache."""
    limit, sides, tokens = disk.limit_of(model, 0.25), {}, {}
    for side, name, options in ((shop, "now", more), (earlier, "before", ())):
        plan, _ = side.split(model, f"together/{name}", "--context", context, "--ram", f"{limit - kernel}B", "--prompt-tokens", 64,
                             "--new-tokens", new, *options)
        # Prepared weights and copies are written once, before anything is measured.
        _, answer = speculation.tokens_per_second(side, plan, None, prompt, new=new)
        tokens[name] = answer["tokens"]
        sides[name] = lambda side=side, plan=plan: speculation.tokens_per_second(side, plan, limit, prompt, new=new)[0]
    if tokens["now"] != tokens["before"]:
        raise measure.Failed(f"{what}: the builds answer differently")
    runs = measure.in_turns(shop.rounds, **sides)
    return compared(f"decode with 25% of the model's size as memory over the earlier build, {what}", runs["now"], runs["before"], None, "tok/s")
