"""Runs ONNX language models larger than VRAM or RAM: plans them for this machine, loads the plan, generates text.

    import hpp

    plan = hpp.split("model/", vram="24G")
    with hpp.load(plan) as model:
        print(model.generate("Once upon a time", max_new=64).text)

docs/PYTHON.md has the rest.
"""

import os as _os

# ONNX Runtime reads this when it is loaded; without it, it records each process and tries to report it to Microsoft.
_os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

try:
    from . import _native as _native
except ImportError as error:
    raise ImportError(
        f"hpp has a compiled module, which cannot be imported ({error}): a checkout has none; "
        "install the package instead (docs/PYTHON.md)"
    ) from error

from ._commands import profile, split
from ._errors import HppError, HppWarning
from ._model import Generated, Model, TextStream, Timings, load
from ._native import VERSION as __version__
from ._plan import Partition, Plan

__all__ = [
    "Generated",
    "HppError",
    "HppWarning",
    "Model",
    "Partition",
    "Plan",
    "TextStream",
    "Timings",
    "__version__",
    "load",
    "profile",
    "split",
]
