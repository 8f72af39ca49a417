"""A mixture larger than memory: experts read by demand over whole mixtures, and over what the disk allows, with routers that prefer no
expert and with routers that prefer some."""

import json
import os
import shutil
import statistics

import disk
import jobs
import measure
import speculation
from rounds import Rounds
from table import compared, row
from workshop import OUT, ROOT

NEW = speculation.NEW
# 128 experts, 8 of which a token selects, in 4 bits. 6 GB; small 1.6 GB in as many layers, so that the experts of one layer, which always
# have room, are as small a part of the memory.
SHAPE = ("--hidden", 2048, "--intermediate", 768, "--heads", 32, "--kv-heads", 4, "--vocab", 32000, "--layers", 18)
SMALL = ("--hidden", 1024, "--intermediate", 384, "--heads", 16, "--kv-heads", 4, "--vocab", 8000, "--layers", 16)
MIXTURE = ("--context", 2048, "--experts", 128, "--top-k", 8, "--dtype", "int4")
# Uniform: scores are random for each token, the worst case. Skewed: a bias for each expert with 1.5 times their deviation, which gives caches
# for 15, 30 and 50 % of the experts hit rates near those reported for trained mixtures (74, 89 and 96 %).
ROUTERS = {"uniform": (), "skewed": ("--router-skew", 1.5)}
WANTED = {"uniform": 4, "skewed": 8}
# Tokens of a random model repeat each other; drawn at this temperature they are nearly uniform.
PROMPT_TOKENS = 16
TOKENS = [7 * token + 11 for token in range(PROMPT_TOKENS)]
ASKED = ("--tokens", ",".join(map(str, TOKENS)), "--temperature", 5, "--seed")
PROMPT = (*ASKED, 1)
# Other answers to the same prompt, which a profile runs as its corpus.
CORPUS_SEEDS = (2, 3, 4, 5)
# The memory, as a share of the model's size.
PART = 0.25


def by_demand(shop):
    """Decode speed with RAM for a quarter of the model."""
    return [result for router in ROUTERS for result in with_router(shop, router)]


def name_of(shop, router):
    return f"mixture-{'small' if shop.small else 'large'}-{router}"


def shape(shop, router):
    return (*(SMALL if shop.small else SHAPE), *MIXTURE, *ROUTERS[router])


def model_of(shop, router):
    return shop.model(name_of(shop, router), *shape(shop, router))


def options_under(limit):
    """What hpp-split is told for a run under `limit` bytes."""
    return ("--context", disk.CONTEXT, "--ram", f"{limit - disk.KERNEL}B", "--prompt-tokens", PROMPT_TOKENS, "--new-tokens", NEW)


def with_router(shop, router):
    model = model_of(shop, router)
    limit = disk.limit_of(model, PART)
    options = options_under(limit)
    plans = {side: shop.split(model, f"experts/{router}-{side}", *options, "--experts", side)[0] for side in ("auto", "all")}
    whole, _ = shop.split(model, f"experts/{router}-whole", "--context", disk.CONTEXT)
    _, right = speculation.tokens_per_second(shop, whole, None, PROMPT)
    for plan in plans.values():
        # Weights are prepared once, before the measurements.
        speculation.tokens_per_second(shop, plan, None, PROMPT)
    # The prompt selects nearly all experts; its reads, and those of the first pass after it, are no part of the bound on decoding.
    _, prompt = speculation.tokens_per_second(shop, plans["auto"], limit, PROMPT, new=2)
    of_prompt = prompt["timings"]["disk"]
    rates = []

    def run(plan):
        before = disk.direct_rate(disk.weight_file(model))
        speed, answer = speculation.tokens_per_second(shop, plan, limit, PROMPT)
        if answer["tokens"] != right["tokens"]:
            raise measure.Failed("a mixture from disk gave other tokens than from memory")
        rates.append((before + disk.direct_rate(disk.weight_file(model))) / 2)
        return speed, answer, rates[-1]

    runs = measure.in_turns(shop.rounds, auto=lambda: run(plans["auto"]), all=lambda: run(plans["all"]),
                            memory=lambda: speculation.tokens_per_second(shop, whole, None, PROMPT))
    mine, other, computing = ([speed for speed, *_ in runs[side]] for side in ("auto", "all", "memory"))
    used = runs["auto"][-1][1]["timings"]["disk"]
    hits, misses = (used["experts"][count] - of_prompt["experts"][count] for count in ("hits", "misses"))

    def bound(compute, answer, rate):
        read = answer["timings"]["disk"]["bytes"] - of_prompt["bytes"]
        reading = read / (NEW - 2) / rate
        return 1 / max(1 / compute, reading), 1 / (1 / compute + reading)

    bounds, serial = zip(*(bound(compute, answer, rate) for compute, (_, answer, rate) in zip(computing, runs["auto"])))
    what = f"{router} routers, 25 % of the size as memory"
    over_all = compared(f"{what}: experts by demand over all", mine, other, WANTED[router], "tok/s")
    over_all["result"] += f", {hits / (hits + misses):.0%} of experts in memory"
    over_bound = compared(f"{what}: over the longer of computing and reading", mine, bounds, 0.8, "tok/s")
    over_bound["result"] += f", disk {statistics.median(rates) / 1e9:.2f} GB/s"
    over_sum = compared(f"{what}: over computing and reading one after the other", mine, serial, None, "tok/s")
    in_memory = row(f"{what}: with all weights in memory", f"{statistics.median(computing):.3g} tok/s", "", "", "reported")
    rows = [over_all, over_bound, over_sum, in_memory, eight(shop, what, model, plans["auto"], limit),
            predicted(shop, what, model, options, mine),
            predicted(shop, what, model, options, mine, corpus_of(shop, whole, router))]
    # Prepared weights take as much space as the models.
    for plan in (*plans.values(), whole):
        shutil.rmtree(plan)
    return rows


def eight(shop, what, model, plan, limit):
    """Eight sequences at once over one."""
    sides = {str(count): lambda count=count: jobs.run(shop, model, plan, limit, count) for count in (8, 1)}
    runs = measure.in_turns(shop.rounds, **sides)
    return compared(f"{what}: 8 sequences over 1", runs["8"], runs["1"], 2, "tok/s")


def corpus_of(shop, whole, router):
    """A corpus of other answers than the one that is measured."""
    path = os.path.join(OUT, f"corpus-{router}.jsonl")
    answers = [speculation.tokens_per_second(shop, whole, None, (*ASKED, seed))[1]["tokens"] for seed in CORPUS_SEEDS]
    with open(path, "w", encoding="utf-8") as out:
        out.writelines(json.dumps({"tokens": TOKENS + answer}) + "\n" for answer in answers)
    return path


def predicted(shop, what, model, options, mine, corpus=None):
    """The plan's time of a token with this machine's rates of a quick profile, beside the measured one. Without a corpus the plan assumes
    uniform routers, with one the hit rates of its tokens."""
    prompts = ("--prompts", corpus) if corpus else ()
    profile = disk.profiled(shop, f"mixture-{'small' if shop.small else 'large'}", model, *prompts)
    command = [shop.binary("hpp-split"), model, "--dry-run", "--json", *options, "--profile", profile]
    expected = 1000 / json.loads(measure.run(command)["stdout"])["predictions"]["decode_ms"]
    error = Rounds(expected / measured - 1 for measured in mine)
    return row(f"{what}: predicted with a quick profile{' and a corpus' if corpus else ''}", f"{expected:.3g} tok/s",
               f"{statistics.median(mine):.3g} tok/s", f"{error.median:+.0%} ({error.spread[0]:+.0%} to {error.spread[1]:+.0%})", "within 20 %",
               error.verdict(-0.2, 0.2))


# Tokens of the prompt whose time is measured in memory, and of its context.
LONG_PROMPT, LONG_CONTEXT = 256, 512


def in_integers(shop):
    """`hpp-split --int8-activations` over activations as exported: decode with RAM for a quarter of the model, decode and prefill in memory."""
    router = "skewed"
    model, limit = model_of(shop, router), disk.limit_of(model_of(shop, router), PART)
    sides = {"exported": (), "int8": ("--int8-activations",)}
    places = {"disk": options_under(limit), "memory": ("--context", LONG_CONTEXT)}
    plans = {(place, side): shop.split(model, f"experts/{place}-{side}", *options, *integers)[0]
             for place, options in places.items() for side, integers in sides.items()}
    for side in sides:
        # Weights are prepared once, before the measurements.
        speculation.tokens_per_second(shop, plans["disk", side], None, PROMPT)
    of_disk = measure.in_turns(shop.rounds, **{side: lambda plan=plans["disk", side]: speculation.tokens_per_second(shop, plan, limit, PROMPT)[0]
                                               for side in sides})
    of_memory = measure.in_turns(shop.rounds, **{side: lambda plan=plans["memory", side]: in_memory(shop, plan) for side in sides})
    decode, prefill = ([[speeds[index] for speeds in of_memory[side]] for side in ("int8", "exported")] for index in (0, 1))
    what = f"{router} routers, activations of 8 bits over activations as exported"
    rows = [
        compared(f"{what}: decode with 25 % of the size as memory", of_disk["int8"], of_disk["exported"], None, "tok/s"),
        compared(f"{what}: decode in memory", *decode, None, "tok/s"),
        compared(f"{what}: prefill of {LONG_PROMPT} tokens in memory", *prefill, None, "tok/s"),
    ]
    for plan in plans.values():
        shutil.rmtree(plan)
    return rows


def in_memory(shop, plan):
    """Tokens per second of decoding and of a long prompt, with all weights in memory."""
    prompt = ("--tokens", ",".join(str(7 * token % 1000 + 11) for token in range(LONG_PROMPT)), "--temperature", 5, "--seed", 1)
    decode, answer = speculation.tokens_per_second(shop, plan, None, prompt)
    return decode, LONG_PROMPT / answer["timings"]["time_to_first_token_ms"] * 1000


# Widths of the experts of the trained mixture, 64 of them in four layers: 3 and 9 MB each.
TRAINED_WIDTHS = (8192, 24576)
# The memory for experts, as a share of their size. Those of one layer, a quarter, always have room.
TRAINED_PART = 0.4
TRAINED_NEW = 200
QUESTION = ("-p", "What is ownership?", "--temperature", 1, "--seed", 1)


def ahead(shop):
    """The trained mixture, grown: experts read ahead because the router of the layer before predicts them, over none read ahead."""
    return [ahead_of(shop, width) for width in (TRAINED_WIDTHS[:1] if shop.small else TRAINED_WIDTHS)]


def ahead_of(shop, width):
    source = os.path.join(ROOT, "fixtures", "models", "genai", "learned-gpt-oss-int4-cpu")
    model = shop.made(f"grown-mixture-{width}", "grow", source, "--intermediate", width)
    # hpp-split counts 64 MiB for the process itself, and other weights and buffers take some more.
    limit = disk.limit_of(model, TRAINED_PART) + (96 << 20)
    options = ("--context", disk.CONTEXT, "--ram", f"{limit}B", "--prompt-tokens", PROMPT_TOKENS, "--new-tokens", TRAINED_NEW)
    sides = {"auto": "ahead", "selected": "waiting"}
    plans = {name: shop.split(model, f"experts/{width}-{name}", *options, "--experts", side)[0] for side, name in sides.items()}

    def run(name):
        return speculation.tokens_per_second(shop, plans[name], limit + disk.KERNEL, QUESTION, new=TRAINED_NEW)

    # Weights are prepared once, before the measurements.
    _, right = run("waiting")
    run("ahead")
    runs = measure.in_turns(shop.rounds, ahead=lambda: run("ahead"), waiting=lambda: run("waiting"))
    if any(answer["tokens"] != right["tokens"] for side in runs.values() for _, answer in side):
        raise measure.Failed("experts read ahead changed the answer")
    mine, other = ([speed for speed, _ in runs[side]] for side in ("ahead", "waiting"))
    result = compared(f"trained mixture with experts {width} wide, {TRAINED_PART:.0%} of their size as memory: one read ahead over none", mine, other, None, "tok/s")
    used = runs["ahead"][-1][1]["timings"]["disk"]
    of_all = used["experts"]["hits"] + used["experts"]["read_ahead"] + used["experts"]["misses"]
    waits = [statistics.median(answer["timings"]["disk"]["stall_ms"] for _, answer in runs[side]) for side in ("ahead", "waiting")]
    result["result"] += (f", {used['experts']['read_ahead'] / of_all:.0%} of the experts used read ahead, {used['experts']['read_in_vain'] / of_all:.0%} more in vain, "
                         f"waits {waits[0]:.0f} instead of {waits[1]:.0f} ms")
    for plan in plans.values():
        shutil.rmtree(plan)
    return result
