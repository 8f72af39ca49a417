"""A mixture larger than memory: experts read by demand over whole mixtures, and over what the disk allows."""

import statistics

import disk
import measure
import speculation
from table import compared, row

NEW = 48
# 128 experts, 8 of which a token selects: 6 GB in 4 bits, 1.7 GB small.
SHAPE = ("--hidden", 2048, "--intermediate", 768, "--heads", 32, "--kv-heads", 4, "--vocab", 32000, "--context", 2048, "--experts", 128,
         "--top-k", 8, "--dtype", "int4")
# Tokens of a random model repeat each other; drawn at this temperature they are nearly uniform, and so are the experts they select.
PROMPT = ("--tokens", ",".join(str(7 * token + 11) for token in range(16)), "--temperature", 5, "--seed", 1)


def by_demand(shop):
    """Decode speed with RAM for a quarter of the model, uniform routing."""
    layers = 5 if shop.small else 18
    model = shop.model(f"mixture-{layers}", "--layers", layers, *SHAPE)
    limit = disk.limit_of(model, 0.25)
    options = ("--context", disk.CONTEXT, "--ram", f"{limit - disk.KERNEL}B", "--prompt-tokens", 16, "--new-tokens", NEW)
    plans = {side: shop.split(model, f"experts/{side}", *options, "--experts", side)[0] for side in ("auto", "all")}
    whole, _ = shop.split(model, "experts/whole", "--context", disk.CONTEXT)
    compute, right = speculation.tokens_per_second(shop, whole, None, PROMPT)
    for plan in plans.values():
        # Weights are prepared once, before the measurements.
        speculation.tokens_per_second(shop, plan, None, PROMPT)
    rates = []

    def run(plan):
        before = disk.direct_rate(disk.weight_file(model))
        speed, answer = speculation.tokens_per_second(shop, plan, limit, PROMPT)
        if answer["tokens"] != right["tokens"]:
            raise measure.Failed("a mixture from disk gave other tokens than from memory")
        rates.append((before + disk.direct_rate(disk.weight_file(model))) / 2)
        return speed, answer, rates[-1]

    runs = measure.in_turns(shop.rounds, auto=lambda: run(plans["auto"]), all=lambda: run(plans["all"]))
    mine, other = ([speed for speed, *_ in runs[side]] for side in ("auto", "all"))
    used = runs["auto"][-1][1]["timings"]["disk"]
    hits, misses = used["experts"]["hits"], used["experts"]["misses"]
    bounds = [1 / max(1 / compute, answer["timings"]["disk"]["bytes"] / NEW / rate) for _, answer, rate in runs["auto"]]
    over_all = compared("mixture, 25 % of its size as memory: experts by demand over all", mine, other, 4, "tok/s")
    over_all["result"] += f", {hits / (hits + misses):.0%} of experts in memory"
    over_bound = compared("the same over the bound", mine, bounds, 0.8, "tok/s")
    over_bound["result"] += f", disk {statistics.median(rates) / 1e9:.2f} GB/s"
    return [over_all, over_bound, row("the same with all weights in memory", f"{compute:.3g} tok/s", "", "", "reported")]
