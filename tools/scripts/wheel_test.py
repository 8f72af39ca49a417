#!/usr/bin/env python3
"""Installs the wheel in out/wheels into a new environment and uses it as on a machine with Python alone: no cargo, no checkout on PATH.

    make wheel-test                            # of a release build
    HPP_WHEEL_PROFILE=dev make wheel-test      # of what tests compile: quick, and larger

Answers with the committed trained model, in one step, by a plan and in Python, and prints the size of the wheel and the time that
`import hpp` takes. pip takes onnxruntime and NumPy from PyPI.
"""

import os
import shutil
import statistics
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "out" / "wheel-test"
MODEL = ROOT / "fixtures/models/genai/learned-llama-fp32-cpu"
QUESTION = "What does Vec::push do?"
ANSWER = "Appends an element to the back of the collection"
COMMANDS = ("hpp-split", "hpp-profile", "hpp-exec")
SHARE = (
    "bash-completion/completions/{}",
    "zsh/site-functions/_{}",
    "fish/vendor_completions.d/{}.fish",
    "man/man1/{}.1",
)
IN_PYTHON = f"""
import hpp
model = hpp.load(hpp.split({os.fspath(MODEL)!r}, vram=0, out="in-python"))
print(model.generate(messages=[{{"role": "user", "content": {QUESTION!r}}}], max_new=64).text)
"""
IMPORT = "import time; start = time.perf_counter(); import hpp; print(1e3 * (time.perf_counter() - start))"
IMPORTS = 8


def main() -> None:
    wheel = the_wheel()
    missing = missing_files(wheel)
    if missing:
        sys.exit(f"wheel-test: {wheel.name} lacks {', '.join(missing)}")
    environment = install(wheel)
    in_one_step = run(environment, "hpp-exec", MODEL, "--chat", "-p", QUESTION, "-n", "64")
    run(environment, "hpp-split", MODEL, "--vram", "0", "--out", "by-command")
    by_command = run(environment, "hpp-exec", "by-command", "--chat", "-p", QUESTION, "-n", "64")
    in_python = run(environment, "python", "-c", IN_PYTHON)
    for how, text in (("hpp-exec in one step", in_one_step), ("hpp-exec", by_command), ("Python", in_python)):
        print(f"{how}: {text.strip()}")
        if ANSWER not in text:
            sys.exit(f"wheel-test: {how} did not answer {ANSWER!r}")
    times = [float(run(environment, "python", "-c", IMPORT)) for _ in range(IMPORTS)]
    print(f"wheel: {wheel.stat().st_size / 1e6:.1f} MB, installed: {installed_bytes(wheel) / 1e6:.0f} MB")
    print(f"import hpp: {statistics.median(times):.0f} ms ({min(times):.0f} to {max(times):.0f}, {IMPORTS} processes)")


def the_wheel() -> Path:
    wheels = list((ROOT / "out" / "wheels").glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"wheel-test: {len(wheels)} wheels in out/wheels, not one; run make wheel")
    return wheels[0]


def missing_files(wheel: Path) -> list[str]:
    """What a wheel should hold and does not: the module, the commands, their completions and man pages."""
    names = zipfile.ZipFile(wheel).namelist()
    suffix = ".exe" if os.name == "nt" else ""
    wanted = ["hpp/_native.", "hpp/py.typed"]
    wanted += [f".data/scripts/{command}{suffix}" for command in COMMANDS]
    wanted += [f".data/data/share/{place.format(command)}" for command in COMMANDS for place in SHARE]
    return [part for part in wanted if not any(part in name for name in names)]


def installed_bytes(wheel: Path) -> int:
    return sum(file.file_size for file in zipfile.ZipFile(wheel).infolist())


def install(wheel: Path) -> dict[str, str]:
    """Installs the wheel with onnxruntime into an environment made anew. Returns the variables of a shell in it."""
    shutil.rmtree(HERE, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", HERE / "venv"], check=True)
    path = os.pathsep.join([os.fspath(HERE / "venv" / "bin"), "/usr/bin", "/bin"])
    if shutil.which("cargo", path=path):
        sys.exit(f"wheel-test: cargo is in {path}, so this is not a machine without it")
    subprocess.run([HERE / "venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[cpu]"], check=True)
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, "PATH": path, "XDG_CACHE_HOME": os.fspath(HERE / "cache")}


def run(environment: dict[str, str], *command: object) -> str:
    """Runs a program of the environment and returns its stdout."""
    program = HERE / "venv/bin" / str(command[0])
    done = subprocess.run([program, *map(str, command[1:])], env=environment, cwd=HERE, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"wheel-test: {command[0]} ended with exit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
