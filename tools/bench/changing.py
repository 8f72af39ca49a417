"""Memory and bandwidth that are taken away from a running plan and given back: tokens over those of the best fixed plan for each part."""

import json
import os
import signal
import subprocess
import threading
import time

import disk
import measure
from jobs import SMALLEST_VOCABULARY
from limit import Limit, ReadRate
from rounds import Rounds
from table import row
from workshop import OUT

# Caches take memory that short texts hardly touch, so that a limit can be lowered below the plan.
PROMPT, NEW, CONTEXT = 8, 4, 512
# Seconds of each part; memory that is given back is used after 10 seconds.
PART, SMALL_PART = 60, 20
WANTED = 0.85
# Each step of a falling limit: as when another program grows. Version 1 of control groups refuses a limit below what is in use.
STEPS, STEP_SECONDS = 16, 20


def plan_for(shop, model, limit):
    """A plan for a memory limit, with its weights prepared."""
    plan, _ = shop.split(model, f"changing/{limit >> 20}", "--context", CONTEXT, "--ram", f"{limit - disk.KERNEL}B", "--prompt-tokens", PROMPT)
    measure.run([shop.binary("hpp-exec"), plan, "--tokens", "1,2", "-n", 2, "--threads", shop.threads, "--quiet"])
    return plan


class Run:
    """`hpp-exec jobs`, one prompt after the other: when each answer of `NEW` tokens came, and which tokens it has."""

    def __init__(self, shop, model, plan, limit, *options):
        disk.forget(model, plan)
        self.answers = os.path.join(OUT, "changing-answers.jsonl")
        if os.path.exists(self.answers):
            os.remove(self.answers)
        words = [shop.binary("hpp-exec"), "jobs", plan, "--in", prompts(), "--out", self.answers, "--max-sequences", 1,
                 "--threads", shop.threads, "--quiet", *options]
        self.process = subprocess.Popen(list(map(str, limit.command(words))), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.times, self.is_over = [], False
        self.reader = threading.Thread(target=self._watch)
        self.reader.start()
        while not self.times and self.process.poll() is None:
            time.sleep(0.05)

    def _watch(self):
        while not self.is_over:
            if os.path.exists(self.answers):
                with open(self.answers, "rb") as lines:
                    done = lines.read().count(b"\n")
                self.times += [time.monotonic()] * (done - len(self.times))
            time.sleep(0.02)

    def count(self, since, until):
        """Tokens in an interval."""
        return NEW * sum(since <= at < until for at in self.times)

    def end(self):
        """Stops it; the tokens of each answer."""
        ended = self.process.poll()
        self.process.send_signal(signal.SIGINT)
        said = self.process.communicate()[1]
        self.is_over = True
        self.reader.join()
        if ended is not None:
            raise measure.Failed(f"a run ended early with {ended}: {said[-300:]}")
        with open(self.answers, encoding="utf-8") as lines:
            return [json.loads(line)["tokens"] for line in lines]


def prompts():
    """A file of more prompts than any run answers."""
    path = os.path.join(OUT, "changing-prompts.jsonl")
    with open(path, "w", encoding="utf-8") as out:
        for number in range(5000):
            tokens = [1 + (number * 31 + at * 7) % SMALLEST_VOCABULARY for at in range(PROMPT)]
            out.write(json.dumps({"id": number, "tokens": tokens, "max_new": NEW, "ignore_eos": True, "temperature": 0}) + "\n")
    return path


def fixed(shop, model, plan, limit, seconds):
    """Tokens per second of a plan that nothing disturbs, and its tokens."""
    with limit:
        run = Run(shop, model, plan, limit, "--adapt", "off")
        # The first passes fill the window.
        start = time.monotonic() + 2
        time.sleep(seconds + 2)
        now = time.monotonic()
        return run.count(start, now) / (now - start), run.end()


def lower(limit, size, until):
    """Lowers a memory limit in steps, as far as what is in use allows, until it is reached."""
    while limit.size > size:
        try:
            limit.set(max(size, limit.size - (limit.most - size) // STEPS))
        except OSError:
            pass
        if time.monotonic() > until:
            raise measure.Failed(f"the run kept {limit.size >> 20} MiB of the {size >> 20} MiB that it may have")
        time.sleep(STEP_SECONDS / STEPS)


def disturbed(shop, model, plan, limit, seconds, take, give):
    """A run from which something is taken for the second of three parts: tokens and seconds of each part, and the tokens."""
    with limit:
        run = Run(shop, model, plan, limit)
        parts, start = [], time.monotonic()
        for change in (None, take, give):
            if change:
                change(limit)
            left = start + seconds - time.monotonic()
            time.sleep(max(left, 0))
            now = time.monotonic()
            parts.append((run.count(start, now), now - start))
            start = now
        return parts, run.end()


def one(shop, what, model, plans, limits, change):
    """A row: what came of a disturbed run over what the best fixed plans of its parts would have given in the same time."""
    seconds, shares, whole = SMALL_PART if shop.small else PART, [], []
    take, give = change
    for _ in range(shop.rounds):
        full, right = fixed(shop, model, plans[0], limits[0](), seconds)
        less, _ = fixed(shop, model, plans[1], limits[1](), seconds)
        parts, tokens = disturbed(shop, model, plans[0], limits[0](), seconds, take, give)
        common = min(len(right), len(tokens))
        if tokens[:common] != right[:common]:
            raise measure.Failed(f"{what}: a token changed")
        rates = (full, less, full)
        shares.append([count / (rate * time) for (count, time), rate in zip(parts, rates)])
        whole.append(sum(count for count, _ in parts) / sum(rate * time for (_, time), rate in zip(parts, rates)))
    result, middle = Rounds(whole), [Rounds([share[part] for share in shares]) for part in range(3)]
    said = ", ".join(f"{part} {share.text(unit='x')}" for part, share in zip(("before", "less", "given back"), middle))
    return row(f"{what} taken away and given back, tokens over those of the best fixed plans", said, "", result.text(unit="x"), f">= {WANTED}x",
               result.verdict(at_least=WANTED))


def changing(shop):
    rows = []
    (dtype, model), *_ = [pair for pair in disk.large_models(shop) if pair[0] == "fp32"]
    most = disk.limit_of(model, 0.5)
    plans = [plan_for(shop, model, limit) for limit in (most, most // 2)]
    limits = [lambda: Limit(most), lambda: Limit(most // 2)]
    wait = PART if not shop.small else 2 * SMALL_PART
    take = lambda limit: lower(limit, most // 2, time.monotonic() + wait)
    rows.append(one(shop, f"half of the memory, {dtype}", model, plans, limits, (take, lambda limit: limit.set(most))))
    rate = disk.direct_rate(disk.weight_file(model))
    slow, quick = int(rate / 2), int(rate * 16)
    try:
        limits = [lambda: ReadRate(model, quick, most), lambda: ReadRate(model, slow, most)]
        change = (lambda limit: limit.set_rate(slow), lambda limit: limit.set_rate(quick))
        rows.append(one(shop, f"half of the bandwidth, {dtype}", model, [plans[0]] * 2, limits, change))
    except OSError as error:
        rows.append(row(f"half of the bandwidth, {dtype}", result=f"no read rate can be set here: {error}"))
    return rows
