"""`hpp-exec serve` beside llama.cpp's own server: the first token of a prompt whose states are kept, and tokens per second of several clients.

Both answer the same requests: prompts of token ids, answers of a fixed number of tokens. The weights differ, but not their shape and type."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import threading
import time

import beside_llama_cpp
import disk
import measure
import serving
from limit import Limit
from table import compared
from workshop import ROOT

BINARY = os.path.join(ROOT, ".deps", "llama-server", "llama-server")
# Tokens of a client's prompts and answers, and its requests, one after the other.
PROMPT, NEW, REQUESTS = 64, 32, 2
CLIENTS, CONTEXT = (1, 4, 8), 128
# Seconds that a start or a request may take; requests under a memory limit take minutes where the disk is slow.
WAIT = 600
# The same under a memory limit.
LIMITED_PROMPT, LIMITED_NEW, PART, WANTED_LIMITED = 16, 12, 0.5, 2


class LlamaServer:
    """llama-server over one GGUF with `slots` sequences of `context` tokens."""

    def __init__(self, shop, model, slots, context, *options, group=None):
        if not os.path.exists(BINARY):
            raise measure.Failed("llama-server is not built: tools/scripts/deps.sh llama-server")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [BINARY, "--model", model, "--host", "127.0.0.1", "--port", port, "--threads", shop.threads, "--parallel", slots,
                   "--ctx-size", slots * context, "--no-ui", *options]
        command = list(map(str, group.command(command) if group else command))
        self.host = f"127.0.0.1:{port}"
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.wait(command)

    def wait(self, command):
        """Until the model is loaded."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection(self.host, timeout=WAIT)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.05)
        self.kill()
        raise measure.Failed(f"llama-server did not start: {' '.join(command)}")

    def kill(self):
        self.process.kill()
        self.process.wait()


def ask(server, prompt, new):
    """Seconds until a whole answer of `new` tokens has come."""
    body = json.dumps({"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True})
    start = time.monotonic()
    connection = http.client.HTTPConnection(server.host, timeout=WAIT)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    said = response.read()
    if response.status != 200 or json.loads(said)["usage"]["completion_tokens"] != new:
        raise measure.Failed(f"{server.host} answered {response.status}: {said[:300]!r}")
    connection.close()
    return time.monotonic() - start


def tokens_per_second(server, clients, length, new):
    """All clients ask at once, each `REQUESTS` times; the time includes their prompts, which are all different."""
    failed = []

    def client(number):
        try:
            for request in range(REQUESTS):
                ask(server, serving.prompt((clients * 100 + number) * 100 + request, length), new)
        except (OSError, measure.Failed) as error:
            failed.append(error)

    running = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    start = time.monotonic()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failed:
        raise measure.Failed(f"a client failed: {failed[0]}")
    return clients * REQUESTS * new / (time.monotonic() - start)


@contextlib.contextmanager
def running(server):
    try:
        yield server
    finally:
        server.kill()


def first_tokens(start, length):
    """One round: the first token of a long prompt cold, asked again at once, and after another conversation took its sequence."""
    asked, other = serving.prompt(1, length), serving.prompt(2, length // 4)
    with running(start()) as server:
        ask(server, serving.prompt(3, 64), 4)
        cold, again = ask(server, asked, 1), ask(server, asked, 1)
        ask(server, other, 1)
        return {"cold": cold, "again": again, "returned": ask(server, asked, 1)}


def rates(start):
    """One round: tokens per second by the number of clients."""
    with running(start()) as server:
        ask(server, serving.prompt(3, 64), 4)
        return {clients: tokens_per_second(server, clients, PROMPT, NEW) for clients in CLIENTS}


def in_memory(shop, dtype, kind):
    plan, short = (shop.split(shop.decoder(dtype), f"llama-server/{dtype}-{context}", "--context", context)[0] for context in (4096, CONTEXT))
    model, length = beside_llama_cpp.decoder(shop, dtype), serving.LONG_SMALL if shop.small else serving.LONG
    one = measure.in_turns(
        shop.rounds,
        ours=lambda: first_tokens(lambda: serving.Server(shop, plan, "--max-sequences", 1, "--kv-ram", "4G"), length),
        theirs=lambda: first_tokens(lambda: LlamaServer(shop, model, 1, 4096), length))
    many = measure.in_turns(
        shop.rounds,
        ours=lambda: rates(lambda: serving.Server(shop, short, "--max-sequences", max(CLIENTS))),
        theirs=lambda: rates(lambda: LlamaServer(shop, model, max(CLIENTS), CONTEXT)))
    what = f"{dtype} and {kind}"
    rows = [compared(f"first token of a prompt of {length} tokens, {when}, over llama-server, {what}",
                     *(measure.values(one[side], key) for side in ("ours", "theirs")), wanted, "s", smaller_is_better=True)
            for key, when, wanted in (("cold", "cold", None), ("again", "asked again", 1), ("returned", "after another conversation", 1))]
    return rows + [compared(f"{clients} clients over llama-server, {what}", *(measure.values(many[side], clients) for side in ("ours", "theirs")),
                            1, "tok/s") for clients in CLIENTS]


def under_limit(shop, what, model, theirs):
    """Eight clients with RAM for a part of the model."""
    limit, clients, context = disk.limit_of(model, PART), max(CLIENTS), 2 * (LIMITED_PROMPT + LIMITED_NEW)
    plan, _ = shop.split(model, "llama-server/limited", "--context", context, "--ram", f"{limit - disk.KERNEL}B", "--prompt-tokens",
                         LIMITED_PROMPT, "--new-tokens", LIMITED_NEW)
    # Weights are prepared once, before the measurements.
    with running(serving.Server(shop, plan)) as server:
        ask(server, serving.prompt(3, LIMITED_PROMPT), 2)

    def rate(folders, start):
        disk.forget(*folders)
        with Limit(limit) as group, running(start(group)) as server:
            ask(server, serving.prompt(3, LIMITED_PROMPT), 2)
            return tokens_per_second(server, clients, LIMITED_PROMPT, LIMITED_NEW)

    runs = measure.in_turns(
        shop.rounds,
        ours=lambda: rate((model, plan), lambda group: serving.Server(shop, plan, "--max-sequences", clients, group=group)),
        # Without these, it is killed: repacked weights are not mapped, and states of ended answers are kept in RAM.
        theirs=lambda: rate((os.path.dirname(theirs),), lambda group: LlamaServer(
            shop, theirs, clients, context, "--no-repack", "--cache-ram", 0, group=group)))
    return compared(f"{clients} clients, {PART:.0%} of the model's size as memory, over llama-server, {what}", runs["ours"], runs["theirs"],
                    WANTED_LIMITED, "tok/s")


def beside_llama_server(shop):
    rows = [row for dtype, kind in beside_llama_cpp.KINDS.items() for row in in_memory(shop, dtype, kind)]
    return rows + [under_limit(shop, *models) for models in beside_llama_cpp.large_models(shop)]
