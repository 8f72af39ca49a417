"""What people use beside the command line on this machine: the Python module, and OpenVINO beside ONNX Runtime's CPU provider."""

import json
import os
import shutil
import statistics
import sys

import measure
from rounds import ratios
from speed import NEW, PROMPT, ours, plan_of
from table import compared, mib, row
from workshop import OUT, ROOT

HERE = os.path.dirname(os.path.abspath(__file__))
IMPORT = "import time; start = time.perf_counter(); import hpp; print(1e3 * (time.perf_counter() - start))"
# Takes the plug-in that the script found, as a user who names it in the environment does.
ON_OPENVINO = (
    os.path.join(ROOT, "tools", "scripts", "with-openvino.sh"),
    "bash", "-c", 'HPP_EP_LIBS=openvino=$HPP_OPENVINO_LIB exec "$@"', "bash",
)


def package(shop):
    """A directory with the package `hpp` and the compiled module, for PYTHONPATH."""
    folder = os.path.join(OUT, "python")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(os.path.join(ROOT, "runtime", "python", "hpp"), os.path.join(folder, "hpp"))
    library = shop.binary("libhpp_python.so")
    if not os.path.exists(library):
        raise measure.Failed(f"{library} is missing: cargo build --release -p hpp-python")
    shutil.copy2(library, os.path.join(folder, "hpp", "_native.abi3.so"))
    return folder


def in_python(shop, variables, plan):
    """The first generation of a loaded plan by the module: tokens per second after the first token."""
    command = [sys.executable, os.path.join(HERE, "run_python.py"), plan, PROMPT, NEW, shop.threads]
    return json.loads(measure.run(command, env=variables)["stdout"])["decode"]


def by_command(shop, plan):
    """The same by hpp-exec."""
    tokens = ",".join(str((7 * at + 11) % 500 + 3) for at in range(PROMPT))
    answer = shop.exec_json(plan, "--tokens", tokens, "--max-new", NEW, "--temperature", 0, "--ignore-eos")
    return answer["timings"]["decode_tokens_per_second"]


def python(shop):
    """Decoding through the module over decoding by hpp-exec, and how long the import takes."""
    variables = {"PYTHONPATH": package(shop)}
    rows = []
    for dtype in ("int4", "fp32"):
        plan = plan_of(shop, dtype, 1)
        runs = measure.in_turns(
            shop.rounds,
            module=lambda plan=plan: in_python(shop, variables, plan),
            command=lambda plan=plan: by_command(shop, plan),
        )
        rows.append(compared(f"decode in Python over hpp-exec, {dtype}", runs["module"], runs["command"], 0.98, "tok/s"))
    times = [float(measure.run([sys.executable, "-c", IMPORT], env=variables)["stdout"]) for _ in range(max(shop.rounds, 5))]
    spread = f"{statistics.median(times):.0f} ms ({min(times):.0f} to {max(times):.0f})"
    return [*rows, row("import hpp", spread, target="reported")]


def on_openvino(shop, plan):
    """One measured run of hpp-exec on OpenVINO, after a warm-up; an error if another provider computes a partition. OpenVINO leaves attention
    to the CPU provider."""
    arguments = ["bench", plan, "--prompt-tokens", PROMPT, "--new-tokens", NEW, "--runs", 1, "--providers", "openvino,cpu"]
    command = [*ON_OPENVINO, shop.binary("hpp-exec"), *arguments, "--json", "--threads", shop.threads, "--quiet"]
    cost = measure.run(command)
    answer = json.loads(cost["stdout"].strip().splitlines()[-1])
    others = [stage["provider"] for stage in answer["stages"] if stage["provider"] != "OpenVINO"]
    if others:
        raise measure.Failed(f"{plan}: a partition ran on {others[0]} instead of OpenVINO")
    return {
        "decode": answer["decode_tokens_per_second"]["median"],
        "ttft": answer["time_to_first_token_ms"]["median"] / 1000,
        "peak_rss": cost["peak_rss"],
    }


def openvino(shop):
    """The same plan on OpenVINO and on ONNX Runtime's CPU provider: reported, because the processor decides."""
    rows = []
    for dtype in ("int4", "fp32"):
        plan = plan_of(shop, dtype, 1)
        runs = measure.in_turns(
            shop.rounds,
            openvino=lambda plan=plan: on_openvino(shop, plan),
            cpu=lambda plan=plan: ours(shop, plan),
        )
        decode, first, peak = ([measure.values(runs[side], key) for side in ("openvino", "cpu")] for key in ("decode", "ttft", "peak_rss"))
        prefill = [[PROMPT / seconds for seconds in side] for side in first]
        rows += [
            compared(f"decode on OpenVINO over the CPU provider, {dtype}", *decode, None, "tok/s"),
            compared(f"prefill ({PROMPT}) on OpenVINO over the CPU provider, {dtype}", *prefill, None, "tok/s"),
            row(f"peak RSS on OpenVINO over the CPU provider, {dtype}",
                *(mib(measure.median(runs[side], "peak_rss")) for side in ("openvino", "cpu")), ratios(*peak).text(unit="x"), "reported"),
        ]
    return rows
