"""Build backend of the wheel: builds the commands, then lets maturin build the module and put both into a wheel.

The commands are programs in the environment's `bin`, because they find each other beside themselves. maturin builds either programs or a
module; it packs what lies in its data directory, so the commands are put there first, with their shell completions and man pages for the
environment's `share`.

The variable HPP_WHEEL_PROFILE names another profile of cargo than `release`: `dev` is for trying the package, since it reuses what tests compile.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import maturin
from maturin import (  # noqa: F401  (hooks that pip calls)
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parents[3]
# `data` of [tool.maturin] in pyproject.toml.
DATA = ROOT / "out" / "wheel-data"
PROFILE = os.environ.get("HPP_WHEEL_PROFILE") or "release"
SCRIPTS, SHARE = DATA / "scripts", DATA / "data" / "share"
COMMANDS = ("hpp-split", "hpp-profile", "hpp-exec")

# maturin looks for the directory even when it writes metadata alone.
SCRIPTS.mkdir(parents=True, exist_ok=True)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """A wheel with the module and the commands."""
    build_commands()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """The same for `pip install -e`: Python's files stay in the checkout, the module and the commands are those of now."""
    build_commands()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def build_commands():
    """Builds the commands and puts them, with what shells and man find, where maturin packs them."""
    if shutil.which("cargo") is None:
        sys.exit("hpp: cargo is not installed. Install Rust from https://rustup.rs, open a new shell, and run pip again.")
    # Symbols would double the wheel. Set for maturin's build too, so that both compile the crates that they share once.
    os.environ.setdefault("CARGO_PROFILE_RELEASE_STRIP", "symbols")
    if PROFILE != "release":
        os.environ.setdefault("MATURIN_PEP517_ARGS", f"--profile {PROFILE}")
    command = ["cargo", "build", "--profile", PROFILE, "--locked", "--message-format", "json-render-diagnostics"]
    command += [argument for name in COMMANDS for argument in ("--package", name, "--features", f"{name}/shell-files")]
    print("running", " ".join(command), flush=True)
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit(f"hpp: cargo build failed with exit code {built.returncode}; its messages are above")
    messages = (json.loads(line) for line in built.stdout.splitlines() if line.startswith("{"))
    programs = [Path(message["executable"]) for message in messages if message.get("executable")]
    wanted = {program.stem: program for program in programs if program.stem in COMMANDS}
    missing = set(COMMANDS) - wanted.keys()
    if missing:
        sys.exit(f"hpp: cargo built no {', '.join(sorted(missing))}")
    shutil.rmtree(DATA, ignore_errors=True)
    SCRIPTS.mkdir(parents=True)
    for program in wanted.values():
        shutil.copy2(program, SCRIPTS / program.name)
        subprocess.run([program, "write-shell-files", SHARE], check=True)
