"""Writes expected/<model>.json: what observing a model should show, worked out with onnxruntime and numpy alone.

Each model runs once over the recorded prompt and the recorded tokens after it, with the tensors named below among its
outputs; `hpp-exec probe` sees the same tokens through the cache, one at a time. The names are read off the models by eye.

    tools/scripts/with-deps.sh python3 tools/profile/tests/observe/expected.py MODELS_DIR
"""

import json
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime as ort

GENERATED = 6


def genai_moe(layers=4):
    path = "/model/layers.{}"
    hidden = [["/model/embed_tokens/Gather/output_0"]]
    hidden += [[f"{path.format(i)}/post_attention_layernorm/output_3", f"{path.format(i)}/moe/QMoE/output_0"] for i in range(layers)]
    return dict(
        hidden=hidden,
        scores={i: f"{path.format(i)}/moe/router/Reshape/output_0" for i in range(layers)},
        # The others have sliding windows.
        attention_of={i: f"{path.format(i)}/attn/GroupQueryAttention" for i in (1, 3)},
        top_k=2,
    )


def optimum(layers=4, first="/model/layers.0/input_layernorm/Cast_output_0"):
    hidden = [[first]] + [[f"/model/layers.{i + 1}/input_layernorm/Cast_output_0"] for i in range(layers - 1)]
    hidden += [["/model/norm/Cast_output_0"]]
    return dict(hidden=hidden, attention={i: f"/model/layers.{i}/self_attn/Softmax_output_0" for i in range(layers)})


def mixtral(layers=4):
    experts = {i: f"/model/layers.{i}/block_sparse_moe/TopK_output_1" for i in range(layers)}
    return dict(optimum(layers), experts=experts, experts_in_all=4)


def opt(layers=4):
    hidden = [["/decoder/Add_5_output_0"]] + [[f"/decoder/layers.{i}/Reshape_1_output_0"] for i in range(layers)]
    return dict(
        hidden=hidden,
        neurons={i: f"/decoder/layers.{i}/activation_fn/Relu_output_0" for i in range(layers)},
        attention={i: f"/decoder/layers.{i}/self_attn/Softmax_output_0" for i in range(layers)},
    )


MODELS = {
    "genai/gpt-oss-int4-cpu": genai_moe(),
    "optimum/llama-with-past": optimum(),
    "optimum/mixtral-with-past": mixtral(),
    "optimum/opt-with-past": opt(),
}


def names(look_at):
    flat = [name for group in look_at["hidden"] for name in group]
    for kind in ("scores", "experts", "neurons", "attention"):
        flat += look_at.get(kind, {}).values()
    return list(dict.fromkeys(flat))


def expose(model, look_at):
    """Adds outputs; asks GroupQueryAttention for its weights."""
    graph = model.graph
    for layer, node_name in look_at.get("attention_of", {}).items():
        node = next(n for n in graph.node if n.name == node_name)
        node.attribute.append(onnx.helper.make_attribute("qk_output", 2))
        name = f"weights.{layer}"
        node.output.append(name)
        look_at.setdefault("attention", {})[layer] = name
    known = {o.name for o in graph.output}
    graph.output.extend(onnx.ValueInfoProto(name=n) for n in names(look_at) if n not in known)


def feed(directory, reference, tokens):
    config = directory / "genai_config.json"
    decoder = json.loads(config.read_text())["model"]["decoder"] if config.is_file() else {}
    feeds = {}
    for port in reference["inputs"]:
        name, shape = port["name"], port["shape"]
        if name == "input_ids":
            feeds[name] = np.array([tokens], np.int64)
        elif name == "attention_mask":
            feeds[name] = np.ones((1, len(tokens)), np.int64)
        elif name == "position_ids":
            feeds[name] = np.arange(len(tokens), dtype=np.int64)[None]
        else:
            window = decoder.get("sliding_window", {}).get("window_size", 0)
            length = window if shape[2] == "past_sliding_length" else 0
            size = shape[3] if isinstance(shape[3], int) else decoder["head_size"]
            feeds[name] = np.zeros((1, shape[1], length, size), np.float32)
    return feeds


def run(directory, look_at):
    reference = json.loads((directory / "reference.json").read_text())
    tokens = reference["prompt_ids"] + reference["tokens"][:GENERATED]
    model = onnx.load(directory / "model.onnx")
    expose(model, look_at)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = names(look_at)
    outputs = session.run(wanted, feed(directory, reference, tokens))
    return dict(zip(wanted, outputs)), len(tokens)


def hidden_states(outputs, look_at):
    states = []
    for group in look_at["hidden"]:
        total = sum(outputs[name].astype(np.float64) for name in group)
        states.append(total.reshape(-1, total.shape[-1]))
    return states


def boundary(state):
    return dict(
        elements=state.size,
        mean_abs=float(np.abs(state).mean()),
        mean=float(state.mean()),
        variance=float(state.var()),
        max_abs=float(np.abs(state).max()),
    )


def influence(before, after):
    cosine = (before * after).sum(1) / np.linalg.norm(before, axis=1) / np.linalg.norm(after, axis=1)
    return float((1 - cosine).mean())


def lru_hits(visits, size):
    cache, hits = [], 0
    for expert in visits:
        if expert in cache:
            hits += 1
            cache.remove(expert)
        elif len(cache) == size:
            cache.pop(0)
        cache.append(expert)
    return hits


def best_hits(visits, size):
    """Belady: drops what is needed latest."""
    cache, hits = set(), 0
    for at, expert in enumerate(visits):
        if expert in cache:
            hits += 1
            continue
        if len(cache) == size:
            rest = visits[at + 1:]
            cache.remove(max(cache, key=lambda e: rest.index(e) if e in rest else len(rest)))
        cache.add(expert)
    return hits


def experts(chosen, count):
    visits = [int(e) for row in chosen for e in row]
    sizes = range(1, count + 1)
    return dict(
        counts=[visits.count(e) for e in range(count)],
        lru_hits=[lru_hits(visits, n) for n in sizes],
        oracle_hits=[best_hits(visits, n) for n in sizes],
        first_visits=len(set(visits)),
    )


def entropy(weights):
    rows = weights.astype(np.float64).reshape(-1, weights.shape[-1])
    rows = rows / rows.sum(1, keepdims=True)
    logs = np.log(np.where(rows > 0, rows, 1))
    return dict(rows=len(rows), mean=float(-(rows * logs).sum(1).mean()))


def expected(directory, look_at):
    outputs, tokens = run(directory, look_at)
    states = hidden_states(outputs, look_at)
    result = dict(
        generated=GENERATED,
        tokens=tokens,
        boundaries=[boundary(s) for s in states],
        influence=[influence(a, b) for a, b in zip(states, states[1:])],
        experts={}, neurons={}, attention={},
    )
    for layer, name in look_at.get("scores", {}).items():
        scores = outputs[name].reshape(-1, outputs[name].shape[-1])
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, : look_at["top_k"]]
        result["experts"][f"layers.{layer}"] = experts(chosen, scores.shape[1])
    for layer, name in look_at.get("experts", {}).items():
        chosen = outputs[name].reshape(-1, outputs[name].shape[-1])
        result["experts"][f"layers.{layer}"] = experts(chosen, look_at["experts_in_all"])
    for layer, name in look_at.get("neurons", {}).items():
        active = outputs[name].reshape(-1, outputs[name].shape[-1]) > 0
        result["neurons"][f"layers.{layer}"] = [int(n) for n in active.sum(0)]
    for layer, name in look_at.get("attention", {}).items():
        result["attention"][f"layers.{layer}"] = entropy(outputs[name])
    return result


def rounded(matrix, bits, group=32):
    """Symmetric, one scale for each group along the axis a MatMul sums over."""
    levels = 2 ** (bits - 1) - 1
    result = matrix.astype(np.float64)
    for start in range(0, len(matrix), group):
        rows = result[start:start + group]
        scale = np.abs(rows).max(0) / levels
        rows[:] = np.round(rows / np.where(scale > 0, scale, 1)) * scale
    return result.astype(matrix.dtype)


def log_softmax(scores):
    scores = scores.astype(np.float64)
    scores = scores - scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def sensitivity(directory, block, positions):
    """Divergence of the last scores when the matrices of one layer are rounded."""
    reference = json.loads((directory / "reference.json").read_text())
    tokens = reference["prompt_ids"] + reference["tokens"]

    def scores(bits):
        model = onnx.load(directory / "model.onnx")
        for tensor in model.graph.initializer:
            if bits and tensor.name.startswith(f"model.{block}.") and len(tensor.dims) == 2:
                matrix = rounded(onnx.numpy_helper.to_array(tensor), bits)
                tensor.CopyFrom(onnx.numpy_helper.from_array(matrix, tensor.name))
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(["logits"], feed(directory, reference, tokens))[0][0, -positions:]

    whole = scores(None)
    p = log_softmax(whole)
    result = {}
    for bits in (8, 4):
        other = scores(bits)
        kl = (np.exp(p) * (p - log_softmax(other))).sum(-1).mean()
        changed = (whole.argmax(-1) != other.argmax(-1)).mean()
        result[str(bits)] = dict(kl=float(kl), top1_changed=float(changed))
    return dict(block=block, positions=positions, tokens=tokens, bits=result)


def main():
    models, here = pathlib.Path(sys.argv[1]), pathlib.Path(__file__).parent / "expected"
    here.mkdir(exist_ok=True)
    for name, look_at in MODELS.items():
        directory = models / name
        if not directory.is_dir():
            print(f"{directory} is not there", file=sys.stderr)
            continue
        file = here / f"{directory.name}.json"
        file.write_text(json.dumps(expected(directory, look_at), indent=1) + "\n")
        print(file)
    found = sensitivity(models / "genai/llama3-fp32-cpu", "layers.1", positions=9)
    file = here / "llama3-fp32-cpu-rounded.json"
    file.write_text(json.dumps(found) + "\n")
    print(file)


if __name__ == "__main__":
    main()
