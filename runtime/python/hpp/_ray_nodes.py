"""The nodes of a Ray cluster: their kinds, and which plan is for which."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

import filelock
import ray

from ._errors import HppError
from ._plan import StrPath

# A plan or model for all nodes, or one for each kind of node.
Plans = Union[StrPath, Mapping[str, StrPath]]

KIND = "hpp-kind"
DEFAULT = "default"


def kind_of_this_node() -> str:
    """The label `hpp-kind` of the node that runs this (`ray start --labels hpp-kind=gpu24`), or "default"."""
    labels = ray.get_runtime_context().get_node_labels() or {}
    return str(labels.get(KIND, DEFAULT))


def plan_for(plans: Plans, kind: str) -> str:
    """The path of the plan or model for a kind of node.

    Raises:
        HppError: none is given for this kind, and none for "default".
    """
    if not isinstance(plans, Mapping):
        return os.fspath(plans)
    path = plans.get(kind, plans.get(DEFAULT))
    if path is None:
        raise HppError(
            f"there is no plan for nodes of the kind {kind!r}, only for {', '.join(map(repr, plans))}",
            f'add one, or one for "{DEFAULT}"; the label {KIND} of a node names its kind',
        )
    return os.fspath(path)


def computing_nodes() -> list[dict[str, Any]]:
    """The living nodes that have processors, as `ray.nodes()` describes them."""
    all_nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = [node for node in all_nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    if not nodes:
        raise HppError("no node of the Ray cluster has processors", "start nodes with ray start")
    return nodes


def engine_of_this_node() -> filelock.FileLock:
    """A lock that at most one engine of this node holds while it computes: a second one would share its memory and its processors."""
    node = ray.get_runtime_context().get_node_id()
    return filelock.FileLock(Path(tempfile.gettempdir()) / f"hpp-ray-{node}.lock")
