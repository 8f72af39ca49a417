"""Memory and bandwidth that are taken away from a running plan and given back: tokens over those of the best fixed plan for each part."""

import os
import signal
import subprocess
import threading
import time

import disk
import measure
from limit import Limit, ReadRate
from rounds import Rounds
from table import row

PROMPT, CONTEXT = 16, 1024
# Seconds of each part; memory that is given back is used after 10 seconds.
PART, SMALL_PART = 60, 25
WANTED = 0.85
# Each step of a falling limit: as when another program grows. Version 1 of control groups refuses a limit below what is in use.
STEPS, STEP_SECONDS = 16, 20


def plan_for(shop, model, limit):
    """A plan for a memory limit, with its weights prepared."""
    plan, _ = shop.split(model, f"changing/{limit >> 20}", "--context", CONTEXT, "--ram", f"{limit - disk.KERNEL}B", "--prompt-tokens", PROMPT)
    measure.run(command(shop, plan, "--max-new", 2))
    return plan


def command(shop, plan, *options):
    tokens = ",".join(str(1 + 7 * at) for at in range(PROMPT))
    return [shop.binary("hpp-exec"), plan, "--tokens", tokens, "--temperature", 0, "--ignore-eos", "--threads", shop.threads, *map(str, options)]


class Run:
    """A run that prints a token id when it has it: when each came, and which."""

    def __init__(self, shop, model, plan, limit, *options):
        disk.forget(model, plan)
        words = limit.command(command(shop, plan, "--max-new", CONTEXT - PROMPT, *options))
        self.process = subprocess.Popen(list(map(str, words)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.text, self.times, self.said = "", [], ""
        self.readers = [threading.Thread(target=self._tokens), threading.Thread(target=self._messages)]
        for reader in self.readers:
            reader.start()
        while not self.times and self.process.poll() is None:
            time.sleep(0.05)

    def _tokens(self):
        while piece := self.process.stdout.read(1):
            self.text += piece
            if piece == ",":
                self.times.append(time.monotonic())

    def _messages(self):
        self.said = self.process.stderr.read()

    def count(self, since, until):
        """Tokens in an interval."""
        return sum(since <= at < until for at in self.times)

    def end(self):
        """Stops it; the tokens that are complete."""
        ended = self.process.poll()
        self.process.send_signal(signal.SIGINT)
        self.process.wait()
        for reader in self.readers:
            reader.join()
        if ended is not None:
            raise measure.Failed(f"a run ended early with {ended}: {self.said[-300:]}")
        return self.text.split(",")[:-1]


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
