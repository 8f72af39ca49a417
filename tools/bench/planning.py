"""Planning: its cost, its gain from streaming, and the error of its predictions on this machine."""

import glob
import json
import os

import measure
from rounds import Rounds
from table import limited, mib, row
from workshop import OUT, ROOT

PRESETS = sorted(glob.glob(os.path.join(ROOT, "fixtures", "machines", "*.yaml")))
DENSE_70B = ("--layers", 80, "--hidden", 8192, "--intermediate", 28672, "--heads", 64, "--kv-heads", 8, "--vocab", 128256,
             "--dtype", "int4", "--sparse")
MOE_30B = ("--layers", 48, "--hidden", 2048, "--intermediate", 768, "--heads", 32, "--kv-heads", 4, "--vocab", 151936,
           "--experts", 128, "--top-k", 8, "--dtype", "int4", "--sparse")
MOE_61 = ("--layers", 61, "--hidden", 7168, "--intermediate", 2048, "--heads", 64, "--kv-heads", 8, "--vocab", 129280,
          "--experts", 256, "--top-k", 8, "--dtype", "int4", "--sparse")
CONTEXTS = (128, 2048)
# hpp-split's default length of an answer.
ANSWER = 128
NEW = 32


def dry_run(shop, model, *options):
    """The plan that hpp-split would write, and the cost of finding it."""
    cost = measure.run([shop.binary("hpp-split"), model, "--dry-run", "--json", *options])
    return dict(cost, plan=json.loads(cost["stdout"]))


def preset(name):
    return os.path.join(ROOT, "fixtures", "machines", f"{name}.yaml")


def planning_time(shop):
    """Wall time of the whole command, including reading the model, with every mechanism allowed."""
    rows = []
    for what, options, limit in (("80-layer dense model", DENSE_70B, 1.0), ("61-layer, 256-expert MoE", MOE_61, 5.0)):
        model = shop.model(f"planned-{len(rows)}", *options)
        runs = [dry_run(shop, model, "--machine", preset("rtx4090-desktop"), "--mechanisms", "all") for _ in range(shop.rounds)]
        rows.append(limited(f"planning: {what}", measure.values(runs, "seconds"), limit, lambda seconds: f"{seconds:.2f} s"))
    return rows


def layers_of(shop, model):
    cost = measure.run([shop.binary("hpp-split"), "inspect", model, "--json"])
    return json.loads(cost["stdout"])["layers"]


def best_gpu_layers(shop, model, machine, objective, of):
    """The best prediction of any `--gpu-layers N` there, with its N; None if not even 0 layers fit."""
    best = None
    for count in range(layers_of(shop, model) + 2):
        try:
            plan = dry_run(shop, model, "--machine", machine, "--objective", objective, "--gpu-layers", count)["plan"]
        except measure.Failed:
            continue
        value = of(plan["predictions"])
        if best is None or value > best[0]:
            best = value, count
    return best


def streaming_gain(shop):
    """The predicted gain of all mechanisms over the best contiguous --gpu-layers plan, on each preset: for a decoded token, and for an answer
    of 512 prompt tokens and 128 new tokens."""
    rows = []
    wishes = (("decode", "decode", "tok/s", lambda said: said["decode_tokens_per_second"]),
              ("answers", "mixed", "an hour", lambda said: 3.6e6 / (said["time_to_first_token_ms"] + ANSWER * said["decode_ms"])))
    for what, options in (("70 B int4", DENSE_70B), ("30 B MoE int4", MOE_30B)):
        model = shop.model(f"gain-{what.replace(' ', '-')}", *options)
        for wish, objective, unit, of in wishes:
            for machine in PRESETS:
                name = f"predicted {wish}, {what}, {os.path.basename(machine)[:-5]}"
                rows.append(gain(shop, name, (model, machine, objective), unit, of))
    return rows


def gain(shop, name, asked, unit, of):
    """One cell: our prediction, theirs, and our bottleneck."""
    model, machine, objective = asked
    theirs = best_gpu_layers(shop, *asked, of)
    try:
        said = dry_run(shop, model, "--machine", machine, "--objective", objective, "--mechanisms", "all")["plan"]["predictions"]
    except measure.Failed as failure:
        return row(name, "no plan fits", "" if theirs is None else f"{theirs[0]:.3g} {unit}", str(failure)[-80:])
    ours, limit = of(said), said.get("limit", "")
    if theirs is None:
        return row(name, f"{ours:.3g} {unit}", "nothing fits", limit, "reported")
    return row(name, f"{ours:.3g} {unit}", f"{theirs[0]:.3g} {unit} (N={theirs[1]})", f"{ours / theirs[0]:.2f}x: {limit}", "reported")


def corpus(shop):
    """A few prompts of ordinary words for the corpus run."""
    path = os.path.join(OUT, "corpus.txt")
    with open(path, "w", encoding="utf-8") as out:
        for line in range(4):
            out.write(" ".join(f"the quick brown fox jumps over lazy dog number {line} of {word}" for word in range(6)) + "\n")
    return path


def profile(shop, dtype, *options):
    """A fresh profile of the 350 M decoder; its path and its cost."""
    path = os.path.join(OUT, f"profile-{dtype}.yaml")
    cost = measure.run([shop.binary("hpp-profile"), shop.decoder(dtype), "--providers", "cpu", "--out", path, "--force",
                        "--threads", shop.threads, "--quiet", *options])
    return path, cost


def profiling_cost(shop):
    rows = []
    for dtype in ("int4", "fp32"):
        model = shop.decoder(dtype)
        size = os.path.getsize(os.path.join(model, "model.onnx.data"))
        costs = [profile(shop, dtype, "--quick", "--prompts", corpus(shop))[1] for _ in range(min(3, shop.rounds))]
        over = Rounds(cost["peak_rss"] / size for cost in costs)
        rows += [
            limited(f"hpp-profile --quick, {dtype}: wall time", measure.values(costs, "seconds"), 180, lambda seconds: f"{seconds:.0f} s"),
            row(f"hpp-profile --quick, {dtype}: peak RSS over the model", mib(measure.median(costs, "peak_rss")), mib(size),
                over.text(2, "x"), "<= 1.5x", over.verdict(at_most=1.5)),
        ]
    return rows


def predictions(shop):
    """Predicted and measured milliseconds of unsplit and split plans; profile and runs are made within the same minutes."""
    rows, errors = [], []

    def percent(error):
        return f"{error:.1%}"

    for dtype in ("int4", "fp32"):
        path, _ = profile(shop, dtype)
        for partitions in (1, 4):
            for context in CONTEXTS:
                workload = ("--prompt-tokens", context, "--new-tokens", NEW)
                plan, _ = shop.split(shop.decoder(dtype), f"predict/{dtype}-{partitions}-{context}", "--profile", path,
                                     "--partitions", partitions, "--context", 4096, *workload)
                expected = dry_run(shop, shop.decoder(dtype), "--profile", path, "--partitions", partitions, "--context", 4096,
                                   *workload)["plan"]["predictions"]
                answer = shop.exec_json("bench", plan, *workload, "--runs", max(3, shop.rounds))
                speeds = answer["decode_tokens_per_second"]
                measured = {"decode": [1000 / speeds[key] for key in ("median", "max", "min")],
                            "prefill": [answer["time_to_first_token_ms"][key] for key in ("median", "min", "max")]}
                for phase, said in (("decode", expected["decode_ms"]), ("prefill", expected["time_to_first_token_ms"])):
                    error, most, least = (said / took - 1 for took in measured[phase])
                    errors.append(Errors(error, least, most))
                    rows.append(row(f"{phase} ms, {dtype}, {partitions} partitions, {context} tokens", f"{said:.1f} predicted",
                                    f"{measured[phase][0]:.1f} measured", f"{error:+.1%} ({least:+.1%} to {most:+.1%})"))
    worst = max(abs(each.median) for each in errors)
    # The worst pair is between the largest error that its slowest and fastest run imply for certain and the largest that they allow.
    sure, possible = max(each.at_least for each in errors), max(each.at_most for each in errors)
    return [
        limited("predicted over measured: median error", [abs(each.median) for each in errors], 0.10, percent),
        row("predicted over measured: worst error", f"{percent(worst)} ({percent(sure)} to {percent(possible)})", "", "", "<= 25.0%",
            Rounds([sure, possible]).verdict(at_most=0.25)),
        *rows,
    ]


class Errors:
    """The relative error of one prediction against the median, the slowest and the fastest of several runs."""

    def __init__(self, median, low, high):
        self.median = median
        self.at_most = max(abs(low), abs(high))
        self.at_least = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
