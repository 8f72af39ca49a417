"""A model whose weights exceed a GPU's budget: decode and prompt speed, streamed or not, compared with bounds and ONNX Runtime."""

import json
import os
import statistics
import sys

import measure
import timeline
from streaming import on_device
from rounds import Rounds
from table import compared, row
from workshop import OUT

HERE = os.path.dirname(os.path.abspath(__file__))
# The decode budget as a fraction of the weights; it also holds caches, slots and activations.
INSIDE = 0.4
# Placements by hand: the head, which is small and runs for one token, stays on the GPU.
HEAD = ("--assign", "head=gpu")
SHAPES = {
    "fp16": ("--layers", 20, "--hidden", 2560, "--intermediate", 6912, "--heads", 20, "--kv-heads", 10, "--vocab", 32000),
    "fp32": ("--layers", 24, "--hidden", 2048, "--intermediate", 5632, "--heads", 16, "--kv-heads", 8, "--vocab", 32000),
    "int4-fp16": ("--layers", 32, "--hidden", 4096, "--intermediate", 11008, "--heads", 32, "--kv-heads", 8, "--vocab", 32000),
}
SMALL = ("--layers", 12, "--hidden", 128, "--intermediate", 352, "--heads", 4, "--kv-heads", 2, "--vocab", 512)


class Bench:
    """A model, its profile and its budget; makes plans for it and runs them."""

    def __init__(self, shop, provider, dtype):
        self.shop, self.provider, self.dtype = shop, provider, dtype
        self.prompt, self.new, self.context, self.long = (8, 4, 32, 48) if shop.small else (64, 64, 256, 2048)
        shape = SMALL if shop.small else SHAPES[dtype]
        self.layers, self.heads = shape[1], shape[shape.index("--kv-heads") + 1]
        self.head_size = shape[3] // shape[shape.index("--heads") + 1]
        name = f"gpu-{dtype}{'-small' if shop.small else ''}"
        self.model = shop.model(name, *shape, "--context", 512 if shop.small else 4096, "--dtype", dtype)
        self.size = os.path.getsize(os.path.join(self.model, "model.onnx.data"))
        self.profile = os.path.join(OUT, f"profile-{name}-{provider}.yaml")
        self.link = None

    def measure_profile(self, keep):
        """Profiles the model on this machine, unless `keep` is set and there is a profile; then reads the link's rate."""
        command = [self.shop.binary("hpp-profile"), self.model, "--quick", "--providers", f"cpu,{self.provider}", "--contexts",
                   f"16,{self.context}", "--prefill-tokens", f"16,{self.long}", "--out", self.profile, "--threads", self.shop.threads,
                   "--timeout", 60, "--json", "--quiet", *(["--resume"] if keep and os.path.exists(self.profile) else ["--force"])]
        found = json.loads(measure.run([*self.shop.around, *command], limit=self.shop.limit)["stdout"])
        self.link = bare_link(found, self.provider)

    def plan(self, name, *options, vram=None, prompt=None, new=None):
        """A plan made with the profile, and its contents. `vram` in bytes replaces the budget."""
        prompt, new = prompt or self.prompt, new or self.new
        where, cost = self.shop.split(
            self.model, f"gpu/{self.dtype}-{name}", "--profile", self.profile, "--vram", f"{vram or int(self.size * INSIDE)}B", "--margin",
            "0", "--context", max(self.context, prompt + new), "--prompt-tokens", prompt, "--new-tokens", new, "--json", *options)
        return where, json.loads(cost["stdout"])

    def most_resident(self, name, *options, **more):
        """The plan with the most layers on the GPU that the budget holds beside the needs of `options`, and their number."""
        for count in range(int(self.layers * INSIDE), -1, -1):
            try:
                return *self.plan(name, "--gpu-layers", count, *HEAD, *options, **more), count
            except measure.Failed as failure:
                last = failure
        raise last

    def run(self, plan, *options, prompt=None, new=None):
        """One measured run after a warm-up run, with the trace and the answer beside the plan."""
        answer = self.shop.exec_json(
            "bench", plan, "--prompt-tokens", prompt or self.prompt, "--new-tokens", new or self.new, "--runs", 1, "--providers",
            f"{self.provider},cpu", "--trace", trace_of(plan), *options)
        with open(f"{plan}.json", "w", encoding="utf-8") as out:
            json.dump(answer, out)
        return on_device(answer, self.provider)

    def ort(self, places):
        """A run of ONNX Runtime alone, with these blocks on the GPU and the others on the host."""
        sides = {True: [], False: []}
        for block, device in places.items():
            sides[device != "cpu"].append(node_names(block))
        command = [sys.executable, os.path.join(HERE, "run_ort_layers.py"), os.path.join(self.model, "model.onnx"), self.provider,
                   ",".join(sides[True]), ",".join(sides[False]), self.prompt, self.new, self.context, self.shop.threads, self.heads,
                   self.head_size]
        answer = json.loads(measure.run([*self.shop.around, *command], limit=self.shop.limit)["stdout"])
        wanted = sum(device != "cpu" for block, device in places.items() if block.startswith("layers."))
        if answer["layers"]["gpu"] != wanted:
            raise measure.Failed(f"ONNX Runtime put {answer['layers']['gpu']} layers on the GPU, not the {wanted} it was told")
        return answer


def trace_of(plan):
    return f"{plan}.trace.json"


def node_names(block):
    """The common prefix of the names of a block's nodes, in models of GenAI's builder."""
    return {"embedding": "/model/embed_tokens/", "head": "/lm_head/"}.get(block, f"/model/{block}/")


def bare_link(profile, provider):
    """The fastest copy to the device in the profile, in 1e9 bytes per second, and whether it is from pinned memory."""
    best = {}
    for curve in profile["machine"]["curves"]:
        path = curve["path"]
        if path["kind"] == "link" and path["provider"] == provider and path["to_device"]:
            best[path["pinned"]] = max(point["gb_per_s"] for point in curve["points"])
    if not best:
        raise measure.Failed(f"the profile has no copies to the {provider} device: {'; '.join(profile['machine'].get('failures', []))}")
    return (best[True], True) if True in best else (best[False], False)


def places(plan):
    """Each block's device when decoding."""
    return {block: partition["device"] for partition in plan["partitions"] for block in partition["blocks"]}


def streams(plan):
    return any(partition.get("residency") == "streamed" and partition.get("weights") for partition in plan["partitions"])


def speeds(answers):
    """Decoded tokens per second, by round."""
    return [answer["decode_tokens_per_second"]["median"] for answer in answers]


def first_tokens(answers):
    """Milliseconds to the first token, by round: unlike the times of a pass, they end when the device has finished."""
    return [answer["time_to_first_token_ms"]["median"] for answer in answers]


def accuracy(name, expected, measured, unit):
    """Compares one prediction with the measurements of all rounds."""
    error = Rounds(expected / value - 1 for value in measured)
    low, high = error.spread
    return row(f"{name}: predicted", f"{expected:.4g} {unit}", f"{statistics.median(measured):.4g} {unit}",
               f"{error.median:+.1%} ({low:+.1%} to {high:+.1%})", "within 15 %", error.verdict(-0.15, 0.15))


def decode(bench):
    """Decoding with 60 % of the weights outside of the budget: the planner's plan compared with three others, its bound and the link."""
    name = f"decode, {1 - INSIDE:.0%} of {bench.size / 1e9:.1f} GB outside the VRAM budget, {bench.dtype}"
    best, planned = bench.plan("planned", "--mechanisms", "all", "--objective", "decode")
    host, on_host = bench.plan("host", "--mechanisms", "resident,cpu", "--objective", "decode")
    ring, streamed, resident = bench.most_resident("streamed", "--stream", "all")
    sides = {"best": (best, planned), "host": (host, on_host), "ring": (ring, streamed)}
    runners = {side: lambda plan=plan: bench.run(plan) for side, (plan, _) in sides.items()}
    if bench.provider == "cuda":
        # In a trace of its own.
        waiting, _, _ = bench.most_resident("waiting", "--stream", "all")
        runners["waiting"] = lambda: bench.run(waiting, "--wait-each-run")
    failures = []

    def alone():
        try:
            return bench.ort(places(on_host))
        except measure.Failed as failure:
            print(failure, file=sys.stderr, flush=True)
            failures.append(crash_in(str(failure)))
            return None

    runs = measure.in_turns(bench.shop.rounds, **runners, ort=alone)
    tokens = {side: speeds(runs[side]) for side in sides}
    ours = tokens["best"]
    what = {"host": "the rest on the CPU", "ring": f"the rest streamed ({resident} layers resident)"}
    rows = [compared(f"{name}: over {what[side]}", ours, tokens[side], 1.0, "tok/s") for side in ("host", "ring")]
    if "waiting" in runs:
        rows.append(compared(f"{name}: {what['ring']}, ordered by events over waiting for each run", tokens["ring"],
                             speeds(runs["waiting"]), 1.0, "tok/s"))
    rows.append(beside_ort(name, ours, runs["ort"], failures, places(on_host)))
    rows.append(over_bound(name, ours, planned["predictions"]))
    for side, (_, plan) in sides.items():
        label = {"best": "as planned", **what}[side]
        rows.append(accuracy(f"{name}, {label}", plan["predictions"]["decode_tokens_per_second"], tokens[side], "tok/s"))
    for side in ("best", "ring"):
        rows += copies(bench, f"decode, {bench.dtype}, {'as planned' if side == 'best' else what[side]}", *sides[side], runs[side])
    return rows


def beside_ort(name, ours, answers, failures, on):
    """Compared with ONNX Runtime's own assignment of layers, with the same blocks on the GPU as the plan without streaming."""
    count = sum(device != "cpu" for block, device in on.items() if block.startswith("layers."))
    name = f"{name}: over ONNX Runtime's name_based_layer_assignment ({count} layers on the GPU)"
    if failures:
        return row(name, f"{statistics.median(ours):.4g} tok/s", "", f"not run: {failures[0][:120]}")
    return compared(name, ours, measure.values(answers, "decode"), 1.0, "tok/s")


def crash_in(failure):
    """What a failed script said last, and for a crash the error and the innermost line of Python that it happened in."""
    lines = [line.strip() for line in failure.splitlines()]
    fatal = [line for line in lines if line.startswith("Fatal Python error")]
    places = [line for line in lines if line.startswith("File ")]
    return f"{fatal[0]} at {places[0]}" if fatal and places else lines[-1]


def over_bound(name, ours, predictions):
    bound = predictions["objective"]["bound_ms"]
    name = f"{name}: over the planner's bound"
    if not bound:
        return row(name, f"{statistics.median(ours):.4g} tok/s", "", "the planner proved no bound")
    return compared(name, ours, [1000 / bound] * len(ours), 0.85, "tok/s")


def copies(bench, name, plan, said, answers):
    """The rate of copies while decoding over that of a bare copy, and the share of them that overlaps computation."""
    if not streams(said) or not answers[-1].get("streaming"):
        return [row(f"{name}: host-to-device rate", "", "", "nothing is streamed while decoding")]
    rates = [answer["streaming"]["gb_per_second"] for answer in answers]
    # Measured right after each run if possible; the profile's is older.
    bare, pinned = [bare_rate(answer) or bench.link[0] for answer in answers], bench.link[1]
    share = timeline.overlap(trace_of(plan))
    stall = answers[-1]["streaming"]["stall_ms"] / answers[-1]["streaming"]["busy_ms"]
    return [
        compared(f"{name}: host-to-device rate over a bare {'pinned ' if pinned else ''}copy", rates, bare, 0.9, "GB/s"),
        row(f"{name}: copies under computing, in the trace", "" if share is None else f"{share:.1%}", "",
            f"waited for {stall:.0%} of the copying", "reported"),
    ]


def bare_rate(answer):
    """The rate of a bare copy to the device that a run measured right after its tokens; None if it measured none."""
    rates = [link["bare_gb_per_second"] for link in answer.get("links", []) if link["name"].startswith("to ")]
    return statistics.median(rates) if rates else None


def prompt(bench):
    """A long prompt as the planner places it, compared with its best plan without streaming and with the bound of copying and computing."""
    name, work = f"prompt of {bench.long} tokens, {bench.dtype}", {"prompt": bench.long, "new": 2}
    streamed, planned = bench.plan("prompt-planned", "--mechanisms", "all", "--objective", "prefill", **work)
    host, on_host = bench.plan("prompt-host", "--mechanisms", "resident,cpu", "--objective", "prefill", **work)
    sides = {"streamed": streamed, "host": host}
    try:
        sides["whole"], _ = bench.plan("prompt-resident", "--gpu-layers", "all", "--movable", vram=4 * bench.size, **work)
        runs = turns(bench, sides, work)
    except measure.Failed as failure:
        print(f"  all of it on the GPU: {failure}", file=sys.stderr)
        sides.pop("whole", None)
        runs = turns(bench, sides, work)
    times = {side: first_tokens(runs[side]) for side in sides}
    rates = {side: [bench.long / milliseconds * 1e3 for milliseconds in times[side]] for side in sides}
    ours, passes = times["streamed"], passes_of(planned, bench.long)
    rows = [compared(f"{name}: as planned, in {passes} {'pass' if passes == 1 else 'passes'}, over the best plan without streaming",
                     rates["streamed"], rates["host"], 5, "tok/s")]
    copied = timeline.copied_to_devices(trace_of(streamed), passes)
    copy = copied / bench.link[0] / 1e6
    if "whole" in times:
        bound = compared(f"{name}: over max(copying, computing)", ours, [max(copy, whole) for whole in times["whole"]], 0.9, "ms",
                         smaller_is_better=True)
        limit = "copying" if copy >= statistics.median(times["whole"]) else "computing"
        bound["result"] += f", {limit}; {copied / 1e9:.2f} GB at {bench.link[0]:.1f} GB/s is {copy:.1f} ms"
        rows.append(bound)
        rows.append(row(f"{name}: with all weights on the GPU", f"{statistics.median(times['whole']):.1f} ms", "", "", "reported"))
    else:
        rows.append(row(f"{name}: over max(copying, computing)", f"{statistics.median(ours):.1f} ms", f"{copy:.1f} ms to copy",
                        "computing alone was not measured: not all of the model fits the GPU"))
    for side, plan, what in (("streamed", planned, "as planned"), ("host", on_host, "without streaming")):
        expected = bench.long / plan["predictions"]["time_to_first_token_ms"] * 1e3
        rows.append(accuracy(f"{name}, {what}", expected, rates[side], "tok/s"))
    return rows + copies(bench, name, streamed, planned, runs["streamed"])


def passes_of(plan, prompt):
    """Passes of a prompt of this many tokens."""
    return -(-prompt // (plan["schedule"].get("prefill_chunk") or prompt))


def turns(bench, plans, work):
    return measure.in_turns(bench.shop.rounds, **{side: lambda plan=plan: bench.run(plan, **work) for side, plan in plans.items()})
