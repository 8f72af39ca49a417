"""`make bench`: runs the measurements of docs/BENCHMARKS.md and prints one table, with the versions used.

    bench.py --target DIR [--before DIR] [--threads N] [--rounds N] [--small] [NAME ...]

NAME is one of MEASUREMENTS below (`--help` lists them).
Without names, all but those with llama-cpp (which must be built first: make bench-llama-cpp), openvino (which needs
tools/scripts/deps.sh openvino), before and together (which need --before).
Results are kept in out/bench/results.json after each measurement. `--small` uses a decoder of 4 layers: for trying the scripts, not for numbers.
"""

import argparse
import os
import sys

import before
import beside_llama_cpp
import changing
import disk
import equal
import experts
import jobs
import llama_server
import measure
import neurons
import people
import planning
import quantization
import serving
import speculation
import speed
import splitting
import streaming
from host import physical_cores, versions
from table import Table, row
from workshop import OUT, Workshop

PACKAGES = ("onnxruntime", "onnxruntime-genai", "onnx", "llama-cpp-python")
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
    "compressed": disk.compressed,
    "fits": disk.model_that_fits,
    "changing": changing.changing,
    "experts": experts.by_demand,
    "experts-ahead": experts.ahead,
    "experts-int8": experts.in_integers,
    "neurons": neurons.active,
    "jobs": jobs.many_sequences,
    "whole-jobs": jobs.whole_jobs,
    "job-predictions": jobs.predictions,
    "rows": jobs.batched_rows,
    "speculation": speculation.speculation,
    "quantization": quantization.quantization,
    "serving": serving.serving,
    "kv-pages": serving.page_sizes,
    "streaming": streaming.on_webgpu,
    "python": people.python,
    "openvino": people.openvino,
    "before": before.against_before,
    "together": before.together,
    "llama-cpp": beside_llama_cpp.in_memory,
    "disk-llama-cpp": beside_llama_cpp.from_disk,
    "jobs-llama-cpp": beside_llama_cpp.in_a_batch,
    "experts-llama-cpp": beside_llama_cpp.with_experts,
    "serving-llama-cpp": llama_server.beside_llama_server,
}


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--target", default="target/release", help="where the binaries are")
    arguments.add_argument("--before", help="an earlier build's binaries, for the measurements `before` and `together`")
    arguments.add_argument("--threads", type=int, default=physical_cores())
    arguments.add_argument("--rounds", type=int, default=5, help="rounds; each measures every side once")
    arguments.add_argument("--small", action="store_true")
    arguments.add_argument("names", nargs="*", choices=[*MEASUREMENTS, []])
    asked = arguments.parse_args()
    names = asked.names or [name for name in MEASUREMENTS if "llama-cpp" not in name and name not in ("before", "together", "openvino")]
    shop = Workshop(asked.target, asked.threads, asked.rounds, asked.small, before=asked.before)
    table = Table(os.path.join(OUT, "results-small.json" if asked.small else "results.json"))
    failed = False
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            table.put(name, MEASUREMENTS[name](shop))
        except measure.Failed as failure:
            failed = True
            print(failure, file=sys.stderr)
            table.put(name, [row(name, result="failed", verdict=False)])
    print(f"\n{versions(asked.threads, PACKAGES)}\n\n{table.text(names)}")
    sys.exit(1 if failed else 0)


main()
