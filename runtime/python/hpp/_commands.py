"""Runs hpp-split and hpp-profile, which lie beside this package's Python, and turns their failures into HppError.

Planning and profiling are commands of their own: a profile runs models in child processes, which may crash without harm.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from ._errors import HppError, HppWarning
from ._onnxruntime import environment
from ._plan import PLAN_NAME, Plan, StrPath


# Options of one value that is a list itself. All others of which commands take several may be given several times.
JOINED = ("vram", "assign", "mechanisms")


def split(
    model: StrPath,
    vram: str | int | None = None,
    ram: str | int | None = None,
    out: StrPath | None = None,
    *,
    progress: bool = False,
    **options: Any,
) -> Plan:
    """Plans a model and writes the plan, as `hpp-split MODEL --vram SIZE --ram SIZE --out DIR` does.

    Args:
        model: an ONNX file, or the directory that an exporter wrote.
        vram: device memory of each GPU, such as "24G" or "24G,12G"; 0 for no GPU. By default the free memory of this machine's GPUs.
        ram: host memory that the plan may use, such as "32G".
        out: the directory to write. By default the model's name with `.hpp`, in the current directory.
        progress: whether to pass on what hpp-split writes to stderr.
        options: all other options of `hpp-split --help`, with `_` for `-`: `context=8192`, `force=True`, `profile="profile.yaml"`.

    Raises:
        HppError: the model cannot be read, nothing fits, or the directory has a plan already (`force=True` replaces it).
    """
    refuse(options, ["dry_run", "sweep_vram"], "hpp-split", "writes no plan")
    if options.get("machine") == "list":
        raise HppError("hpp-split --machine list writes no plan", hint="run it in a shell; it lists the presets")
    arguments = [os.fspath(model), *flags({"vram": vram, "ram": ram, "out": out, **options})]
    stdout, lines = run("hpp-split", arguments, progress)
    notes = [line for line in lines if line.startswith("note: ")]
    # With quiet=True, it does not say where.
    plan = written(lines) if out is None else Path(out) / PLAN_NAME
    return Plan(plan, report="\n".join([stdout.rstrip("\n"), *notes]))


def profile(model: StrPath, out: StrPath = "profile.yaml", *, progress: bool = True, **options: Any) -> Path:
    """Measures a model on this machine, as `hpp-profile MODEL --out FILE` does. It takes minutes; `quick=True` takes half a minute.

    Args:
        model: an ONNX file, or the directory that an exporter wrote.
        out: the profile to write, for `hpp.split(model, profile=...)`.
        progress: whether to pass on what hpp-profile writes to stderr.
        options: all other options of `hpp-profile --help`, with `_` for `-`: `quick=True`, `providers=["cpu"]`, `resume=True`.

    Raises:
        HppError: the model cannot be read or run, or the file is there already (`force=True` replaces it).
    """
    refuse(options, ["json"], "hpp-profile", "prints the profile, which is in the file too")
    run("hpp-profile", [os.fspath(model), *flags({"out": out, **options})], progress)
    return Path(out)


def written(lines: list[str]) -> Path:
    """The plan that hpp-split says it wrote."""
    for line in lines:
        if line.startswith("wrote ") and line.endswith(PLAN_NAME):
            return Path(line.removeprefix("wrote "))
    raise HppError("hpp-split did not say where it wrote the plan", "name the directory: hpp.split(model, out=DIR)")


def refuse(options: Mapping[str, Any], names: Iterable[str], command: str, why: str) -> None:
    """Refuses options with which a command does something else than its function here."""
    for name in names:
        if options.get(name) not in (None, False):
            option = "--" + name.replace("_", "-")
            raise HppError(f"{command} {option} {why}", f"run {command} {option} in a shell")


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as a command line has them: True is a flag alone, an option with a list is given for each item, None and False are left out."""
    arguments: list[str] = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            arguments.append(option)
            continue
        values = [str(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
        # An item may hold commas, as a text of --stop.
        given = [",".join(values)] if values and name in JOINED else values
        arguments += [f"{option}={text}" for text in given]
    return arguments


def find(command: str) -> str:
    """The command in the `bin` of this Python, of this package, or on PATH."""
    name = command + (sysconfig.get_config_var("EXE") or "")
    package = Path(__file__).resolve().parent
    places = [
        Path(sysconfig.get_path("scripts")),
        Path(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))),
        # pip install --target DIR puts packages into DIR and commands into DIR/bin.
        package.parent / "bin",
    ]
    for place in places:
        if (place / name).is_file():
            return os.fspath(place / name)
    found = shutil.which(command)
    if found:
        return found
    raise HppError(
        f"{command} is neither in {places[0]} nor on PATH",
        "install the package again with pip, or put the command on PATH",
    )


def run(command: str, arguments: list[str], progress: bool) -> tuple[str, list[str]]:
    """Runs a command and returns its stdout and the lines of its stderr. Its warnings become HppWarning."""
    program = find(command)
    lines: list[str] = []
    with subprocess.Popen(
        [program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as child:
        assert child.stderr is not None
        reader = threading.Thread(target=collect, args=(child.stderr, lines, progress), daemon=True)
        reader.start()
        try:
            stdout = child.stdout.read() if child.stdout else ""
            status = child.wait()
        except BaseException:
            # Ctrl-C in a terminal reaches the child as well; elsewhere it is ended here. Both write whole files or none.
            child.terminate()
            raise
        reader.join()
    if status != 0:
        raise failure(command, status, lines)
    for line in lines:
        if line.startswith("warning: "):
            warnings.warn(line.removeprefix("warning: "), HppWarning, stacklevel=3)
    return stdout, lines


def collect(stream: IO[str], lines: list[str], progress: bool) -> None:
    """Keeps the lines of a stream, and passes them on if asked to."""
    for line in stream:
        lines.append(line.rstrip("\n"))
        if progress:
            print(line, end="", file=sys.stderr, flush=True)


def failure(command: str, status: int, lines: list[str]) -> HppError:
    """The error that a command has printed: `error: ...`, lines that belong to it, and `hint: ...`."""
    start = next((index for index, line in enumerate(lines) if line.startswith("error: ")), None)
    if start is None:
        text = "\n".join(lines[-5:]) or "it printed nothing"
        return HppError(f"{command} ended with exit code {status}: {text}")
    error = lines[start:]
    hint = next((index for index, line in enumerate(error) if line.startswith("hint: ")), len(error))
    message = "\n".join(error[:hint]).removeprefix("error: ").rstrip()
    return HppError(message, "\n".join(error[hint:]).removeprefix("hint: ") or None)
