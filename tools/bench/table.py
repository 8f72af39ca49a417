"""The table of results: kept in a file after every measurement, so that a late failure loses nothing."""

import json
import os
import platform

HEADER = ["measure", "ours", "theirs", "result", "target", ""]


class Table:
    """Rows by the measurement that made them."""

    def __init__(self, path):
        self.path = path
        self.rows = {}
        if os.path.exists(path):
            with open(path, encoding="utf-8") as kept:
                self.rows = json.load(kept)

    def put(self, key, rows):
        self.rows[key] = rows
        with open(self.path + ".part", "w", encoding="utf-8") as out:
            json.dump(self.rows, out, indent=1)
        os.replace(self.path + ".part", self.path)

    def text(self, keys):
        rows = [row for key in keys for row in self.rows.get(key, [])]
        lines = [HEADER] + [[row[column] for column in ("measure", "ours", "theirs", "result", "target", "met")] for row in rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
        padded = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
        padded.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join(padded)


def row(measure, ours="", theirs="", result="", target="", met=None):
    """One line. `met` is whether the target is, None where there is none."""
    mark = {True: "yes", False: "NO", None: ""}[met]
    return {"measure": measure, "ours": ours, "theirs": theirs, "result": result, "target": target, "met": mark}


def ratio_row(measure, ours, theirs, ratio, at_least, unit):
    """A comparison where more is better."""
    return row(measure, f"{ours:.4g} {unit}", f"{theirs:.4g} {unit}", f"{ratio:.3f}x", f">= {at_least}x", ratio >= at_least)


def mib(count):
    return f"{count / 2**20:.0f} MiB"


def processor():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
