"""Answers of earlier runs in a directory, and the model that they are of. Knows nothing of Ray."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from . import _commands
from ._errors import HppError
from ._plan import PLAN_NAME, Plan, StrPath

# The file whose name is this and the hash of the model says that answers are of this model.
MODEL = "model-"


def model_hash(path: StrPath) -> str:
    """The hash of a model, or of the model that a plan was made from. It is the same for every plan that refers to the same files."""
    directory = Path(path)
    model = Plan(directory).source if directory.suffix == ".yaml" or (directory / PLAN_NAME).exists() else directory
    stdout, _ = _commands.run("hpp-split", ["inspect", os.fspath(model), "--json"], False)
    return str(json.loads(stdout)["hash"])


def claim(directory: Path, model: str, path: StrPath) -> None:
    """Keeps a directory of answers for the model with this hash, at `path`.

    The hash is the name of a file: making it is one step, also on shared storage, and processes that make it at once agree.

    Raises:
        HppError: the directory has answers of another model, or answers that do not say of which model they are.
    """
    refuse_others(directory, model, path)
    file = directory / f"{MODEL}{model}"
    if not file.exists():
        file.write_text(os.fspath(path) + "\n", encoding="utf-8")
    # Of two models that begin at once, at least one finds the other here.
    refuse_others(directory, model, path)


def refuse_others(directory: Path, model: str, path: StrPath) -> None:
    """Refuses a directory that was claimed for another model."""
    claims = list(directory.glob(f"{MODEL}*"))
    others = [file for file in claims if file.name != f"{MODEL}{model}"]
    if others:
        raise HppError(
            f"{directory} has answers of another model ({others[0].read_text(encoding='utf-8').strip()}) than {os.fspath(path)}",
            "give each model a directory of its own; plan all kinds of nodes from the same files, with the same --pack and --quantize",
        )
    if not claims and any(directory.glob("answers-*.jsonl")):
        raise HppError(
            f"{directory} has answers that do not say of which model they are",
            f"give another directory; or, if they are of {os.fspath(path)}, make the file {MODEL}{model} there",
        )


class Answers:
    """The answers in the files of a directory, by key; a file's lines stay there until they are taken."""

    def __init__(self, directory: Path) -> None:
        self.places: dict[str, tuple[Path, int]] = {}
        for path in sorted(directory.glob("answers-*.jsonl")):
            self.read(path)

    def read(self, path: Path) -> None:
        """Notes where the answers of a file are. A last line that was cut off is not an answer."""
        if not path.exists():
            return
        with path.open("rb") as file:
            at = 0
            for line in file:
                try:
                    answer = json.loads(line)
                except ValueError:
                    answer = None
                if line.endswith(b"\n") and isinstance(answer, dict) and "id" in answer and "error" not in answer:
                    self.places[str(answer["id"])] = (path, at)
                elif line.endswith(b"\n") and isinstance(answer, dict) and "id" in answer:
                    # An error stands only until an answer is found.
                    self.places.setdefault(str(answer["id"]), (path, at))
                at += len(line)

    def has(self, key: str) -> bool:
        return key in self.places

    def is_greedy(self, key: str) -> bool:
        """Whether there is an answer that no seed decided."""
        return self.has(key) and self.take(key).get("seed") is None

    def take(self, key: str) -> dict[str, Any]:
        path, at = self.places[key]
        with path.open("rb") as file:
            file.seek(at)
            answer: dict[str, Any] = json.loads(file.readline())
        return answer
