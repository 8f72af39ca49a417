"""Runs one model many times through stock ONNX Runtime with the same inputs and compares every output bit by bit.

    provider_repeats.py [options] MODEL

    provider_repeats.py --runs 300 fixtures/models/genai/llama3-int4-cpu       one process, states fed back
    provider_repeats.py --binding ...      states stay in device memory, through io-binding
    provider_repeats.py --processes 20 ... also compares fresh processes with each other
        provider_repeats.py --nodes ...        compares every intermediate tensor and names the first operators that differ
        provider_repeats.py --alone QMoE ...   runs each node of one operator in a model of its own
        provider_repeats.py --provider cpu ... for comparison

A kernel that gives different bits for the same input is faulty by itself: no code of HPP is involved. MODEL is a directory with
model.onnx, or such a file. The first pass takes a prompt, the others one token each; tokens are fixed, so that no difference is
caused by an earlier choice. Prompts of other lengths run in between (--stir), so that kernels find other bytes in reused buffers.

Needs ONNX Runtime, onnx and numpy; the WebGPU plugin's path is in HPP_WEBGPU_PLUGIN:

    tools/scripts/with-webgpu.sh tools/scripts/with-deps.sh python3 tools/bench/provider_repeats.py MODEL

Prints one line per output that differs and a summary as JSON; exits with 1 if anything differs.
"""

import argparse
import collections
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort

TYPES = {
    onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.FLOAT16: np.float16, onnx.TensorProto.INT64: np.int64,
    onnx.TensorProto.INT32: np.int32, onnx.TensorProto.BOOL: np.bool_,
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--provider", choices=["webgpu", "cpu"], default="webgpu")
    parser.add_argument("--runs", type=int, default=200, help="repetitions in one process")
    parser.add_argument("--prompt", type=int, default=6, help="tokens in the first pass")
    parser.add_argument("--steps", type=int, default=4, help="passes of one token after it")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--binding", action="store_true", help="states stay in device memory")
    parser.add_argument("--stir", action="store_true", help="run prompts of other lengths in between")
    parser.add_argument("--nodes", action="store_true", help="compare every intermediate tensor")
    parser.add_argument("--alone", metavar="OPERATOR", help="run each node of this operator by itself")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the provider")
    parser.add_argument("--quiet", action="store_true", help="print the summary only")
    return parser.parse_args()


def model_file(path):
    return path / "model.onnx" if path.is_dir() else path


def new_session(model, provider, options):
    """`model` is a path or bytes. Everything that the provider supports runs on it, the rest on the CPU."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 2
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.log_severity_level = 3
    if provider == "webgpu":
        name = "WebGpuExecutionProvider"
        if not any(device.ep_name == name for device in ort.get_ep_devices()):
            ort.register_execution_provider_library("webgpu", os.environ["HPP_WEBGPU_PLUGIN"])
        devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
        if not devices:
            sys.exit("no WebGPU device: run under tools/scripts/with-webgpu.sh")
        settings.add_provider_for_devices(devices[:1], dict(option.split("=", 1) for option in options))
        return ort.InferenceSession(model, settings)
    return ort.InferenceSession(model, settings, providers=["CPUExecutionProvider"])


class Decoder:
    """A decoder's inputs, pass by pass."""

    def __init__(self, path):
        self.file = model_file(path)
        self.graph = onnx.load(self.file, load_external_data=False).graph
        self.inputs = {value.name: value.type.tensor_type for value in self.graph.input}
        config = self.file.parent / "genai_config.json"
        self.head_size = json.loads(config.read_text())["model"]["decoder"]["head_size"] if config.exists() else None
        windows = [a.i for node in self.graph.node for a in node.attribute if a.name == "local_window_size"]
        self.window = max(windows, default=0)
        past = [name for name in self.inputs if name.startswith("past")]
        present = lambda name: name.replace("past_key_values", "present").replace("past.", "present.")
        self.states = {name: present(name) for name in past}
        table = next((v.type.tensor_type.shape.dim[-1].dim_value for v in self.graph.output if v.name == "logits"), 0)
        self.vocabulary = table or 256

    def first_state(self, name):
        dims = []
        for dim in self.inputs[name].shape.dim:
            known = {"batch_size": 1, "kv_cache_dim": self.head_size}.get(dim.dim_param, 0)
            # A sliding window needs its whole buffer from the beginning.
            dims.append(dim.dim_value or (self.window if "sliding" in dim.dim_param else known))
        return np.zeros(dims, TYPES[self.inputs[name].elem_type])

    def feeds(self, tokens, past):
        """The inputs of one pass, except for its states."""
        count, total = len(tokens), past + len(tokens)
        made = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, total))}
        positions = np.arange(past, total)
        if "position_ids" in self.inputs:
            axes = len(self.inputs["position_ids"].shape.dim)
            made["position_ids"] = np.broadcast_to(positions, (3, 1, count) if axes == 3 else (1, count))
        ready = {}
        for name, kind in self.inputs.items():
            if name in made:
                ready[name] = np.ascontiguousarray(made[name], TYPES[kind.elem_type])
            elif name not in self.states:
                sys.exit(f"cannot generate input {name}")
        return ready

    def passes(self, prompt, steps):
        """Fixed tokens: those of the prompt, then one per step."""
        rng = np.random.default_rng(prompt)
        tokens = rng.integers(3, self.vocabulary, prompt + steps).tolist()
        return [tokens[:prompt]] + [[token] for token in tokens[prompt:]]


def run_fed_back(session, decoder, passes):
    """All outputs of all passes; states are copied through host memory."""
    names = [output.name for output in session.get_outputs()]
    states = {name: decoder.first_state(name) for name in decoder.states}
    past, results = 0, []
    for tokens in passes:
        outputs = dict(zip(names, session.run(None, {**decoder.feeds(tokens, past), **states})))
        states = {name: outputs[present] for name, present in decoder.states.items()}
        results.append(outputs)
        past += len(tokens)
    return results


def run_bound(session, decoder, passes):
    """All outputs of all passes; states stay in the memory of the session's outputs."""
    device = session.get_providers()[0] != "CPUExecutionProvider"
    names = [output.name for output in session.get_outputs()]
    states = {name: decoder.first_state(name) for name in decoder.states}
    past, results = 0, []
    for tokens in passes:
        binding = session.io_binding()
        for name, value in {**decoder.feeds(tokens, past), **states}.items():
            if isinstance(value, np.ndarray):
                binding.bind_cpu_input(name, value)
            else:
                binding.bind_ortvalue_input(name, value)
        kept = set(decoder.states.values())
        for name in names:
            binding.bind_output(name, "gpu" if device and name in kept else "cpu", 0)
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        values = dict(zip(names, binding.get_outputs()))
        results.append({name: value.numpy() for name, value in values.items()})
        states = {name: values[present] for name, present in decoder.states.items()}
        past += len(tokens)
    return results


def differences(first, again):
    """Names of outputs that differ, with the pass, the number of elements and the largest difference."""
    for at, (one, other) in enumerate(zip(first, again)):
        for name, expected in one.items():
            found = other[name]
            if expected.tobytes() != found.tobytes():
                apart = np.abs(expected.astype(np.float64) - found.astype(np.float64))
                yield at, name, int((expected != found).sum()), float(np.nanmax(apart))


def digest(results):
    hashed = hashlib.sha256()
    for outputs in results:
        for name in sorted(outputs):
            hashed.update(outputs[name].tobytes())
    return hashed.hexdigest()[:16]


def with_intermediates(decoder):
    """The model with every tensor of known type as an output."""
    model = onnx.load(decoder.file)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=False, data_prop=False)
    known = {value.name: value for value in [*inferred.graph.value_info, *model.graph.value_info]}
    there = {output.name for output in model.graph.output}
    for node in model.graph.node:
        for name in node.output:
            if name in known and name not in there and known[name].type.tensor_type.elem_type in TYPES:
                model.graph.output.append(known[name])
                there.add(name)
    return model


def begins_at(model, names):
    """The differing tensors whose nodes have no differing inputs: (operator, node, tensor)."""
    for node in model.graph.node:
        for name in node.output:
            if name in names and not any(source in names for source in node.input):
                yield node.op_type, node.name, name


def alone(decoder, operator, feeds):
    """One-node models of an operator, each with the inputs it has in the model's first pass on the CPU."""
    model = with_intermediates(decoder)
    reference = new_session(model.SerializeToString(), "cpu", [])
    names = [output.name for output in reference.get_outputs()]
    states = {name: decoder.first_state(name) for name in decoder.states}
    fed = {**feeds, **states}
    found = {**dict(zip(names, reference.run(None, fed))), **fed}
    weights = {weight.name: weight for weight in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != operator:
            continue
        given = [name for name in node.input if name and name not in weights]
        if missing := [name for name in given if name not in found]:
            print(f"skipped {node.name}: no value of {missing}", file=sys.stderr)
            continue
        info = lambda name: onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(found[name].dtype), None)
        # Outputs without a declared type have that of the first input.
        output = lambda name: info(name) if name in found else onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(found[given[0]].dtype), None)
        graph = onnx.helper.make_graph(
            [node], "alone", [info(name) for name in given], [output(name) for name in node.output if name],
            [weights[name] for name in node.input if name in weights])
        single = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
        yield node, single.SerializeToString(), {name: found[name] for name in given}


def repeat(run, runs, report, stir=lambda at: None):
    """Repeats the run; how often each output differed from the first run."""
    first, counts, wrong = run(), collections.Counter(), 0
    for at in range(1, runs):
        stir(at)
        found = list(differences(first, run()))
        wrong += bool(found)
        for place, name, elements, apart in found:
            counts[name] += 1
            report(f"run {at} pass {place}: {name}: {elements} elements, by up to {apart:.3g}")
    return first, counts, wrong


def in_processes(options):
    """Runs fresh processes; the count of each digest of all outputs."""
    command = [*sys.argv, "--processes", "1"]
    digests, wrong = collections.Counter(), 0
    for _ in range(options.processes):
        done = subprocess.run([sys.executable, *command, "--quiet"], capture_output=True, text=True)
        if not done.stdout:
            sys.exit(done.stderr)
        summary = json.loads(done.stdout.splitlines()[-1])
        digests[summary["digest"]] += 1
        wrong += summary["runs_that_differ"]
    return {"processes": options.processes, "digests": digests, "runs_that_differ": wrong}


def main():
    options = arguments()
    report = (lambda line: None) if options.quiet else (lambda line: print(line, flush=True))
    if options.processes > 1:
        summary = in_processes(options)
        print(json.dumps(summary))
        return int(summary["runs_that_differ"] > 0 or len(summary["digests"]) > 1)
    decoder = Decoder(options.model)
    passes = decoder.passes(options.prompt, options.steps)
    if options.alone:
        total = 0
        for node, model, feeds in alone(decoder, options.alone, decoder.feeds(passes[0], 0)):
            session = new_session(model, options.provider, options.option)
            names = [output.name for output in session.get_outputs()]
            run = lambda: [dict(zip(names, session.run(None, feeds)))]
            _, counts, wrong = repeat(run, options.runs, report)
            print(json.dumps({"operator": node.op_type, "node": node.name, "runs": options.runs, "runs_that_differ": wrong}), flush=True)
            total += wrong
        return int(total > 0)
    model = with_intermediates(decoder) if options.nodes else None
    source = model.SerializeToString() if model else str(decoder.file)
    session = new_session(source, options.provider, options.option)
    once = run_bound if options.binding else run_fed_back

    def stir(at):
        if options.stir:
            once(session, decoder, decoder.passes(1 + at % 13, 1))

    first, counts, wrong = repeat(lambda: once(session, decoder, passes), options.runs, report, stir)
    summary = {"runs": options.runs, "runs_that_differ": wrong, "outputs": counts, "digest": digest(first)}
    if model:
        summary["begins_at"] = [list(where) for where in begins_at(model, counts)]
    print(json.dumps(summary))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
