"""Runs commands, alone or in turns, and measures time and memory."""

import json
import os
import statistics
import subprocess
import sys
import tempfile

LAUNCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launch.py")


class Failed(Exception):
    """A command failed; the message is its output."""


def run(command, env=None, limit=None):
    """Runs `command` with a timeout of `limit` seconds; returns its cost, with `stdout`."""
    if limit is not None:
        command = ["timeout", f"{limit:.0f}", *command]
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "cost.json")
        launched = [sys.executable, "-S", "-I", LAUNCH, result] + [str(word) for word in command]
        done = subprocess.run(launched, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                              env=dict(os.environ, **(env or {})))
        if done.returncode != 0:
            said = f"stopped after {limit:.0f} s" if limit is not None and done.returncode == 124 else ""
            said = said or (done.stderr.strip() or done.stdout.strip())[-2000:]
            raise Failed(f"{' '.join(map(str, command))}\n  exit code {done.returncode}: {said}")
        with open(result, encoding="utf-8") as cost:
            return dict(json.load(cost), stdout=done.stdout)


def in_turns(rounds, **runners):
    """Runs each of `runners` once per round; returns lists by name, in the order of the rounds.

    A slow minute of the machine then hits all of them. Every second round goes backwards (A B, B A, ...), so that none of them always
    runs first.
    """
    results = {name: [] for name in runners}
    for turn in range(rounds):
        order = list(runners) if turn % 2 == 0 else list(reversed(runners))
        for name in order:
            results[name].append(runners[name]())
    return results


def values(results, key):
    return [result[key] for result in results]


def median(results, key):
    return statistics.median(values(results, key))
