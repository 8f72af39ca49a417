"""Weights streamed to a device: whether a small decoder's answer is independent of the placement of its weights, and whether copies overlap
computation."""

import json
import os
import subprocess
import sys

import measure
import timeline
from table import row
from workshop import ROOT

AROUND = (os.path.join(ROOT, "tools", "scripts", "with-webgpu.sh"),)
PROMPT = [5, 17, 101, 33, 2, 250, 77, 9]
NEW = 16
# hpp-fixtures options of the small decoder. CUDA's GroupQueryAttention takes half precision only, so the float32 decoder must do without
# that operator there, as in Optimum's style.
MIXTURE = ("--experts", 8, "--top-k", 2)
EXPORTS = {
    "cuda": {
        "fp32": ("--style", "optimum"),
        "fp16": ("--dtype", "fp16"),
        "int4-fp16": ("--dtype", "int4-fp16"),
        "fp16-mixture": ("--dtype", "fp16", *MIXTURE),
        "int4-fp16-mixture": ("--dtype", "int4-fp16", *MIXTURE),
    },
    "webgpu": {"fp32": ()},
}
# hpp-split options of each placement of the layers' weights; `one of each` combines all four.
PLACES = {
    "cpu": ("--assign", "all=cpu"),
    "resident": ("--assign", "all=cpu,layers.1-4=gpu", "--movable"),
    "streamed": ("--assign", "all=cpu,layers.1-4=stream", "--slots", 2),
    "one of each": ("--assign", "all=cpu,layers.1=gpu,layers.2=stream,layers.4=stream", "--slots", 2),
}


def devices(shop):
    """The report of `hpp-exec devices`: versions, and each provider with its devices."""
    return json.loads(measure.run([*shop.around, shop.binary("hpp-exec"), "devices", "--json"], limit=shop.limit)["stdout"])


def why_not(seen, provider):
    """Why the provider's devices cannot be used; None if they can."""
    found = next((known for known in seen["providers"] if known["name"].lower() == provider), None)
    if found is None:
        return f"hpp-exec knows no provider {provider}"
    if found["usable"] and found["devices"]:
        return None
    return found["problem"] or "it finds no device"


def on_device(answer, provider):
    """The answer; an error if a stage that was planned for a GPU ran elsewhere."""
    for stage in answer.get("stages") or answer["timings"]["stages"]:
        if stage["device"].startswith("gpu") and stage["provider"].lower() != provider:
            raise measure.Failed(f"{stage['partition']} ran on {stage['provider']} instead of {provider}")
    return answer


def plan_of(shop, provider, dtype, place):
    """A plan of the small decoder with a placement of its weights."""
    model = shop.model(f"exact-{provider}-{dtype}", "--layers", 6, "--hidden", 256, "--heads", 8, "--kv-heads", 4, "--vocab", 1000,
                       "--context", 512, *EXPORTS[provider][dtype])
    name = f"exact/{provider}-{dtype}-{place.replace(' ', '-')}"
    return shop.split(model, name, "--vram", "8G", "--context", 64, *PLACES[place])[0]


def says(shop, provider, plan, *options):
    """Its tokens, the bytes of their logits, and whether weights were streamed. Slots are filled with ones before each copy."""
    scores = f"{plan}.npy"
    answer = shop.exec_json(plan, "--tokens", ",".join(map(str, PROMPT)), "--max-new", NEW, "--temperature", 0, "--ignore-eos",
                            "--providers", f"{provider},cpu", "--poison-slots", "--logits", scores, *options)
    on_device(answer, provider)
    with open(scores, "rb") as file:
        return answer["tokens"], file.read(), bool(answer["timings"].get("streaming"))


def exactness(shop, provider):
    """Rows: tokens for each placement, logits of streamed against resident weights, and the share of copies that overlaps computation."""
    rows = []
    for dtype in EXPORTS[provider]:
        try:
            rows += exactness_of(shop, provider, dtype)
        except measure.Failed as failure:
            print(failure, file=sys.stderr, flush=True)
            rows.append(row(f"{provider} {dtype}", result=f"failed: {str(failure).splitlines()[-1].strip()[:160]}", verdict=False))
    return rows


def exactness_of(shop, provider, dtype):
    """The rows of one element type."""
    rows = []
    plans = {place: plan_of(shop, provider, dtype, place) for place in PLACES}
    told = {place: says(shop, provider, plan) for place, plan in plans.items()}
    other = [place for place in PLACES if told[place][0] != told["cpu"][0]]
    # The host and the device round half precision differently.
    met = not other if dtype == "fp32" else None
    rows.append(row(f"{provider} {dtype}: tokens on the host, resident, streamed and mixed",
                    f"{len(PLACES) - len(other)} of {len(PLACES)} alike", "", f"otherwise: {', '.join(other)}" if other else "",
                    "reported" if met is None else "all", met))
    same, streamed = told["streamed"][1] == told["resident"][1], told["streamed"][2]
    rows.append(row(f"{provider} {dtype}: scores, streamed against resident", "exact" if same else "they differ", "",
                    "" if streamed else "nothing was streamed", "exact", same and streamed))
    if provider == "cuda":
        waited = says(shop, provider, plans["streamed"], "--wait-each-run")[1]
        same = told["streamed"][1] == waited
        rows.append(row(f"{provider} {dtype}: scores, ordered by events against waiting for each run", "exact" if same else "they differ", "",
                        "", "exact", same))
    rows.append(hidden(shop, provider, dtype, plans["one of each"]))
    return rows


def hidden(shop, provider, dtype, plan):
    """The row for the share of copies that overlaps computation, over a few tokens."""
    trace = f"{plan}.trace.json"
    answer = shop.exec_json("bench", plan, "--prompt-tokens", 16, "--new-tokens", 16, "--runs", 1, "--providers", f"{provider},cpu",
                            "--trace", trace)
    on_device(answer, provider)
    share = timeline.overlap(trace) or 0.0
    return row(f"{provider} {dtype}: copies of weights under computing, in the trace", f"{share:.1%}", "", "", "present", share > 0)


def on_webgpu(shop):
    """Rows for `make bench`: the WebGPU plugin, on software Vulkan if this machine has no GPU."""
    if "HPP_WEBGPU_PLUGIN" not in os.environ:
        probe = subprocess.run([*AROUND, "true"], capture_output=True, text=True, check=False)
        if probe.returncode != 0:
            said = probe.stderr.strip().splitlines() or ["it cannot be shown to ONNX Runtime here"]
            return [row("webgpu: streamed against resident", result=f"not run: {said[-1]}")]
        shop.around = AROUND
    try:
        problem = why_not(devices(shop), "webgpu")
        if problem:
            return [row("webgpu: streamed against resident", result=f"not run: {problem}")]
        return exactness(shop, "webgpu")
    finally:
        shop.around = ()
