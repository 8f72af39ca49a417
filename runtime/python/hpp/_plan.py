"""Plans: what hpp-split has decided, read from plan.yaml."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from . import _native
from ._errors import HppError

if TYPE_CHECKING:
    from ._model import Model

StrPath = Union[str, "os.PathLike[str]"]
PLAN_NAME = "plan.yaml"


@dataclass(frozen=True)
class Partition:
    """A run of blocks that computes on one device."""

    name: str
    device: str
    blocks: tuple[str, ...]
    weight_bytes: int
    reason: str


class Plan:
    """A plan on disk. `path` is a plan.yaml or its directory."""

    path: Path
    report: str | None
    """What hpp-split printed; None for a plan that was read from disk."""

    def __init__(self, path: StrPath, *, report: str | None = None) -> None:
        """Reads and checks the file.

        Raises:
            HppError: it is missing, damaged, or no plan.
        """
        if _is_model_directory(Path(path)):
            raise HppError(f"{os.fspath(path)} is a model, not a plan", 'plan it first: hpp.split(model, vram="24G")')
        found, text, weight_bytes = _native.read_plan(os.fspath(path))
        self.path = Path(found)
        self.report = report
        self._data: dict[str, Any] = json.loads(text)
        self._weight_bytes = weight_bytes

    @property
    def data(self) -> dict[str, Any]:
        """Everything in the plan but its seal, as schemas/plan.schema.json describes it. Sizes are texts: "4.57 MiB (4787200 B)"."""
        return self._data

    @property
    def source(self) -> Path:
        """The unsplit ONNX file that it was made from."""
        source: str = self._data["model"]["source"]
        return self.path.parent / source

    @property
    def context(self) -> int:
        """Tokens of a sequence that the plan has memory for, prompt and answer together."""
        return int(self._data["budgets"]["context"])

    @property
    def partitions(self) -> list[Partition]:
        """The partitions, in the order in which a pass runs them."""
        return [
            Partition(
                name=partition["name"],
                device=partition["device"],
                blocks=tuple(partition["blocks"]),
                weight_bytes=weight_bytes,
                reason=partition["reason"],
            )
            for partition, weight_bytes in zip(self._data["partitions"], self._weight_bytes)
        ]

    @property
    def predictions(self) -> dict[str, Any]:
        """Predicted times: `decode_tokens_per_second`, `time_to_first_token_ms` and others."""
        predictions: dict[str, Any] = self._data["predictions"]
        return predictions

    def load(self, **options: Any) -> Model:
        """The same as `hpp.load(plan, **options)`."""
        from ._model import load

        return load(self, **options)

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __repr__(self) -> str:
        devices = ", ".join(f"{partition.name} on {partition.device}" for partition in self.partitions)
        return f"<hpp.Plan {self.path}: {devices}>"


def _is_model_directory(path: Path) -> bool:
    """Whether an exporter wrote this directory: ONNX files, beside which hpp-split would have put a plan.yaml."""
    return not (path / PLAN_NAME).exists() and any(any(path.glob(pattern)) for pattern in ("*.onnx", "onnx/*.onnx"))
