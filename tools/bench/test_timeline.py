"""Which part of a copy counts as overlapped by computation. Run: python3 -m unittest discover -s tools/bench"""

import json
import os
import tempfile
import unittest

import timeline


def written(spans):
    """A trace file of (lane, name, kind, start, length), and for copies (pass, bytes)."""
    lanes = sorted({span[0] for span in spans})
    events = [{"ph": "M", "tid": at, "name": "thread_name", "args": {"name": lane}} for at, lane in enumerate(lanes)]
    events += [{"ph": "X", "tid": lanes.index(lane), "name": name, "cat": kind, "ts": start, "dur": length,
                "args": dict(zip(("pass", "bytes"), more))} for lane, name, kind, start, length, *more in spans]
    path = os.path.join(tempfile.mkdtemp(), "trace.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events}, file)
    return path


class Overlap(unittest.TestCase):
    def test_copies_of_weights_under_any_computing_count_once(self):
        path = written([
            ("cpu", "cpu_0", "compute", 0, 100), ("gpu0", "gpu_0", "compute", 50, 100), ("gpu0", "gpu_0", "stall", 150, 50),
            ("to gpu0", "gpu_0", "transfer", 100, 100), ("to gpu0", "hidden", "transfer", 10, 10),
            ("disk", "cpu_0", "transfer", 0, 100), ("passes", "decode", "pass", 0, 200),
        ])
        self.assertEqual(timeline.overlap(path), 0.5)

    def test_gaps_between_computing_are_not_covered(self):
        path = written([("cpu", "a", "compute", 0, 10), ("cpu", "a", "compute", 20, 10), ("to gpu0", "a", "transfer", 5, 20)])
        self.assertEqual(timeline.overlap(path), 0.5)

    def test_bytes_of_a_prompt_are_those_of_its_passes_to_devices(self):
        path = written([("to gpu0", "a", "transfer", 0, 10, 0, 100), ("to gpu1", "b", "transfer", 5, 10, 1, 20), ("to gpu0", "a", "transfer", 20, 10, 2, 4),
                        ("from gpu0", "logits", "transfer", 9, 1, 0, 8), ("gpu0", "a", "compute", 10, 5)])
        self.assertEqual([timeline.copied_to_devices(path, passes) for passes in (1, 2)], [100, 120])

    def test_no_copies_have_no_share(self):
        self.assertIsNone(timeline.overlap(written([("cpu", "a", "compute", 0, 10)])))


if __name__ == "__main__":
    unittest.main()
