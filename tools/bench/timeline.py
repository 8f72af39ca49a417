"""Reads weight copies from a trace of `hpp-exec bench --trace`: when they ran, and what computed meanwhile."""

import json


def spans(path):
    """Spans of a Chrome trace: dictionaries with lane, name, kind, start and end in microseconds."""
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    return [{"lane": lanes[event["tid"]], "name": event["name"], "kind": event["cat"], "start": event["ts"],
             "end": event["ts"] + event["dur"], **event.get("args", {})} for event in events if event["ph"] == "X"]


def passes(path):
    """The milliseconds of each pass in the trace, in order."""
    return [(span["end"] - span["start"]) / 1e3 for span in sorted(spans(path), key=lambda span: span["start"]) if span["kind"] == "pass"]


def copied_to_devices(path, passes):
    """Bytes copied to devices for the first `passes` passes, before and in them."""
    return sum(span.get("bytes", 0) for span in spans(path) if span["lane"].startswith("to ") and span.get("pass", passes) < passes)


def union(intervals):
    """The union of the spans, as sorted, disjoint intervals."""
    joined = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return joined


def covered(intervals, under):
    """The length of `intervals` that overlaps `under`; both as `union` returns them."""
    total, first = 0.0, 0
    for start, end in intervals:
        while first < len(under) and under[first][1] <= start:
            first += 1
        at = first
        while at < len(under) and under[at][0] < end:
            total += min(end, under[at][1]) - max(start, under[at][0])
            at += 1
    return total


def overlap(path):
    """The share of the copy time of weights that overlaps computation on any device; None without such copies."""
    found = spans(path)
    computing = [span for span in found if span["kind"] == "compute"]
    partitions = {span["name"] for span in computing}
    # Boundaries are copied on the same lane under their tensor's name; weights have their partition's name.
    copies = union((span["start"], span["end"]) for span in found
                   if span["kind"] == "transfer" and span["lane"].startswith("to ") and span["name"] in partitions)
    length = sum(end - start for start, end in copies)
    if not length:
        return None
    return covered(copies, union((span["start"], span["end"]) for span in computing)) / length
