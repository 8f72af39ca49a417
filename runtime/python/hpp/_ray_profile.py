"""A corpus profiled on many nodes: each runs a part of it, and the statistics are merged."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from . import _commands
from ._errors import HppError
from ._plan import StrPath
from ._ray_nodes import DEFAULT, Plans, computing_nodes, engine_of_this_node, kind_of_this_node, plan_for


def profile(
    models: Plans, prompts: StrPath, out: StrPath = "profile.yaml", *, nodes: int | None = None, **options: Any
) -> dict[str, Path]:
    """Measures a model on the nodes of the cluster and runs a part of a corpus on each: `hpp-profile` on all, then `hpp-profile merge`.

    Counts, maxima and histograms are those of one run over the whole corpus; means and variances are too, but for the last bits, which depend
    on the order of sums.

    Args:
        models: the model, under the same path on every node, or one path for each kind of node.
        prompts: the corpus, a .jsonl or .txt file that this process reads.
        out: the profile to write; with nodes of several kinds, `-KIND` is added to the name of each.
        nodes: how many nodes measure. By default, all that have processors now.
        options: options of `hpp-profile --help`, with `_` for `-`: `quick=True`, `decode_tokens=32`.

    Returns:
        The profile of each kind of node: its own times, and the statistics of the whole corpus. Nodes without a label are of the kind "default".

    Raises:
        HppError: a node failed, or the corpus has fewer prompts than one for each node.
    """
    _commands.refuse(options, ["json", "resume", "report", "max_prompts"], "hpp-profile", "is about one machine")
    force = bool(options.pop("force", False))
    chosen = computing_nodes()[:nodes]
    parts = divided(Path(prompts), len(chosen))
    measure = ray.remote(num_cpus=1, max_retries=2)(measure_part)
    pending = []
    for node, part in zip(chosen, parts):
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        # Retried on the same node: the times are those of its kind.
        pending.append(measure.options(scheduling_strategy=here).remote(models, Path(prompts).suffix, part, options))
    measured: list[tuple[str, str]] = ray.get(pending)
    return merged(measured, Path(prompts), Path(out), force, bool(options.get("skip_bad")))


def divided(corpus: Path, count: int) -> list[bytes]:
    """The lines of a corpus in `count` parts, in order."""
    lines = [line for line in corpus.read_bytes().splitlines(keepends=True) if line.strip()]
    if len(lines) < count:
        raise HppError(f"{corpus} has {len(lines)} lines for {count} nodes", f"use fewer nodes: nodes={max(len(lines), 1)}")
    ends = [len(lines) * number // count for number in range(count + 1)]
    return [b"".join(lines[start:end]) for start, end in zip(ends, ends[1:])]


def measure_part(models: Plans, suffix: str, part: bytes, options: dict[str, Any]) -> tuple[str, str]:
    """Runs on a node: its kind, and its profile as text."""
    kind = kind_of_this_node()
    with tempfile.TemporaryDirectory() as directory, engine_of_this_node():
        corpus, out = Path(directory) / f"part{suffix}", Path(directory) / "profile.yaml"
        corpus.write_bytes(part)
        # All of the part, also where --quick would stop earlier.
        every = {"prompts": corpus, "max_prompts": part.count(b"\n") + 1, **options}
        _commands.run("hpp-profile", [plan_for(models, kind), *_commands.flags({"out": out, **every})], False)
        return kind, out.read_text(encoding="utf-8")


def merged(measured: list[tuple[str, str]], corpus: Path, out: Path, force: bool, skip_bad: bool) -> dict[str, Path]:
    """Writes a profile for each kind of node."""
    kinds = sorted({kind for kind, _ in measured})
    written = {}
    with tempfile.TemporaryDirectory() as directory:
        parts = [Path(directory) / f"part-{number}.yaml" for number in range(len(measured))]
        for path, (_, text) in zip(parts, measured):
            path.write_text(text, encoding="utf-8")
        for kind in kinds:
            written[kind] = out if kinds in ([kind], [DEFAULT]) else out.with_name(f"{out.stem}-{kind}{out.suffix}")
            times = next(path for path, (of, _) in zip(parts, measured) if of == kind)
            arguments = [os.fspath(path) for path in parts]
            options = {"prompts": corpus, "times": times, "out": written[kind], "force": force, "skip_bad": skip_bad}
            flags = _commands.flags(options)
            _commands.run("hpp-profile", ["merge", *arguments, *flags], False)
    return written
