"""`make bench`: the measurements the README quotes, as one table, with the versions used.

    bench.py --target DIR [--threads N] [--rounds N] [--small] [equal|huge|extract|overhead|genai|planning|gain|profiling|predictions|disk|fits|llama-cpp|disk-llama-cpp ...]

Without names, all but those with llama-cpp (which must be built first: make bench-llama-cpp). Results are kept in out/bench/results.json
after each measurement. `--small` uses a decoder of 4 layers: for trying the scripts, not for numbers.
"""

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import time

import disk
import equal
import measure
import planning
import speed
import splitting
from table import Table, processor, row
from workshop import OUT, ROOT, Workshop

MEASUREMENTS = {
    "equal": equal.measure_all,
    "huge": splitting.huge,
    "extract": splitting.against_extract_model,
    "overhead": speed.split_overhead,
    "genai": speed.against_genai,
    "planning": planning.planning_time,
    "gain": planning.streaming_gain,
    "profiling": planning.profiling_cost,
    "predictions": planning.predictions,
    "disk": disk.larger_than_memory,
    "fits": disk.model_that_fits,
    "llama-cpp": speed.against_llama_cpp,
    "disk-llama-cpp": disk.beside_llama_cpp,
}


def physical_cores():
    """Cores without their hyper-threads: what both runtimes take by default."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            lines = [line.split(":")[1].strip() for line in info if line.startswith(("physical id", "core id"))]
        return len(set(zip(lines[::2], lines[1::2]))) or os.cpu_count()
    except OSError:
        return os.cpu_count()


def versions(threads):
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [f"HPP {commit.stdout.strip() or '?'}, {time.strftime('%Y-%m-%d')}",
             f"{processor()}, {threads} threads, {platform.system()} {platform.release()}"]
    found = []
    for package in ("onnxruntime", "onnxruntime-genai", "onnx", "llama-cpp-python"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            pass
    return "\n".join(lines + [", ".join(found)])


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--target", default="target/release", help="where the binaries are")
    arguments.add_argument("--threads", type=int, default=physical_cores())
    arguments.add_argument("--rounds", type=int, default=5, help="how often each side of a speed is measured, in turns")
    arguments.add_argument("--small", action="store_true")
    arguments.add_argument("names", nargs="*", choices=[*MEASUREMENTS, []])
    asked = arguments.parse_args()
    names = asked.names or [name for name in MEASUREMENTS if "llama-cpp" not in name]
    shop = Workshop(asked.target, asked.threads, asked.rounds, asked.small)
    table = Table(os.path.join(OUT, "results-small.json" if asked.small else "results.json"))
    failed = False
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            table.put(name, MEASUREMENTS[name](shop))
        except measure.Failed as failure:
            failed = True
            print(failure, file=sys.stderr)
            table.put(name, [row(name, result="failed", met=False)])
    print(f"\n{versions(asked.threads)}\n\n{table.text(names)}")
    sys.exit(1 if failed else 0)


main()
