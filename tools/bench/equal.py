"""Every decoder with recorded answers, split in 1, 2, 3 and one-per-layer partitions: compares tokens and logits of hpp-exec with the
recorded ones of the unsplit model, and with hpp-exec on one partition."""

import glob
import json
import os

import numpy as np

import measure
from table import row
from workshop import OUT, ROOT

DECODERS = ("decoder_kv", "decoder_no_cache", "decoder_merged_if")
CUTS = (1, 2, 3, 1000)


def decoders():
    """Directories of models with recorded answers: the fixtures, and those below HPP_MODELS."""
    roots = [os.path.join(ROOT, "fixtures", "models")] + [r for r in [os.environ.get("HPP_MODELS")] if r]
    found = {}
    for root in roots:
        for path in sorted(glob.glob(os.path.join(root, "*", "*", "reference.json"))):
            folder = os.path.dirname(path)
            with open(path, encoding="utf-8") as reference:
                if json.load(reference)["kind"] in DECODERS:
                    found[os.path.relpath(folder, root)] = folder
    return found


def generate(shop, folder, name, cuts, recorded):
    """Tokens and logits of the model in `folder`, split into `cuts` partitions."""
    plan, _ = shop.split(folder, f"equal/{name}-{cuts}", "--partitions", cuts)
    logits = f"{plan}.npy"
    arguments = [plan, "--tokens", ",".join(str(t) for t in recorded["prompt_ids"]), "--max-new", len(recorded["tokens"]),
                 "--temperature", 0, "--ignore-eos", "--logits", logits]
    embeddings = os.path.join(folder, "embed_tokens.npy")
    if os.path.exists(embeddings):
        arguments += ["--embeddings", embeddings]
    answer = shop.exec_json(*arguments)
    return answer["tokens"], np.load(logits)


def same_tokens(tokens, recorded, error):
    """Whether tokens are equal up to the first step where the two best logits are closer than the logits' error."""
    for ours, theirs, margin in zip(tokens, recorded["tokens"], recorded["margins"]):
        if ours != theirs:
            return margin <= 2 * error
    return len(tokens) == len(recorded["tokens"])


def compare(ours, recorded):
    """Whether the tokens are right, whether the logits are bit-identical, and their largest error."""
    tokens, logits = ours
    steps = min(len(logits), len(recorded["step_logits"]))
    agree = next((i for i in range(steps) if tokens[i] != recorded["tokens"][i]), steps - 1) + 1
    difference = np.abs(logits[:agree] - recorded["step_logits"][:agree]).max()
    largest = np.abs(recorded["step_logits"][:agree]).max()
    exact = bool(np.array_equal(logits[:agree], recorded["step_logits"][:agree]))
    return same_tokens(tokens, recorded, difference), exact, float(difference / largest)


def measure_all(shop):
    right, total, exact, fp32, worst, wrong = 0, 0, 0, 0, 0.0, []
    for name, folder in decoders().items():
        recorded = np.load(os.path.join(folder, "reference.npz"))
        for cuts in CUTS:
            try:
                ours = generate(shop, folder, name, cuts, recorded)
            except measure.Failed as failure:
                total += 1
                wrong.append(f"{name} in {cuts}: {failure}")
                continue
            total += 1
            tokens, identical, error = compare(ours, recorded)
            right += tokens
            if not tokens:
                wrong.append(f"{name} in {cuts}: other tokens, logits off by {error:.1e}")
            if "fp32" in name or name.startswith(("optimum/", "torch/")) and "fp16" not in name:
                fp32 += 1
                exact += identical
                worst = max(worst, error)
                if not identical:
                    print(f"  {name} in {cuts}: logits off by {error:.1e}", flush=True)
    for line in wrong:
        print(f"  {line}", flush=True)
    return [
        row("recorded tokens, split in 1, 2, 3, one per layer", f"{right} of {total}", "", "", "all", right == total),
        row("fp32 logits against the unsplit model", f"{exact} of {fp32} bit-identical", "", f"worst {worst:.1e}",
            "identical or < 1e-5", worst < 1e-5),
    ]
