"""`hpp-split --quantize`: how far the tokens' distributions are from the original's, the rate and memory of quantizing, and both beside ONNX
Runtime's own tool.

The trained model is compared on docstrings of Python's standard library, which it was not trained on word by word, but whose kind it knows.
Divergences are the same in every run: they have no spread.
"""

import ast
import importlib.util
import json
import os
import random
import re
import shutil
import sys
import time

import measure
from rounds import Rounds, ratios
from table import compared, mib, row
from workshop import OUT, ROOT

TRAINED = os.path.join(ROOT, "fixtures", "models", "genai", "learned-llama-fp32-cpu")
BY_GENAI = os.path.join(ROOT, "fixtures", "models", "genai", "learned-llama-int4-cpu")
MODULES = ("argparse", "asyncio.events", "collections", "concurrent.futures._base", "configparser", "contextlib", "csv", "ctypes.util", "datetime",
           "decimal", "difflib", "email.message", "enum", "fractions", "functools", "heapq", "http.client", "inspect", "ipaddress", "json",
           "logging", "multiprocessing.pool", "pathlib", "pickle", "random", "shutil", "socket", "statistics", "string", "subprocess", "tempfile",
           "textwrap", "threading", "tokenize", "typing", "unittest.case", "urllib.parse", "uuid", "weakref", "zipfile")
CALIBRATION, HELD_OUT = 160, 60
LENGTHS = range(200, 900)
# A dense model of 14 GB in 16 bits, whose file takes no space.
LARGE = ("--layers", 32, "--hidden", 4096, "--intermediate", 11008, "--heads", 32, "--kv-heads", 32, "--vocab", 32000, "--dtype", "fp16", "--sparse")
LARGE_SMALL = ("--layers", 4, *LARGE[2:])
BLOCK = 16 << 20
HERE = os.path.dirname(os.path.abspath(__file__))
# Weights that share a scale: the default of hpp-split.
SHARED_SCALE = 32


def paragraphs():
    """Paragraphs of the docstrings of these modules, in an order that is the same in every run."""
    found = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        with open(spec.origin, encoding="utf-8") as source:
            tree = ast.parse(source.read())
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented))
        pieces = (re.sub(r"\s+", " ", piece).strip() for text in texts for piece in text.split("\n\n"))
        found += sorted({piece for piece in pieces if len(piece) in LENGTHS})
    random.Random(1).shuffle(found)
    return found


def corpus(name, texts):
    path = os.path.join(OUT, f"{name}.jsonl")
    with open(path, "w", encoding="utf-8") as out:
        for number, text in enumerate(texts):
            out.write(json.dumps({"id": number, "prompt": text}) + "\n")
    return path


def bytes_of_weights(plan):
    """Bytes of the weight files of a plan, the linked ones included."""
    names = (name for name in os.listdir(plan) if name == "weights.bin" or name.endswith(".data"))
    return sum(os.path.getsize(os.path.join(plan, name)) for name in names)


def divergences(shop):
    texts = paragraphs()
    calibration, held_out = corpus("calibration", texts[:CALIBRATION]), corpus("held-out", texts[CALIBRATION:CALIBRATION + HELD_OUT])

    def measured(name, model, *options):
        plan, _ = shop.split(model, f"quantization/{name}", *options)
        return shop.exec_json("verify", plan, "--kl", held_out, "--against", TRAINED), bytes_of_weights(plan)

    everything = ("--quantize", "int4", "--quantize-embedding", "int4")
    ours, size = measured("int4", TRAINED, *everything)
    genai, _ = measured("genai", BY_GENAI)
    compensated, _ = measured("compensated", TRAINED, *everything, "--calibration", calibration)
    budget = ("--quantize", "auto", "--bits-budget", f"{size}B", "--calibration", calibration)
    auto, auto_size = measured("auto", TRAINED, *budget)
    if auto_size > size:
        raise measure.Failed(f"--bits-budget {size}B gave {auto_size} bytes")

    def nearer(what, ours, theirs, at_most):
        mean = [side["kl"]["mean"] for side in (ours, theirs)]
        ratio = mean[0] / mean[1]
        verdict = None if at_most is None else ratio <= at_most
        target = "reported" if at_most is None else f"<= {at_most}x"
        return row(f"KL, {what}, {ours['positions']} positions", f"{mean[0]:.4f} nats", f"{mean[1]:.4f} nats", f"{ratio:.2f}x", target, verdict)

    return [
        nearer("int4 to the nearest over GenAI's builder, blocks of 32", ours, genai, 1.0),
        nearer("int4 with --calibration over to the nearest", compensated, ours, None),
        nearer("auto with --calibration over int4 to the nearest, the same bytes", auto, ours, 0.7),
    ]


def copy_seconds(source, bytes_written):
    """Seconds to read a file and to write so many bytes."""
    start = time.monotonic()
    with open(source, "rb", buffering=0) as file:
        while file.read(BLOCK):
            pass
    copy = os.path.join(OUT, "written")
    try:
        with open(copy, "wb", buffering=0) as out:
            for at in range(0, bytes_written, BLOCK):
                out.write(b"\1" * min(BLOCK, bytes_written - at))
            os.fsync(out.fileno())
        return time.monotonic() - start
    finally:
        os.remove(copy)


def rate(shop):
    model = shop.model("quantized-source", *(LARGE_SMALL if shop.small else LARGE))
    source = os.path.join(model, "model.onnx.data")
    copies, costs = [], []
    for _ in range(shop.rounds):
        plan, cost = shop.split(model, "quantization/large", "--quantize", "int4")
        costs.append(cost)
        copies.append(copy_seconds(source, bytes_of_weights(plan)))
    over, rss = ratios(copies, measure.values(costs, "seconds")), Rounds(measure.values(costs, "peak_rss"))
    size = os.path.getsize(source) / 1e9
    return [
        row(f"--quantize int4 of {size:.1f} GB over reading and writing the bytes", f"{measure.median(costs, 'seconds'):.1f} s",
            f"{Rounds(copies).median:.1f} s", over.text(unit="x"), ">= 0.5x", over.verdict(at_least=0.5)),
        row("the same: peak RSS", mib(rss.median), "", "", "<= 1024 MiB", rss.verdict(at_most=1 << 30)),
    ]


def beside_onnxruntime(shop):
    """The same 4-bit weights by `MatMulNBitsQuantizer`, which holds the model in memory; its process includes Python and the imports."""
    # A model of its own: Python's onnx refuses weight files that plans link to.
    model = shop.model("quantized-float32", *shop.decoder_shape("fp32"))
    theirs = os.path.join(OUT, "quantized-by-onnxruntime")

    def by_onnxruntime():
        shutil.rmtree(theirs, ignore_errors=True)
        os.makedirs(theirs)
        arguments = (os.path.join(model, "model.onnx"), SHARED_SCALE, os.path.join(theirs, "model.onnx"))
        return measure.run([sys.executable, os.path.join(HERE, "quantize_onnxruntime.py"), *arguments])

    def by_hpp_split():
        return shop.split(model, "quantization/beside", "--quantize", "int4", "--quantize-block", SHARED_SCALE)[1]

    runs = measure.in_turns(shop.rounds, ours=by_hpp_split, theirs=by_onnxruntime)
    shutil.rmtree(theirs)
    seconds, peak = ([measure.values(runs[side], key) for side in ("ours", "theirs")] for key in ("seconds", "peak_rss"))
    what = f"--quantize int4 of {os.path.getsize(os.path.join(model, 'model.onnx.data')) / 1e9:.1f} GB over MatMulNBitsQuantizer"
    return [
        compared(f"{what}: time", *seconds, None, "s", smaller_is_better=True),
        row(f"{what}: peak RSS", *(mib(Rounds(side).median) for side in peak), ratios(peak[1], peak[0]).text(unit="x"), "reported"),
    ]


def quantization(shop):
    return divergences(shop) + rate(shop) + beside_onnxruntime(shop)
