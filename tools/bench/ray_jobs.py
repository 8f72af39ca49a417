"""Prompts through hpp.ray.jobs on two local Ray nodes over one: `make test-ray` first, which installs Ray and builds the commands.

    PATH=target/release:$PATH .deps/ray-venv/bin/python tools/bench/ray_jobs.py --prompts 512 --rounds 3

Both nodes are on this machine, so what a second node can add is bounded by the cores: each engine computes with `--threads` threads (1 of 2 cores), and Ray's own
processes take a part too. Rounds alternate; the ratio is the median of the rounds' ratios.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import hpp.ray
import ray
from ray.cluster_utils import Cluster

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "fixtures" / "models" / "genai" / "learned-llama-fp32-cpu"


def seconds(plan, lines, nodes, batch, threads):
    with tempfile.TemporaryDirectory() as work:
        dataset = ray.data.from_items(lines, override_num_blocks=max(1, len(lines) // batch)).materialize()
        started = time.monotonic()
        rows = hpp.ray.jobs(dataset, plan, work, nodes=nodes, batch_size=batch, threads=threads).take_all()
        took = time.monotonic() - started
    assert len(rows) == len(lines) and all(row["error"] is None for row in rows)
    return took


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", type=Path, default=MODEL)
    arguments.add_argument("--prompts", type=int, default=512)
    arguments.add_argument("--max-new", type=int, default=64)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=4, memory=1 << 30, object_store_memory=100 << 20)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    lines = [{"id": number, "prompt": f"What is a list of {number} items?", "max_new": given.max_new, "ignore_eos": True} for number in range(given.prompts)]
    with tempfile.TemporaryDirectory() as directory:
        plan = hpp.split(given.model, ram="1G", vram=0, out=Path(directory) / "plan").path
        ratios = []
        for number in range(given.rounds):
            one, two = (seconds(plan, lines, nodes, given.batch, given.threads) for nodes in (1, 2))
            ratios.append(one / two)
            print(f"round {number + 1}: one node {one:.1f} s, two nodes {two:.1f} s, {one / two:.2f}x", flush=True)
    print(f"{given.prompts} prompts, {os.cpu_count()} cores, {given.threads} threads each: {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
