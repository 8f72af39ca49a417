"""A mixture of experts three times as large as a GPU's budget: where its experts compute."""

import json
import os
import re

import measure
from streaming import on_device
from table import compared, row
from workshop import OUT

# 64 experts, 8 of which a token selects, 4 bits, everything else in float16: 4 GB.
SHAPE = ("--layers", 24, "--hidden", 2048, "--intermediate", 768, "--heads", 16, "--kv-heads", 8, "--vocab", 32000, "--experts", 64, "--top-k", 8)
SMALL = ("--layers", 4, "--hidden", 128, "--intermediate", 64, "--heads", 4, "--kv-heads", 2, "--vocab", 512, "--experts", 8, "--top-k", 2)
LAYERS_AT, EXPERTS_AT, SELECTED_AT = 1, 13, 15
INSIDE = 1 / 3
CONTEXT, PROMPT, NEW = 256, 64, 64


def mixture(shop, provider):
    """Decode speed: the planner's plan, llama.cpp's division of layers and a division of each layer's experts, over all experts on the host and over
    what its memory allows."""
    if provider != "cuda":
        return [row("mixture", result=f"not run: {provider} computes QMoE wrongly")]
    shape = SMALL if shop.small else SHAPE
    model = shop.model(f"gpu-mixture{'-small' if shop.small else ''}", *shape, "--context", 1024, "--dtype", "int4-fp16")
    size = os.path.getsize(os.path.join(model, "model.onnx.data"))
    budget = ("--vram", f"{int(size * INSIDE)}B", "--context", CONTEXT, "--prompt-tokens", PROMPT, "--new-tokens", NEW, "--margin", 0)

    def plan(name, *options):
        where, cost = shop.split(model, f"gpu/mixture-{name}", *budget, *options, "--json")
        return where, json.loads(cost["stdout"])

    def fewest():
        """The plan with the fewest layers whose experts are on the host."""
        for count in range(shape[LAYERS_AT] // 2, shape[LAYERS_AT] + 1):
            try:
                return plan("division", "--n-cpu-moe", count, "--gpu-layers", "all")[0], count
            except measure.Failed as failure:
                if "is too small" not in str(failure):
                    raise
        raise measure.Failed("the budget holds no layer's experts beside the attention of all layers")

    planned, _ = plan("planned", "--mechanisms", "resident,cpu", "--objective", "decode")
    division, on_host = fewest()
    experts, _ = plan("host", "--cpu-moe", "--gpu-layers", "all")

    def run(where):
        answer = shop.exec_json("bench", where, "--prompt-tokens", PROMPT, "--new-tokens", NEW, "--runs", 1, "--providers", f"{provider},cpu")
        return on_device(answer, provider)

    popular, said = plan("popular", "--gpu-experts", "auto", "--gpu-layers", "all")
    # With activations of 8 bits the host's kernel divides each expert among all threads.
    rounded = ("--int8-activations", "--gpu-layers", "all")
    host_8, _ = plan("host-8", "--cpu-moe", *rounded)
    popular_8, _ = plan("popular-8", "--gpu-experts", "auto", *rounded)

    plans = {"planned": planned, "division": division, "experts": experts, "popular": popular, "experts-8": host_8, "popular-8": popular_8}
    runs = measure.in_turns(shop.rounds, **{side: lambda where=where: run(where) for side, where in plans.items()})
    speeds = {side: [answer["decode_tokens_per_second"]["median"] for answer in answers] for side, answers in runs.items()}
    what = f"mixture of {size / 1e9:.1f} GB, VRAM for a third, decode"
    divided = f"experts of {on_host} of {shape[LAYERS_AT]} layers on the CPU (--n-cpu-moe)"
    rows = [compared(f"{what}: {divided}, over all experts on the CPU", speeds["division"], speeds["experts"], 1.0, "tok/s"),
            compared(f"{what}: whole layers as planned without a profile, over all experts on the CPU", speeds["planned"], speeds["experts"], None, "tok/s")]
    some = f"{said['model'].get('gpu_experts', 'no')} of {shape[EXPERTS_AT]} experts of each layer on the GPU (--gpu-experts), uniform routers"
    rows += [compared(f"{what}: {some}, over all experts on the CPU", speeds["popular"], speeds["experts"], 1.0, "tok/s"),
             compared(f"{what}: the same with activations of 8 bits", speeds["popular-8"], speeds["experts-8"], 1.0, "tok/s")]
    return rows + [arithmetic(f"{what}: {divided}", shape, size, on_host, speeds["division"])]


def arithmetic(name, shape, size, on_host, speeds):
    """Compared with reading the selected experts of the layers on the host at the rate of its memory, and nothing else."""
    # Nearly all weights are experts, so their share of a layer is taken as all of it.
    read = size / shape[LAYERS_AT] * on_host * shape[SELECTED_AT] / shape[EXPERTS_AT]
    rate = memory_rate()
    if rate is None:
        return row(f"{name}, over llama.cpp's arithmetic", f"{speeds[0]:.4g} tok/s", "", "no profile in this directory has the memory's rate")
    bound = rate * 1e9 / read
    line = compared(f"{name}, over selected experts at the rate of memory", speeds, [bound] * len(speeds), 1.0, "tok/s")
    line["result"] += f", {read / 1e6:.0f} MB at {rate:.0f} GB/s"
    return line


def memory_rate():
    """The rate of reading large arrays in the profile of the large model, in 1e9 bytes per second; None without a profile."""
    for name in sorted(name for name in os.listdir(OUT) if name.startswith("profile-gpu-") and name.endswith(".yaml")):
        with open(os.path.join(OUT, name), encoding="utf-8") as file:
            curve = re.search(r"kind: ram_read\n(.*?)- path:", file.read(), re.DOTALL)
        if curve:
            return float(re.findall(r"gb_per_s: (\S+)", curve.group(1))[-1])
    return None
