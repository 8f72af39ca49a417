"""The directories of a benchmark: binaries, shared models, results."""

import json
import os
import shutil

import measure

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
OUT = os.path.abspath(os.environ.get("HPP_BENCH_OUT") or os.path.join(ROOT, "out", "bench"))


class Workshop:
    """Binaries and generated models. A model is generated once and kept.

    `around` are words before each hpp-exec, such as a script that shows it a device; `limit` is how many seconds any command may take;
    `before` is the directory of an earlier build's binaries.
    """

    def __init__(self, target, threads, rounds, small, around=(), limit=None, before=None):
        self.target = os.path.join(ROOT, target)
        self.threads = threads
        self.rounds = rounds
        self.small = small
        self.around = around
        self.limit = limit
        self.before = before and os.path.abspath(before)
        os.makedirs(OUT, exist_ok=True)

    def split(self, model, name, *options):
        """Splits a model; returns the plan's directory and the cost."""
        plan = os.path.join(OUT, "plans", name)
        shutil.rmtree(plan, ignore_errors=True)
        os.makedirs(os.path.dirname(plan), exist_ok=True)
        cost = measure.run([self.binary("hpp-split"), model, "--out", plan, *options], limit=self.limit)
        return plan, cost

    def binary(self, name):
        return os.path.join(self.target, name)

    def exec_json(self, *arguments):
        """The output of hpp-exec with `arguments`, and its cost under the names that the output has not: its `seconds` are without loading."""
        command = [*self.around, self.binary("hpp-exec"), *arguments, "--json", "--threads", self.threads, "--quiet"]
        cost = measure.run(command, limit=self.limit)
        answer = json.loads(cost.pop("stdout").strip().splitlines()[-1])
        return {**cost, **answer}

    def model(self, name, *options):
        """A generated model by its name; generated if it is missing."""
        return self.made(name, "llama", *options)

    def made(self, name, *options):
        """What hpp-fixtures makes with these options, by its name; made if it is missing."""
        path = os.path.join(OUT, "models", name)
        marker = os.path.join(path, "made-with")
        made_with = " ".join(map(str, options))
        if not os.path.exists(marker) or open(marker, encoding="utf-8").read() != made_with:
            shutil.rmtree(path, ignore_errors=True)
            measure.run([self.binary("hpp-fixtures"), *options, path])
            with open(marker, "w", encoding="utf-8") as out:
                out.write(made_with)
        return path

    def decoder(self, dtype):
        """The decoder of about 350 million parameters that the speed measurements use."""
        return self.model(f"llama-{4 if self.small else 24}-{dtype}", *self.decoder_shape(dtype))

    def decoder_shape(self, dtype):
        return ("--layers", 4 if self.small else 24, "--hidden", 1024, "--intermediate", 2816, "--heads", 16, "--kv-heads", 8,
                "--vocab", 32000, "--context", 4096, "--dtype", dtype)
