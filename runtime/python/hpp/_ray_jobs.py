"""Many prompts on many nodes: batches of a Ray dataset go through `hpp-exec jobs`."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import ray.data

from . import _commands
from ._answers import Answers, claim, model_hash
from ._errors import HppError
from ._plan import StrPath
from ._ray_nodes import Plans, computing_nodes, engine_of_this_node, kind_of_this_node, plan_for

# Prompts of one run of hpp-exec jobs: enough that loading the model does not count.
BATCH = 256
# More than half of a node's memory, so that Ray places one engine on each node.
MEMORY = 0.55

# Settings of a row that are whole numbers, and those that are true or false.
WHOLE = ("id", "max_new", "max_tokens", "max_completion_tokens", "top_k", "seed")
TRUTH = ("chat", "ignore_eos")

ANSWER = pyarrow.schema(
    [
        ("prompt_tokens", pyarrow.int64()),
        ("tokens", pyarrow.list_(pyarrow.int64())),
        ("text", pyarrow.string()),
        ("finish", pyarrow.string()),
        ("seed", pyarrow.uint64()),
        ("error", pyarrow.string()),
    ]
)


def jobs(
    dataset: ray.data.Dataset,
    plans: Plans,
    work: StrPath,
    *,
    nodes: int | None = None,
    batch_size: int = BATCH,
    ray_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ray.data.Dataset:
    """Answers every row of a dataset, on all nodes of the cluster, one engine on each.

    Args:
        dataset: rows as lines of `hpp-exec jobs` have them: `id`, one of `prompt`, `tokens` and `messages`, and settings. Columns that are
            null in a row are left out of it.
        plans: a plan, or a model that each node plans for itself, or one of either for each kind of node (label `hpp-kind`).
        work: a directory for answers so far. With the same one, a later run goes on where an earlier one ended, however it ended: prompts
            with an answer are not computed again. It is refused for another model. On storage that all nodes share if nodes may be lost.
            Rows with the same prompt and settings have the same answer, except where tokens are drawn and neither the row nor the options
            give a seed (or give -1): such a row is known by its `id`, which should be its own.
        nodes: how many nodes compute. By default, all that have processors now.
        batch_size: prompts of one run of hpp-exec.
        ray_options: resources of an engine and more, for `Dataset.map_batches`. By default 55 % of the smallest node's memory, which lets Ray
            place one engine on each node.
        options: options of `hpp-exec jobs --help`, with `_` for `-`: `max_new=64`, `threads=8`.

    Returns:
        The rows' `id` with `prompt_tokens`, `tokens`, `text`, `finish` and `seed`, or `error`. Lazy, as Ray's datasets are.

    Raises:
        HppError: no node has processors. Failures of a node are raised where the dataset is used.
    """
    # Ray keeps the engines of a run that failed, and the memory reserved for them, in a cycle of references.
    gc.collect()
    computing = computing_nodes()
    placed = dict(ray_options or {})
    if ray_options is None:
        memory = min(node["Resources"].get("memory", 0) for node in computing)
        placed["memory"] = int(MEMORY * memory)
    return dataset.map_batches(
        Engine,
        fn_constructor_args=(plans, os.fspath(Path(work).absolute())),
        fn_constructor_kwargs=options,
        compute=ray.data.ActorPoolStrategy(size=nodes or len(computing)),
        batch_size=batch_size,
        batch_format="pyarrow",
        **placed,
    )


class Engine:
    """A batch predictor for `Dataset.map_batches(Engine, batch_format="pyarrow", ...)`; `jobs` calls it so.

    Args: as those of `jobs`.
    """

    def __init__(self, plans: Plans, work: StrPath, **options: Any) -> None:
        self.plan = plan_for(plans, kind_of_this_node())
        self.work = Path(work)
        self.work.mkdir(parents=True, exist_ok=True)
        claim(self.work, model_hash(self.plan), self.plan)
        self.options = options
        # To hpp-exec jobs, -1 is one new seed for all prompts; in a row, it is one for the row.
        self.seeds = {"seed": -1} if options.get("seed") == -1 else {}
        self.flags = _commands.flags({**options, "seed": None} if self.seeds else options)
        self.lock = engine_of_this_node()
        self.answers = Answers(self.work)

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """Answers a batch: a table with the column `id` in, the columns of `jobs` out."""
        if "id" not in batch.column_names:
            raise HppError("the dataset has no column id", "give each prompt an id, as lines of hpp-exec jobs have")
        lines = [{**self.seeds, **prompt(row)} for row in batch.to_pylist()]
        keys = self.keys(lines)
        missing = {key: line for key, line in zip(keys, lines) if not self.answers.has(key)}
        if missing:
            self.run(missing)
        rows = [self.answers.take(key) for key in keys]
        columns = {field.name: [row.get(field.name) for row in rows] for field in ANSWER}
        return pyarrow.table(columns, schema=ANSWER).add_column(0, "id", batch.column("id"))

    def keys(self, lines: list[dict[str, Any]]) -> list[str]:
        """The names of a batch's answers. Where tokens may be drawn with a new seed, each row has an answer of its own, by its `id`."""
        seen: Counter[str] = Counter()
        keys = []
        for line in lines:
            key = self.key(line)
            if self.may_draw(line) and not self.answers.is_greedy(key):
                row = self.key(line, repr(line.get("id")))
                # Rows without an id, or with the same one, are told apart by their order in the batch.
                key = self.key(line, repr(line.get("id")), seen[row]) if seen[row] else row
                seen[row] += 1
            keys.append(key)
        return keys

    def may_draw(self, line: Mapping[str, Any]) -> bool:
        """Whether the answer may depend on a new seed. Without a temperature, the model's recommended settings decide."""
        temperature, seed = (line.get(name, self.options.get(name)) for name in ("temperature", "seed"))
        return temperature != 0 and seed in (None, -1)

    def key(self, line: Mapping[str, Any], *row: Any) -> str:
        """Names a prompt in files of answers: another prompt, setting or option has another name. The plan is not part of it, because nodes
        of several kinds have several plans of one model: `work` is of one model."""
        asked = {name: value for name, value in line.items() if name != "id"}
        # The number of threads and the like differ between nodes; what decides the answer is compared.
        text = json.dumps([asked, [flag for flag in self.flags if not flag.startswith("--threads")], *row], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()

    def run(self, lines: Mapping[str, Mapping[str, Any]]) -> None:
        """Runs `hpp-exec jobs` on prompts by key. What it answered counts, even if it is killed."""
        name = uuid.uuid4().hex
        prompts, answers = self.work / f"prompts-{name}.jsonl", self.work / f"answers-{name}.jsonl"
        text = "".join(json.dumps({**line, "id": key}) + "\n" for key, line in lines.items())
        prompts.write_text(text, encoding="utf-8")
        failure = None
        with self.lock:
            try:
                _commands.run("hpp-exec", ["jobs", self.plan, "--in", os.fspath(prompts), "--out", os.fspath(answers), *self.flags], False)
            except HppError as error:
                # All answers may be errors, which are answers.
                failure = error
            finally:
                prompts.unlink()
        self.answers.read(answers)
        unanswered = [key for key in lines if not self.answers.has(key)]
        if unanswered:
            raise failure or HppError(f"hpp-exec jobs answered {len(lines) - len(unanswered)} of {len(lines)} prompts")


def prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what is null in it: tables have every column in every row."""
    values = {name: as_written(name, value) for name, value in row.items()}
    return {name: without_nulls(value) for name, value in values.items() if value is not None}


def as_written(name: str, value: Any) -> Any:
    """The value of which pandas has made a float: no value, or a whole number or truth value in a column that has no value in another row."""
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    if name in TRUTH and value in (0, 1):
        return bool(value)
    # Beyond 53 bits, a float may be another number than what was written: it is refused.
    return int(value) if name in WHOLE and value.is_integer() and abs(value) < 1 << 53 else value


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
