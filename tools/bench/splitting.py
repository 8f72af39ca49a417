"""Time and memory of a split: of a model larger than the machine, and against onnx.utils.extract_model on a 2 GB one."""

import json
import os
import sys

import measure
from table import mib, ratio_row, row

HERE = os.path.dirname(os.path.abspath(__file__))


def huge(shop):
    """A 65 GB model as a sparse file, planned for a 24 GB card."""
    model = shop.model("llama-65g-int4", "--layers", 120, "--hidden", 8192, "--intermediate", 28672, "--heads", 64,
                       "--kv-heads", 8, "--dtype", "int4", "--sparse")
    size = os.path.getsize(os.path.join(model, "model.onnx.data"))
    costs = [shop.split(model, "huge", "--vram", "24G")[1] for _ in range(5)]
    seconds, peak = measure.median(costs, "seconds"), max(cost["peak_rss"] for cost in costs)
    name = f"split of a {size / 1e9:.0f} GB model"
    return [
        row(f"{name}: wall time", f"{seconds:.3f} s", "", "", "<= 1 s", seconds <= 1),
        row(f"{name}: peak RSS", mib(peak), "", "", "<= 150 MiB", peak <= 150 * 2**20),
    ]


def against_extract_model(shop):
    """Two halves of a 2 GB decoder, by both."""
    layers = 4 if shop.small else 38
    # One copy each: onnx refuses a weight file that has a second hard link, which a plan's directory gives it.
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
    seconds = measure.median(mine, "seconds"), measure.median(other, "extract_seconds")
    peak = measure.median(mine, "peak_rss"), measure.median(other, "peak_rss")
    return [
        ratio_row(f"{name}: time", *seconds, seconds[1] / seconds[0], 100, "s"),
        ratio_row(f"{name}: peak RSS", peak[0] / 2**20, peak[1] / 2**20, peak[1] / peak[0], 20, "MiB"),
    ]
