"""Describes the machine of a measurement: cores, versions."""

import importlib.metadata
import os
import platform
import subprocess
import time

from table import processor
from workshop import ROOT


def physical_cores():
    """Physical cores: the default number of threads of both runtimes."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            lines = [line.split(":")[1].strip() for line in info if line.startswith(("physical id", "core id"))]
        return len(set(zip(lines[::2], lines[1::2]))) or os.cpu_count()
    except OSError:
        return os.cpu_count()


def commit():
    """The short hash of the tree, `?` without git or a repository."""
    try:
        said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    except OSError:
        said = ""
    return said.strip() or "?"


def versions(threads, packages):
    """Lines with the commit, the date, the machine and the versions of the installed ones of these Python packages."""
    lines = [f"HPP {commit()}, {time.strftime('%Y-%m-%d')}",
             f"{processor()}, {threads} threads, {platform.system()} {platform.release()}"]
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            pass
    return "\n".join(lines + ([", ".join(found)] if found else []))
