"""`hpp-exec serve`: the first token of a long prompt whose states are in RAM or on disk, the rate of restoring, decoding beside the
command line, and how late the tokens of a running answer are while a long prompt arrives."""

import contextlib
import glob
import http.client
import json
import os
import random
import shutil
import statistics
import subprocess
import threading
import time

import disk
import measure
import speculation
from limit import Limit
from table import compared, limited, row
from workshop import OUT

PAGE, NEW = 128, 32
PAGE_SIZES = (32, 64, PAGE, 256, 512)
# A prompt near the model's context of 4,096 tokens.
LONG, LONG_SMALL = 4032, 1024
# Models larger than memory: the memory as a share of their size.
PART = 0.5
WAIT = 120


class Server:
    """A server over one plan, in a memory group if one is given. `kill` leaves it no time to tidy up."""

    def __init__(self, shop, plan, *options, group=None):
        command = [shop.binary("hpp-exec"), "serve", plan, "--port", "0", "--threads", str(shop.threads), *map(str, options)]
        command = group.command(command) if group else command
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if "http://" in line:
                self.host = line.split("http://")[1].split()[0]
                return
        raise measure.Failed(f"the server ended: {command}")

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()

    def complete(self, prompt, new=1):
        """Streams a completion; returns the seconds to the first token, tokens per second after it, the text and the usage."""
        start, times, text, usage = time.monotonic(), [], "", None
        for now, event in self.events(prompt, new):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["text"]
                if choice["logprobs"]:
                    times.append(now)
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
        return times[0] - start, rate, text, usage

    def events(self, prompt, new):
        """The events of a streamed completion, each with the time when it came. Each token has one with `logprobs`."""
        body = json.dumps({"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True,
                           "stream_options": {"include_usage": True}, "logprobs": 0})
        connection = http.client.HTTPConnection(self.host, timeout=WAIT)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise measure.Failed(response.read().decode())
        for line in response:
            if line.startswith(b"data: {"):
                yield time.monotonic(), json.loads(line[6:])
        connection.close()

    def get(self, path):
        connection = http.client.HTTPConnection(self.host, timeout=WAIT)
        connection.request("GET", path)
        return connection.getresponse().read().decode()

    def post(self, path, body):
        connection = http.client.HTTPConnection(self.host, timeout=WAIT)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return json.loads(connection.getresponse().read())

    def context(self):
        """The context of the first model."""
        return json.loads(self.get("/v1/models"))["data"][0]["max_model_len"]

    def metric(self, name, **labels):
        lines = self.get("/metrics").splitlines()
        found = [line for line in lines if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items())]
        return float(found[0].split()[-1]) if found else 0.0

    def wait_for_pages(self, count):
        end = time.monotonic() + WAIT
        while self.metric("hpp_kv_pages", tier="disk") < count:
            if time.monotonic() > end:
                raise measure.Failed("the pages are not written")
            time.sleep(0.05)


def prompt(seed, tokens, vocabulary=30000):
    chosen = random.Random(seed)
    return [chosen.randrange(1, vocabulary) for _ in range(tokens)]


@contextlib.contextmanager
def directory(name):
    """An empty directory on the disk of the models."""
    path = os.path.join(OUT, name)
    shutil.rmtree(path, ignore_errors=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def long_prompt(shop, plan, asked, other, states, limit=None, page=PAGE):
    """One round: the first token of the prompt `asked` cold, from RAM and from disk after kill -9, and the rate of the pages that came from
    disk. `other` is a prompt that takes the sequence between, `states` the RAM for states. With a memory limit, weights that it
    does not hold come from disk in each pass."""
    pages = (len(asked) - 2) // page
    with contextlib.ExitStack() as stack:
        kv, group = stack.enter_context(directory("kv")), stack.enter_context(Limit(limit)) if limit else None
        options = ("--kv-dir", kv, "--kv-ram", states, "--kv-disk", "8G", "--kv-page", page, "--max-sequences", 1)
        if limit:
            disk.forget(plan)
        server = Server(shop, plan, *options, group=group)
        try:
            server.complete(other)
            cold, _, text, _ = server.complete(asked)
            # Takes the place of the sequence, so that its states are in pages only.
            server.complete(other)
            ram, _, text_ram, usage = server.complete(asked)
            server.complete(other)
            # Another last token: the same pages, and the rest is computed, as after kill -9.
            pages_only = server.complete(asked[:-1] + other[:1])[0]
            server.wait_for_pages(pages)
        finally:
            server.kill()
        file, = glob.glob(os.path.join(kv, "*", "pages.kv"))
        if limit:
            disk.forget(plan)
        server = Server(shop, plan, *options, group=group)
        try:
            server.complete(other)
            before = disk.direct_rate(file)
            from_disk, _, text_disk, usage_disk = server.complete(asked)
            direct = (before + disk.direct_rate(file)) / 2
        finally:
            server.kill()
        found = [answer["prompt_tokens_details"]["cached_tokens"] for answer in (usage, usage_disk)]
        # The prompt's end is in RAM too, if there is room for it; on disk are whole pages.
        if found[0] not in (pages * page, len(asked)) or found[1] != pages * page or not text == text_ram == text_disk:
            raise measure.Failed(f"{found} tokens were found, and the texts are {text!r}, {text_ram!r}, {text_disk!r}")
        restored = os.path.getsize(file) / (from_disk - pages_only)
        return {"cold": cold, "ram": ram, "disk": from_disk, "computed": len(asked) - pages * page, "restored": restored / 1e9, "direct": direct / 1e9}


def first_tokens(shop, dtype):
    model = shop.decoder(dtype)
    plan, _ = shop.split(model, f"serving/{dtype}", "--context", 4096)
    tokens = LONG_SMALL if shop.small else LONG
    runs = [long_prompt(shop, plan, prompt(number, tokens), prompt(-1 - number, 64), "4G") for number in range(shop.rounds)]
    cold, ram, from_disk, restored, direct = ([run[key] for run in runs] for key in ("cold", "ram", "disk", "restored", "direct"))
    what = f"first token of a prompt of {tokens} tokens, 350 M {dtype}"
    return [
        compared(f"{what}: states in RAM over none", ram, cold, 20, "s", smaller_is_better=True),
        compared(f"{what}: on disk after kill -9 over none", from_disk, cold, 5, "s", smaller_is_better=True),
        compared(f"states restored from disk over direct reads, {dtype}", restored, direct, 0.8, "GB/s"),
    ]


def first_tokens_from_disk(shop):
    """The same for models larger than memory. A prompt is a pass over the weights for every page; with its states, one pass for the rest. The
    grown model has a context of 512 tokens, so no prompt has more than three whole pages."""
    large = dict(disk.large_models(shop))["fp32"]
    context, states = (1024, 112 << 20) if shop.small else (2048, 224 << 20)
    return (larger_than_memory(shop, "random fp32", large, context, 30000, states)
            + larger_than_memory(shop, "grown fp32", speculation.grown(shop, "fp32"), 512, 2000, 32 << 20))


def larger_than_memory(shop, name, model, context, vocabulary, states):
    """The rows of one model, of whose memory `states` bytes are for states in RAM."""
    limit, tokens = disk.limit_of(model, PART), context - PAGE // 2
    plan, _ = shop.split(model, "serving/disk", "--context", context, "--ram", f"{limit - disk.KERNEL - states}B", "--prompt-tokens", tokens,
                         "--new-tokens", context - tokens)
    asked = [[prompt(seed, length, vocabulary) for seed, length in ((number, tokens), (-1 - number, 64))] for number in range(shop.rounds)]
    # Weights are prepared once, before the measurements.
    server = Server(shop, plan)
    try:
        server.complete(asked[0][1])
    finally:
        server.kill()
    runs = [long_prompt(shop, plan, *prompts, states, limit) for prompts in asked]
    cold, ram, from_disk = (measure.values(runs, key) for key in ("cold", "ram", "disk"))
    size = os.path.getsize(disk.weight_file(model)) / 1e9
    what = f"first token of a prompt of {tokens} tokens, {name} of {size:.1f} GB, RAM for {PART:.0%}"
    return [
        compared(f"{what}: states in RAM over none", ram, cold, 20, "s", smaller_is_better=True),
        compared(f"{what}: on disk after kill -9 over none", from_disk, cold, 5, "s", smaller_is_better=True),
    ]


def page_sizes(shop):
    """The first token by the size of pages. In each round all sizes have the same prompt, whose length is random."""
    model = shop.decoder("int4")
    plan, _ = shop.split(model, "serving/pages", "--context", 4096)
    most, runs = LONG_SMALL if shop.small else LONG, {size: [] for size in PAGE_SIZES}
    for number in range(shop.rounds):
        tokens = most - random.Random(number).randrange(max(PAGE_SIZES))
        for size in PAGE_SIZES:
            runs[size].append(long_prompt(shop, plan, prompt(number, tokens), prompt(-1 - number, 64), "4G", page=size))
    values = {size: {key: [run[key] for run in of_size] for key in of_size[0]} for size, of_size in runs.items()}
    rows = []
    for size, own in values.items():
        for key, what in (("cold", "none stored"), ("ram", "pages in RAM"), ("disk", "pages on disk")):
            measured = f"first token of a prompt of {most - max(PAGE_SIZES)} to {most} tokens, {what}: pages of {size} over {PAGE} tokens"
            rows.append(compared(measured, own[key], values[PAGE][key], None, "s", smaller_is_better=True))
        rows.append(row(f"tokens of the prompt computed again, pages of {size}", f"{statistics.mean(own['computed']):.0f} on average"))
    return rows


def decode(shop, dtype):
    """One sequence through the server beside the command line."""
    plan = os.path.join(OUT, "plans", f"serving/{dtype}")

    def served():
        server = Server(shop, plan)
        try:
            server.complete(prompt(0, 64), 4)
            return server.complete(prompt(1, 64), NEW)[1]
        finally:
            server.kill()

    def alone():
        tokens = ",".join(map(str, prompt(1, 64)))
        return shop.exec_json(plan, "--tokens", tokens, "-n", NEW, "--ignore-eos")["timings"]["decode_tokens_per_second"]

    runs = measure.in_turns(shop.rounds, ours=served, theirs=alone)
    return [compared(f"decode of one sequence, server over command line, {dtype}", runs["ours"], runs["theirs"], 0.98, "tok/s")]


def lateness(shop, plan, number):
    """One round: the p99 of the times between tokens of a running answer while a long prompt is computed, over the time of a chunk of
    that prompt alone."""
    tokens = LONG_SMALL if shop.small else LONG
    server = Server(shop, plan, "--max-sequences", 2)
    try:
        server.complete(prompt(0, 64), 4)
        chunk = server.complete(prompt(1 + number, tokens))[0] / (tokens / PAGE)
        times, begins = [], threading.Event()

        def runs():
            # More tokens than the prompt has chunks, so that the answer outlasts it.
            for now, event in server.events(prompt(-1 - number, 16), tokens // PAGE + NEW):
                times.extend([now] if any(choice["logprobs"] for choice in event["choices"]) else [])
                if len(times) == 4:
                    begins.set()

        running = threading.Thread(target=runs)
        running.start()
        if not begins.wait(WAIT):
            raise measure.Failed("the answer does not begin")
        arrives = time.monotonic()
        server.complete(prompt(10_000 + number, tokens))
        ends = time.monotonic()
        running.join()
    finally:
        server.kill()
    between = sorted(after - before for before, after in zip(times, times[1:]) if after > arrives and before < ends)
    if times[-1] < ends or len(between) < tokens // PAGE:
        raise measure.Failed(f"the answer had {len(between)} tokens while the prompt was computed")
    return between[min(len(between) - 1, round(len(between) * 0.99))] / chunk


def fairness(shop, dtype):
    plan = os.path.join(OUT, "plans", f"serving/{dtype}")
    late = [lateness(shop, plan, number) for number in range(shop.rounds)]
    what = f"p99 between tokens while a prompt of {LONG_SMALL if shop.small else LONG} tokens arrives, over the time of its chunk, {dtype}"
    return [limited(what, late, 2, lambda ratio: f"{ratio:.2f}x")]


def serving(shop):
    rows = []
    for dtype in ("int4", "fp32"):
        rows += first_tokens(shop, dtype) + decode(shop, dtype) + fairness(shop, dtype)
    return rows + first_tokens_from_disk(shop)
