"""Finds the package `onnxruntime` of this Python, without importing it."""

from __future__ import annotations

import importlib.util
import os

from . import _native


def package() -> str | None:
    """The folder of the package that `import onnxruntime` would take. The packages onnxruntime-gpu and others have the same name."""
    try:
        spec = importlib.util.find_spec("onnxruntime")
    except (ImportError, ValueError):
        return None
    folders = spec.submodule_search_locations if spec else None
    return os.fspath(folders[0]) if folders else None


def environment() -> dict[str, str]:
    """The environment variables for commands: they use the library of this Python, unless ORT_DYLIB_PATH names one."""
    variables = dict(os.environ)
    folder = package()
    library = _native.onnxruntime_library(folder) if folder else None
    if library and not variables.get("ORT_DYLIB_PATH"):
        variables["ORT_DYLIB_PATH"] = os.fspath(library)
    return variables
