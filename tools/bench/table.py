"""The table of results, written to a file after every measurement, so that a late failure loses nothing."""

import json
import os
import platform
import statistics

from rounds import HELD, MISSED, Rounds, ratios

COLUMNS = ("measure", "ours", "theirs", "result", "target", "verdict")


class Table:
    """Rows by their measurement."""

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
        lines = [COLUMNS] + [[row.get(column, "") for column in COLUMNS] for row in rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
        padded = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
        padded.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join(padded)


def row(measure, ours="", theirs="", result="", target="", verdict=None):
    """One row. `verdict` is a verdict of `rounds.py`, or whether the target is met for a quantity without spread; None without a target."""
    if isinstance(verdict, bool):
        verdict = HELD if verdict else MISSED
    return {"measure": measure, "ours": ours, "theirs": theirs, "result": result, "target": target, "verdict": verdict or ""}


def compared(measure, ours, theirs, at_least, unit, smaller_is_better=False):
    """Compares two sides measured in the same rounds by the median of the per-round ratios; without `at_least` it is only reported."""
    ratio = ratios(theirs, ours) if smaller_is_better else ratios(ours, theirs)
    target, verdict = ("reported", None) if at_least is None else (f">= {at_least}x", ratio.verdict(at_least=at_least))
    middle = [f"{statistics.median(side):.4g} {unit}" for side in (ours, theirs)]
    return row(measure, *middle, ratio.text(unit="x"), target, verdict)


def limited(measure, values, at_most, shown):
    """A quantity measured in several rounds that must not exceed `at_most`; `shown` formats one value."""
    rounds = Rounds(values)
    low, high = map(shown, rounds.spread)
    text = shown(rounds.median) + ("" if low == high else f" ({low} to {high})")
    return row(measure, text, "", "", f"<= {shown(at_most)}", rounds.verdict(at_most=at_most))


def mib(count):
    return f"{count / 2**20:.0f} MiB"


def processor():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
