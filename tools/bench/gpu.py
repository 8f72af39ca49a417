"""`make bench-gpu`: models that do not fit a GPU, as one table. Needs only python3, built commands and ONNX Runtime.

    gpu.py --target DIR [--provider cuda|webgpu] [--dtype fp16|fp32|int4-fp16] [--rounds N] [--minutes N] [--small] [exact|models|decode|prompt|jobs|mixture ...]

ONNX Runtime is the one of ORT_DYLIB_PATH. Results are kept in results-gpu.json of out/bench, or of HPP_BENCH_OUT, after each
measurement, and later calls add to them: `--keep-profile` reuses the profile and the models of an earlier call. Without a GPU it
reports that and succeeds. `--small` uses a tiny decoder, to try the scripts; its numbers mean nothing.
"""

import argparse
import os
import platform
import sys
import time
import traceback

import gpu_jobs
import gpu_mixture
import gpu_models
import gpu_rows
import measure
import streaming
from host import physical_cores, versions
from table import Table, row
from workshop import OUT, Workshop

NAMES = ("exact", "models", "decode", "prompt", "jobs", "mixture")
# Those that measure the large model.
LARGE = {"decode": gpu_rows.decode, "prompt": gpu_rows.prompt, "jobs": gpu_jobs.jobs}
# Timeout of a command, in seconds.
LIMIT = 120


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="target/release", help="directory of the binaries")
    parser.add_argument("--provider", choices=("cuda", "webgpu"), default="cuda")
    parser.add_argument("--dtype", choices=("fp16", "fp32", "int4-fp16"), help="element type of the large model [default: fp16 on cuda, fp32 on webgpu]")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--rounds", type=int, default=3, help="rounds; each measures every side once")
    parser.add_argument("--minutes", type=float, help="start no measurement after this many minutes, and list those not started")
    parser.add_argument("--keep-profile", action="store_true", help="reuse the existing profile")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("names", nargs="*", choices=[*NAMES, []])
    asked = parser.parse_args()
    asked.dtype = asked.dtype or ("fp16" if asked.provider == "cuda" else "fp32")
    if asked.provider == "cuda" and asked.dtype == "fp32":
        parser.error("CUDA's GroupQueryAttention takes half precision only: --dtype fp16 or int4-fp16")
    return asked


def device(shop, provider):
    """The device in words, and why it cannot be used, if it cannot."""
    seen = streaming.devices(shop)
    problem = streaming.why_not(seen, provider)
    # For scripts that run without hpp-exec: the same library.
    os.environ["ORT_DYLIB_PATH"] = seen["library"] or ""
    lines = [f"ONNX Runtime {seen.get('version') or '?'}, python {platform.python_version()}"]
    if seen.get("cuda_driver"):
        lines.append(f"CUDA driver {seen['cuda_driver']}")
    for known in seen["providers"]:
        if known["name"].lower() == provider:
            lines += [f"{known['name']} {known['version'] or ''}: {found['description']}, {memory(found)}" for found in known["devices"]]
    return lines, problem


def memory(found):
    total = found.get("memory_total")
    return f"{total / 2**30:.0f} GiB" if total else "memory unknown"


def main():
    asked = arguments()
    names, started = asked.names or NAMES, time.monotonic()
    shop = Workshop(asked.target, asked.threads, asked.rounds, asked.small, limit=LIMIT)
    table = Table(os.path.join(OUT, "results-gpu-small.json" if asked.small else "results-gpu.json"))
    keys = {name: f"gpu-{name}-{asked.dtype}" if name in LARGE else f"gpu-{name}" for name in names}
    try:
        about, problem = device(shop, asked.provider)
    except measure.Failed as failure:
        sys.exit(f"bench-gpu: {failure}\nbench-gpu: set ORT_DYLIB_PATH to ONNX Runtime's library, and --target to built commands")
    if problem:
        print(f"bench-gpu: not run: no GPU ({asked.provider}: {problem})")
        for name in names:
            not_run(table, keys[name], "no GPU")
        print(f"\n{table.text(keys.values())}")
        return
    bench, failed = None, False
    for name in names:
        if asked.minutes is not None and time.monotonic() - started > asked.minutes * 60:
            not_run(table, keys[name], f"{asked.minutes:g} minutes were over")
            continue
        print(f"{keys[name]} ...", file=sys.stderr, flush=True)
        try:
            if name in LARGE and bench is None:
                made = gpu_rows.Bench(shop, asked.provider, asked.dtype)
                made.measure_profile(asked.keep_profile)
                bench = made
                print(f"  profiled, {time.monotonic() - started:.0f} s since the beginning", file=sys.stderr, flush=True)
            table.put(keys[name], measured(name, shop, asked.provider, bench))
            print(table.text([keys[name]]), file=sys.stderr, flush=True)
        except Exception as failure:  # Whatever one row ran into, the machine is only lent and the next may do better.
            failed = True
            said = str(failure) if isinstance(failure, measure.Failed) else traceback.format_exc().strip()
            print(said, file=sys.stderr, flush=True)
            table.put(keys[name], [row(keys[name], result=f"failed: {said.splitlines()[-1].strip()[:160]}", verdict=False)])
    print("\n".join(["", versions(asked.threads, ()), *about, "", table.text(keys.values())]))
    sys.exit(1 if failed else 0)


def not_run(table, key, why):
    """Adds a row that says so, unless an earlier call has measured it."""
    if not any(line["ours"] for line in table.rows.get(key, [])):
        table.put(key, [row(key, result=f"not run: {why}")])


def measured(name, shop, provider, bench):
    if name == "exact":
        return streaming.exactness(shop, provider)
    if name == "models":
        return gpu_models.models(shop, provider)
    if name == "mixture":
        return gpu_mixture.mixture(shop, provider)
    return LARGE[name](bench)


main()
