"""Time and memory of hpp-split: for a model larger than the machine, and compared with onnx.utils.extract_model on a 2 GB one."""

import json
import os
import sys

import measure
from table import compared, limited, mib

HERE = os.path.dirname(os.path.abspath(__file__))


def huge_model(shop):
    """A 65 GB model as a sparse file."""
    return shop.model("llama-65g-int4", "--layers", 120, "--hidden", 8192, "--intermediate", 28672, "--heads", 64,
                      "--kv-heads", 8, "--dtype", "int4", "--sparse")


def huge(shop):
    """A 65 GB model, planned for a 24 GB card."""
    model = huge_model(shop)
    size = os.path.getsize(os.path.join(model, "model.onnx.data"))
    costs = [shop.split(model, "huge", "--vram", "24G")[1] for _ in range(5)]
    name = f"split of a {size / 1e9:.0f} GB model"
    return [
        limited(f"{name}: wall time", measure.values(costs, "seconds"), 1, lambda seconds: f"{seconds:.3f} s"),
        limited(f"{name}: peak RSS", measure.values(costs, "peak_rss"), 150 * 2**20, mib),
    ]


def against_extract_model(shop):
    """Splits a 2 GB decoder in two halves with both."""
    layers = 4 if shop.small else 38
    # One copy each: onnx refuses a weight file with a second hard link, which a plan's directory creates.
    model, copy = (shop.model(f"llama-{layers}-extract{suffix}", "--layers", layers, "--hidden", 1024, "--intermediate", 2816,
                              "--heads", 16, "--kv-heads", 8, "--vocab", 32000, "--dtype", "fp32") for suffix in ("", "-copy"))
    size = os.path.getsize(os.path.join(model, "model.onnx.data"))

    def ours():
        return shop.split(model, "extract", "--partitions", 2)[1]

    def theirs():
        cost = measure.run([sys.executable, os.path.join(HERE, "extract_model.py"), copy, layers])
        return dict(cost, **json.loads(cost["stdout"]))

    costs = measure.in_turns(3, ours=ours, theirs=theirs)
    mine, other = costs["ours"], costs["theirs"]
    name = f"onnx.utils.extract_model, {size / 1e9:.1f} GB in two"
    seconds = measure.values(mine, "seconds"), measure.values(other, "extract_seconds")
    peak = [[cost["peak_rss"] / 2**20 for cost in side] for side in (mine, other)]
    return [
        compared(f"{name}: time", *seconds, 100, "s", smaller_is_better=True),
        compared(f"{name}: peak RSS", *peak, 20, "MiB", smaller_is_better=True),
    ]
