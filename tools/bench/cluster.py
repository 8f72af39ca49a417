"""Conversations on many nodes: what routing and an object store change. A simulation on numbers measured on one node; prints a table.

    tools/bench/cluster.py                   # the table of docs/SCALE.md: 2, 64 and 1000 nodes
    tools/bench/cluster.py --nodes 4000 --minutes 30

A node is the machine of docs/BENCHMARKS.md with the model of 350 M in 4 bits: MEASURED below, with the rows it is from. It is a queue of work in the
order of arrival: a request's work is the time to restore and to compute its prompt, and its share of passes that generate 8 answers at once. A
conversation begins with a prompt, thinks, and goes on; its KV cache is where it was last computed, on that node's disk. Nodes are lost at random with
their disks. What is left out: chunks of prompts between others' tokens (a long prompt delays the first token of the next less than here), and
evictions (a node keeps a day of conversations).
"""

import argparse
import dataclasses
import hashlib
import heapq
import random
import statistics

# `make bench BENCH=serving` (2026-11-26) and `BENCH=rows`, two cores (docs/BENCHMARKS.md).
PROMPT_SECONDS = 17.8 / 4032
ANSWER_SECONDS = 1 / 115
STATE_BYTES = 397e6 / 4032
RESTORE_BYTES_PER_S = 0.94e9
# Assumed: what a node gets from an object store, and how long a first byte takes.
STORE_BYTES_PER_S, STORE_SECONDS = 0.1e9, 0.05

# Assumed: the conversations.
FIRST_PROMPT, LATER_PROMPT, ANSWER = 600, 80, 200
TURNS, THINKING = 8, 60.0
# Share of a node's time that its requests take if every state is found; seconds between losses of a node.
LOAD, BETWEEN_LOSSES = 0.4, 6 * 3600
# A request goes to the next node if its own has more seconds of work than this waiting.
PATIENCE = 10.0


@dataclasses.dataclass
class Conversation:
    name: int
    tokens: int = 0
    # Tokens in the object store.
    stored: int = 0
    # Tokens whose states a node has, by node, and that node's losses when it got them.
    places: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Node:
    free_at: float = 0.0
    busy: float = 0.0
    losses: int = 0


@dataclasses.dataclass
class Outcome:
    requests: int = 0
    prompt_tokens: int = 0
    found: int = 0
    fetched_bytes: float = 0.0
    written_bytes: float = 0.0
    first_tokens: list = dataclasses.field(default_factory=list)
    busy: float = 0.0
    seconds: float = 0.0


def preference(conversation, node):
    """As hpp.ray.ConversationRouter ranks places."""
    return hashlib.blake2b(f"{node}\n{conversation}".encode(), digest_size=8).digest()


def ranked(conversation, count, memory={}):
    """The first two nodes of a conversation."""
    key = (conversation, count)
    if key not in memory:
        memory[key] = heapq.nlargest(2, range(count), key=lambda node: preference(conversation, node))
    return memory[key]


class Cluster:
    def __init__(self, count, routed, store, seed):
        self.nodes = [Node() for _ in range(count)]
        self.routed, self.store = routed, store
        self.random = random.Random(seed)
        self.outcome = Outcome()

    def choose(self, conversation, now):
        if not self.routed:
            return self.random.randrange(len(self.nodes))
        first, *second = ranked(conversation.name, len(self.nodes))
        waiting = lambda number: max(0.0, self.nodes[number].free_at - now)
        if second and waiting(first) > PATIENCE and waiting(second[0]) < waiting(first):
            return second[0]
        return first

    def serve(self, conversation, new_tokens, now):
        """Computes a turn; when its answer is complete."""
        number = self.choose(conversation, now)
        node, outcome = self.nodes[number], self.outcome
        asked = conversation.tokens + new_tokens
        tokens, losses = conversation.places.get(number, (0, node.losses))
        here = tokens if losses == node.losses else 0
        fetched = max(0, conversation.stored - here) if self.store else 0
        work = here * STATE_BYTES / RESTORE_BYTES_PER_S
        work += STORE_SECONDS + fetched * STATE_BYTES / STORE_BYTES_PER_S if fetched else 0.0
        work += (asked - here - fetched) * PROMPT_SECONDS
        start = max(now, node.free_at)
        outcome.first_tokens.append(start + work - now)
        work += ANSWER * ANSWER_SECONDS
        node.free_at = start + work
        node.busy += work
        conversation.tokens = asked + ANSWER
        conversation.places[number] = (conversation.tokens, node.losses)
        if self.store:
            outcome.written_bytes += (conversation.tokens - conversation.stored) * STATE_BYTES
            conversation.stored = conversation.tokens
        outcome.requests += 1
        outcome.prompt_tokens += asked
        outcome.found += here + fetched
        outcome.fetched_bytes += fetched * STATE_BYTES
        return node.free_at


def perfect_seconds():
    """Seconds of work of a mean conversation if all its states are found on disk."""
    tokens, seconds = 0, 0.0
    for turn in range(TURNS):
        new = LATER_PROMPT if turn else FIRST_PROMPT
        seconds += tokens * STATE_BYTES / RESTORE_BYTES_PER_S + new * PROMPT_SECONDS + ANSWER * ANSWER_SECONDS
        tokens += new + ANSWER
    return seconds


def simulate(count, seconds, routed, store, seed=1):
    cluster = Cluster(count, routed, store, seed)
    chance = cluster.random
    between = perfect_seconds() / (LOAD * count)
    events, tick = [(chance.expovariate(1 / between), 0, "new", 0, None)], 0
    if BETWEEN_LOSSES:
        events.append((chance.expovariate(count / BETWEEN_LOSSES), -1, "loss", 0, None))
    heapq.heapify(events)
    while events and events[0][0] < seconds:
        now, _, what, turns, conversation = heapq.heappop(events)
        tick += 1
        if what == "loss":
            cluster.nodes[chance.randrange(count)].losses += 1
            heapq.heappush(events, (now + chance.expovariate(count / BETWEEN_LOSSES), -tick, "loss", 0, None))
            continue
        if what == "new":
            heapq.heappush(events, (now + chance.expovariate(1 / between), tick, "new", 0, None))
            conversation, turns = Conversation(tick), 1 + int(chance.expovariate(1 / (TURNS - 0.5)))
        done = cluster.serve(conversation, LATER_PROMPT if conversation.tokens else FIRST_PROMPT, now)
        if turns > 1:
            heapq.heappush(events, (done + chance.expovariate(1 / THINKING), tick, "turn", turns - 1, conversation))
    cluster.outcome.busy = sum(min(node.busy, seconds) for node in cluster.nodes) / count / seconds
    cluster.outcome.seconds = seconds
    return cluster.outcome


def line(count, routed, store, outcome):
    firsts = sorted(outcome.first_tokens)
    p95 = firsts[int(0.95 * (len(firsts) - 1))]
    where = "by conversation" if routed else "at random"
    rate = lambda total: f"{total / outcome.seconds / 1e6 / count:.2f}"
    median = statistics.median(firsts)
    waits = f"{median:.2f} s, {p95:.2f} s" if outcome.busy < 0.98 else "grows: overloaded"
    traffic = f"{rate(outcome.fetched_bytes)}, {rate(outcome.written_bytes)} MB/s" if store else ""
    cells = [count, where, "yes" if store else "no", f"{outcome.requests / outcome.seconds:.2f}", f"{100 * outcome.found / outcome.prompt_tokens:.1f} %",
             f"{100 * outcome.busy:.0f} %", waits, traffic]
    return "| " + " | ".join(map(str, cells)) + " |"


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--nodes", type=int, nargs="+", default=[2, 64, 1000])
    arguments.add_argument("--minutes", type=float, default=20)
    given = arguments.parse_args()
    print("| nodes | requests go | object store | requests/s | prompt tokens found | nodes busy | first token, median and 95th of 100 | store traffic per node, read and written |")
    print("|---|---|---|---|---|---|---|---|")
    for count in given.nodes:
        for routed in (False, True):
            for store in (False, True):
                outcome = simulate(count, given.minutes * 60, routed, store)
                print(line(count, routed, store, outcome), flush=True)


if __name__ == "__main__":
    main()
