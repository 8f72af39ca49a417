"""`make bench-gpu`: models that do not fit a GPU, as one table. Needs python3, built commands and ONNX Runtime, nothing else.

    gpu.py --target DIR [--provider cuda|webgpu] [--dtype fp16|fp32|int4-fp16] [--rounds N] [--minutes N] [--small] [exact|decode|prompt ...]

ONNX Runtime is the one of ORT_DYLIB_PATH. Results are kept in results-gpu.json of out/bench, or of HPP_BENCH_OUT, after each
measurement, and another call adds to them: `--keep-profile` then takes the profile and models that are there. Without a GPU it
says so and is content. `--small` uses a tiny decoder: for trying the scripts, not for numbers.
"""

import argparse
import os
import platform
import sys
import time
import traceback

import gpu_rows
import measure
import streaming
from host import physical_cores, versions
from table import Table, row
from workshop import OUT, Workshop

NAMES = ("exact", "decode", "prompt")
# Longest any one command may take, in seconds.
LIMIT = 400


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="target/release", help="where the binaries are")
    parser.add_argument("--provider", choices=("cuda", "webgpu"), default="cuda")
    parser.add_argument("--dtype", choices=("fp16", "fp32", "int4-fp16"), help="of the large model [default: fp16 on cuda, fp32 on webgpu]")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured, in turns")
    parser.add_argument("--minutes", type=float, help="begin nothing after so many minutes; what was not begun is said")
    parser.add_argument("--keep-profile", action="store_true", help="take the profile that is there")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("names", nargs="*", choices=[*NAMES, []])
    asked = parser.parse_args()
    asked.dtype = asked.dtype or ("fp16" if asked.provider == "cuda" else "fp32")
    if asked.provider == "cuda" and asked.dtype == "fp32":
        parser.error("CUDA's GroupQueryAttention takes half precision only: --dtype fp16 or int4-fp16")
    return asked


def device(shop, provider):
    """What it computes on, in words, and why it cannot, where it cannot."""
    seen = streaming.devices(shop)
    problem = streaming.why_not(seen, provider)
    # For what runs without hpp-exec: the same library.
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
    keys = {name: f"gpu-{name}" if name == "exact" else f"gpu-{name}-{asked.dtype}" for name in names}
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
            if name != "exact" and bench is None:
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
    """Says so, unless an earlier call has measured it."""
    if not any(line["ours"] for line in table.rows.get(key, [])):
        table.put(key, [row(key, result=f"not run: {why}")])


def measured(name, shop, provider, bench):
    if name == "exact":
        return streaming.exactness(shop, provider)
    return gpu_rows.decode(bench) if name == "decode" else gpu_rows.prompt(bench)


main()
