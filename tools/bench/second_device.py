"""A second GPU or a second host: what the planner's simulator predicts of each way to use one, for the presets that have a GPU.

    tools/bench/second_device.py --target target/release      (no GPU and no ONNX Runtime needed; models are sparse files of random sizes)

Ways, in milliseconds per token of one sequence, all by the same simulator:

one GPU         the preset.
layers          a second GPU like the first in the same machine, and partitions placed on both: what hpp-split does today.
rows, at best   each matrix is divided between both GPUs (llama.cpp's `row` mode): one device with twice the memory, rates and links (as far as
                host memory feeds them), and after attention and after the MLP of each layer an exchange of the hidden state through host memory:
                two copies, each with the link's latency.
rows, 2 threads the same, but each exchange also ends a run of ONNX Runtime on both GPUs and starts the next, as our partitions do, and a thread for
                each GPU does so.
rows, 1 thread  the same with one thread, which hpp-exec has: it makes the copies one after the other and starts one run after the other. While it
                issues the operators of a layer to one GPU, the other one waits: at most the 0.19 ms that a layer takes on an H200 with all weights there, six
                times what its memory takes (docs/measurements/2026-11-26-cuda.md). How much of that is the thread was not measured, so this
                column has two numbers: without it and with it.
two hosts       half of the layers on each of two machines of the preset, and the hidden state over a network of 1.1 GB/s and 100 us (10 GbE).
                Embedding and head are counted on both, which is 2 to 5 % too much.

A way is worth building where it predicts clearly less than `layers` or, over hosts, than `one GPU`.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ("rtx4060-laptop", "rtx4090-desktop", "h200-small-vram")
# Name, layers, hidden size, and the other options of hpp-fixtures llama.
MODELS = (
    ("8 B dense", 32, 4096, "--intermediate 14336 --heads 32 --kv-heads 8 --vocab 128256"),
    ("30 B MoE", 48, 2048, "--intermediate 768 --heads 32 --kv-heads 4 --vocab 151936 --experts 128 --top-k 8"),
    ("70 B dense", 80, 8192, "--intermediate 28672 --heads 64 --kv-heads 8 --vocab 128256"),
)
# Bytes of an activation.
ACTIVATION = 2
NETWORK_GB_PER_S, NETWORK_US = 1.1, 100
EXCHANGES = 2
# Most time in which a thread issues the operators of one layer, milliseconds.
ISSUE_MS = 0.19


class Preset:
    """The text of a machine description, and what the formulas above need of it."""

    def __init__(self, name):
        self.text = (ROOT / "fixtures" / "machines" / f"{name}.yaml").read_text()
        self.before, rest = self.text.split("\ngpus:\n")
        self.gpu, self.disk = rest.split("disk:")
        number = lambda field, text: float(re.search(rf"{field}: ([\d.]+)", text).group(1))
        self.latency_us = number("latency_us", self.gpu)
        self.launch_us = number("launch_us", self.gpu)
        self.link = number("to_device_gb_per_s", self.gpu)
        self.host_rate = number("memory_gb_per_s", self.before)

    def with_gpus(self, *gpus):
        return f"{self.before}\ngpus:\n{''.join(gpus)}disk:{self.disk}"

    def second(self):
        """Two GPUs, each with a link of its own."""
        return self.with_gpus(self.gpu, self.gpu)

    def double(self):
        """One GPU of twice the size."""
        gpu = self.gpu
        for field in ("memory_gb_per_s", "tflops"):
            gpu = re.sub(rf"{field}: ([\d.]+)", lambda found: f"{field}: {2 * float(found.group(1)):g}", gpu)
        gpu = re.sub(r"memory: (\d+) GiB", lambda found: f"memory: {2 * int(found.group(1))} GiB", gpu)
        link = min(2 * self.link, self.host_rate)
        gpu = re.sub(r"((?:to|from)_device_gb_per_s): [\d.]+", rf"\1: {link:g}", gpu)
        return self.with_gpus(gpu)

    def copy_ms(self, hidden):
        """Of a hidden state, from one GPU through host memory to the other."""
        return 2 * (self.latency_us / 1e3 + hidden * ACTIVATION / self.link / 1e6)

    def layer_overhead_ms(self, hidden):
        """What dividing a layer adds to half of it: at best, with a thread for each GPU, and with one thread for both without and with the
        time in which it issues operators."""
        copy, launch = self.copy_ms(hidden), self.launch_us / 1e3
        one_thread = EXCHANGES * 2 * (copy + launch)
        return EXCHANGES * copy, EXCHANGES * (copy + launch), one_thread, one_thread + ISSUE_MS


def decode_ms(split, model, machine):
    """The predicted time of a token, or None where nothing fits."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(machine)
        file.flush()
        command = [split, model, "--machine", file.name, "--dry-run", "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        if "fit" in done.stderr:
            return None
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)["predictions"]["decode_ms"]


def generated(fixtures, directory, layers, hidden, options):
    path = Path(directory) / f"{layers}-{hidden}"
    shape = ["--layers", layers, "--hidden", hidden, *options.split(), "--dtype", "int4", "--sparse"]
    subprocess.run([fixtures, "llama", *map(str, shape), path], check=True, capture_output=True)
    return path


def ways(split, preset, whole, half, layers, hidden):
    """The columns, milliseconds per token."""
    one = decode_ms(split, whole, preset.text)
    double = decode_ms(split, whole, preset.double())
    rows = [double and double + layers * overhead for overhead in preset.layer_overhead_ms(hidden)]
    each = decode_ms(split, half, preset.text)
    hop = NETWORK_US / 1e3 + hidden * ACTIVATION / NETWORK_GB_PER_S / 1e6
    return [one, decode_ms(split, whole, preset.second()), *rows, each and 2 * (each + hop)]


def cell(value, base):
    if value is None:
        return "does not fit"
    return f"{value:.1f}" + (f" ({base / value:.2f}x)" if base else "")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--target", type=Path, default=ROOT / "target" / "release")
    target = arguments.parse_args().target.absolute()
    print("| preset | model, 4 bits | one GPU | layers on two | rows, at best | rows, 2 threads | rows, 1 thread: issuing 0; 0.19 ms a layer | two hosts |")
    print("|---|---|---|---|---|---|---|---|")
    for model, layers, hidden, options in MODELS:
        with tempfile.TemporaryDirectory() as directory:
            whole, half = (generated(target / "hpp-fixtures", directory, count, hidden, options) for count in (layers, layers // 2))
            for name in PRESETS:
                times = ways(target / "hpp-split", Preset(name), whole, half, layers, hidden)
                cells = [cell(times[0], None), *(cell(time, times[0]) for time in times[1:])]
                cells[4:6] = ["; ".join(cells[4:6])]
                print(f"| {name} | {model} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
