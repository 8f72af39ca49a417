"""The exporters' models of `fixtures/models` on a device: whether they give their recorded tokens there, resident and streamed."""

import array
import collections
import concurrent.futures
import glob
import json
import os
import struct
import subprocess
import sys
import zipfile

from table import row
from workshop import ROOT

MODELS = os.path.join(ROOT, "fixtures", "models")
# hpp-split options of each placement.
PLACES = {"resident": ("--gpu-layers", "all"), "streamed": ("--stream", "all")}
# Models that run at the same time.
AT_ONCE = 4
# The difference of logits, relative to the largest of a step, that rounding explains: in float32, and in fewer bits. The recorded answers
# of 4-bit models are the CPU's with 8-bit activations; with float32 activations the CPU itself differs from them by up to 0.12.
TOLERANCE = {False: 1e-3, True: 1.5e-1}


def decoders():
    """The directory of each decoder with a recorded answer, with that answer."""
    for path in sorted(glob.glob(os.path.join(MODELS, "*", "*", "reference.json"))):
        with open(path, encoding="utf-8") as file:
            recorded = json.load(file)
        if recorded["kind"].startswith("decoder"):
            yield os.path.dirname(path), recorded


def models(shop, provider):
    """One row per placement: how many models give the recorded tokens on the device, and what the others do."""
    tasks = [(place, model, recorded) for place in PLACES for model, recorded in decoders()]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(lambda task: outcome(shop, provider, *task), tasks))
    rows = []
    for place in PLACES:
        found = [(os.path.basename(model), result) for (where, model, _), result in zip(tasks, results) if where == place]
        for name, result in found:
            print(f"  {provider} {place} {name}: {result}", file=sys.stderr, flush=True)
        kinds = collections.Counter(result.split(":")[0] for _, result in found)
        others = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common() if kind != "as recorded")
        wrong = any(result.startswith(("wrong", "failed")) for _, result in found)
        rows.append(row(f"{provider}: exporters' decoders with the recorded tokens, {place}", f"{kinds['as recorded']} of {len(found)}",
                        "", others, "all that the device takes", not wrong and kinds["as recorded"] > 0))
    return rows


def outcome(shop, provider, place, model, recorded):
    """`as recorded`, or what happened and where."""
    name = os.path.basename(model)
    try:
        plan, _ = shop.split(model, f"models/{provider}-{place}-{name}", "--vram", "8G", *PLACES[place])
    except Exception as failure:
        return f"failed: hpp-split: {cause(str(failure))}"
    command = [*shop.around, shop.binary("hpp-exec"), plan, "--tokens", ",".join(map(str, recorded["prompt_ids"])), "--max-new",
               str(len(recorded["tokens"])), "--ignore-eos", "--temperature", "0", "--providers", f"{provider},cpu", "--json"]
    scores = f"{plan}.npy"
    command += ["--logits", scores]
    embeddings = os.path.join(model, "embed_tokens.npy")
    if os.path.exists(embeddings):
        command += ["--embeddings", embeddings]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=shop.limit)
    except subprocess.TimeoutExpired:
        return f"failed: no answer in {shop.limit} s"
    if done.returncode != 0:
        return f"failed: {cause(done.stderr)}"
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    used = {stage["provider"].lower() for stage in answer["timings"]["stages"] if stage["device"].startswith("gpu")}
    if used != {provider}:
        said = [line for line in done.stderr.splitlines() if "instead of" in line]
        return f"on the CPU instead: {said[0] if said else sorted(used)}"
    wrong = difference(model, recorded["tokens"], answer["tokens"], scores)
    left = [line for line in done.stderr.splitlines() if "leaves" in line]
    return wrong or (f"as recorded: {left[0]}" if left else "as recorded")


def difference(model, wanted, tokens, scores):
    """Where an answer differs from the recorded one by more than rounding; None if nowhere. Up to the first other token, which must
    have been an unclear choice, logits are compared, too."""
    name = os.path.basename(model)
    tolerance = TOLERANCE[any(dtype in name for dtype in ("fp16", "bf16", "int4", "int8"))]
    with zipfile.ZipFile(os.path.join(model, "reference.npz")) as arrays:
        reference = floats(arrays.read("step_logits.npy"))
    with open(scores, "rb") as file:
        found = floats(file.read())
    if len(found) != len(reference):
        return f"wrong: {len(found)} logits, recorded are {len(reference)}"
    vocab = len(reference) // len(wanted)
    for step, (token, right) in enumerate(zip(tokens, wanted, strict=True)):
        theirs, ours = (numbers[step * vocab:(step + 1) * vocab] for numbers in (reference, found))
        scale = max(map(abs, theirs))
        off = max(abs(a - b) for a, b in zip(ours, theirs)) / scale
        if not off <= tolerance:
            return f"wrong: logits of step {step} differ by {off:.2g} of the largest"
        if token != right:
            best = sorted(theirs)
            clear = best[-1] - best[-2] > tolerance * scale
            return f"wrong: token {step} is {token} instead of {right}" if clear else None
    return None


def floats(npy):
    """The numbers of a file of NumPy's format, version 1, of little-endian float32."""
    (length,) = struct.unpack_from("<H", npy, 8)
    if b"'<f4'" not in npy[:10 + length]:
        raise ValueError(f"not float32: {npy[10:10 + length]!r}")
    numbers = array.array("f")
    numbers.frombytes(npy[10 + length:])
    return numbers


def cause(text):
    """The cause of a failure: the lines around a panic, or the last two."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or ["nothing was printed"]
    panic = next((number for number, line in enumerate(lines) if "panicked at" in line), None)
    return " / ".join(lines[-2:] if panic is None else lines[panic:panic + 2])[:300]
