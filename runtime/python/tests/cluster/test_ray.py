"""hpp.ray on a local Ray cluster of two nodes: the answers of one engine, resumption, conversations that are found, merged profiles.

fixtures/end-to-end/tests/python.rs runs it where Ray is installed (make test-ray), with the variables of test_hpp.py.
"""

import json
import math
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import hpp
import hpp.ray
import ray
import yaml
from hpp._answers import model_hash
from ray import serve
from ray.cluster_utils import Cluster

MODELS = Path(os.environ["HPP_TEST_MODELS"])
LEARNED = MODELS / "genai" / "learned-llama-fp32-cpu"
WORDS = ["What does Vec::push do?", "What is ownership?", "What is a list?", "What does len return?"]
# Two nodes here share a machine.
THREADS = 1


def setUpModule() -> None:
    cluster = Cluster()
    memory = 1 << 30
    cluster.add_node(num_cpus=4, memory=memory, object_store_memory=100 << 20, labels={"hpp-kind": "first"})
    cluster.add_node(num_cpus=4, memory=memory, object_store_memory=100 << 20, labels={"hpp-kind": "second"})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    unittest.addModuleCleanup(cluster.shutdown)
    unittest.addModuleCleanup(ray.shutdown)


def in_directory() -> Path:
    directory = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(directory.cleanup)
    return Path(directory.name)


def planned(partitions: int) -> Path:
    return hpp.split(LEARNED, ram="1G", vram=0, partitions=partitions, out=in_directory() / "plan").path


def prompts(count: int) -> list[dict]:
    return [{"id": number, "prompt": WORDS[number % 4] + " " * (number // 4), "chat": True, "max_new": 8} for number in range(count)]


def alone(plan: Path, lines: list[dict]) -> dict[int, list[int]]:
    """The tokens that hpp-exec jobs answers with on this machine."""
    directory = in_directory()
    (directory / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["hpp-exec", "jobs", plan, "--in", directory / "in.jsonl", "--out", directory / "out.jsonl"]
    subprocess.run(command, check=True, capture_output=True)
    answers = map(json.loads, (directory / "out.jsonl").read_text().splitlines())
    return {answer["id"]: answer["tokens"] for answer in answers}


class Jobs(unittest.TestCase):
    def test_answers_are_those_of_one_engine_and_are_not_computed_again(self) -> None:
        work, lines = in_directory(), prompts(24)
        plans = {"first": planned(1), "second": planned(2)}
        expected = alone(plans["first"], lines)

        def answered() -> dict[int, list[int]]:
            dataset = ray.data.from_items(lines, override_num_blocks=6)
            rows = hpp.ray.jobs(dataset, plans, work, batch_size=4, threads=THREADS).take_all()
            self.assertEqual([row["error"] for row in rows], [None] * len(lines))
            return {row["id"]: list(row["tokens"]) for row in rows}

        self.assertEqual(answered(), expected)
        files = sorted(work.glob("answers-*.jsonl"))
        left = [path.name for path in work.iterdir() if path not in files]
        self.assertEqual(left, ["model-" + model_hash(LEARNED)], "files of prompts are left")
        before = [path.read_bytes() for path in files]
        self.assertEqual(answered(), expected)
        self.assertEqual([path.read_bytes() for path in sorted(work.glob("answers-*.jsonl"))], before, "computed again")
        # A killed node leaves a file that ends within a line.
        files[0].write_bytes(before[0][:-20])
        self.assertEqual(answered(), expected)
        self.assertEqual(len(list(work.glob("answers-*.jsonl"))), len(files) + 1)
        other = MODELS / "genai" / "llama3-fp32-cpu"
        with self.assertRaisesRegex(Exception, "answers of another model"):
            hpp.ray.jobs(ray.data.from_items([{"id": 0, "tokens": [1], "max_new": 1}]), other, work).take_all()

    def test_a_prompt_that_cannot_be_answered_is_a_row(self) -> None:
        lines = [{"id": "good", "prompt": "a", "max_new": 2}, {"id": "bad", "prompt": "b", "top_p": 7}]
        rows = hpp.ray.jobs(ray.data.from_items(lines), planned(1), in_directory(), threads=THREADS).take_all()
        found = {row["id"]: row for row in rows}
        self.assertIsNone(found["good"]["error"])
        self.assertIn("top_p", found["bad"]["error"])

    def test_each_row_that_is_drawn_without_a_seed_has_an_answer_of_its_own(self) -> None:
        work, plan = in_directory(), planned(1)

        def answered(lines: list[dict], **options: object) -> dict[object, tuple]:
            dataset = ray.data.from_items(lines, override_num_blocks=2)
            rows = hpp.ray.jobs(dataset, plan, work, batch_size=4, threads=THREADS, max_new=4, **options).take_all()
            self.assertEqual([row["error"] for row in rows], [None] * len(lines))
            return {row["id"]: (row["seed"], tuple(row["tokens"])) for row in rows}

        def seeds(answers: dict[object, tuple]) -> set:
            return {seed for seed, _ in answers.values()}

        lines = [{"id": number, "prompt": "fn"} for number in range(6)]
        drawn = answered(lines, temperature=1.5)
        self.assertEqual(len(seeds(drawn)), 6)
        self.assertEqual(answered(lines, temperature=1.5), drawn, "computed again")
        self.assertEqual(len(seeds(answered(lines, seed=-1))), 6)
        self.assertEqual(len(seeds(answered([{**line, "seed": -1} for line in lines]))), 6)
        large = 2**64 - 2
        self.assertEqual(seeds(answered([{**line, "seed": large} for line in lines])), {large})
        self.assertEqual(set(answered(lines, temperature=0).values()), set(answered(lines[:1]).values()))

    def test_rows_without_an_id_are_told_apart_by_their_order(self) -> None:
        rows = ray.data.from_items([{"id": None, "prompt": "fn"}] * 3, override_num_blocks=1)
        answers = hpp.ray.jobs(rows, planned(1), in_directory(), threads=THREADS, max_new=4, temperature=1.5).take_all()
        self.assertEqual(len({row["seed"] for row in answers}), 3)

    def test_floats_of_pandas_are_the_numbers_that_were_written(self) -> None:
        row = {"id": 5.0, "prompt": "a", "max_new": 5.0, "top_k": 0.5, "seed": 2.0**60, "temperature": 1.0, "chat": 1.0, "stop": math.nan}
        expected = {"id": 5, "prompt": "a", "max_new": 5, "top_k": 0.5, "seed": 2.0**60, "temperature": 1.0, "chat": True}
        self.assertEqual(repr(hpp._ray_jobs.prompt(row)), repr(expected))

    def test_a_run_after_one_that_failed_has_its_memory(self) -> None:
        rows, plan = ray.data.from_items(prompts(2)), planned(1)
        for _ in range(3):
            try:
                hpp.ray.jobs(rows, plan, in_directory(), no_such_option=True).take_all()
                self.fail("a wrong option was accepted")
            except Exception as error:
                self.assertIn("no-such-option", str(error))
        self.assertEqual(len(hpp.ray.jobs(rows, plan, in_directory(), threads=THREADS).take_all()), 2)

    def test_nodes_of_an_unknown_kind_are_refused(self) -> None:
        with self.assertRaisesRegex(Exception, "no plan for nodes of the kind"):
            hpp.ray.jobs(ray.data.from_items(prompts(1)), {"third": "plan"}, in_directory()).take_all()


class Server(unittest.TestCase):
    def test_a_conversation_goes_where_it_was_also_after_a_restart(self) -> None:
        import urllib.error
        import urllib.request

        kv = in_directory()

        def start() -> None:
            plan = planned(1)
            serve.run(hpp.ray.server(plan, kv, api_key="secret", threads=THREADS, kv_page=16), name="hpp")

        def ask(messages: list[dict], **more: object) -> tuple[str, dict]:
            body = json.dumps({"messages": messages, "max_tokens": 4, **more}).encode()
            headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
            request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", body, headers)
            with urllib.request.urlopen(request) as answer:
                return answer.headers["X-HPP-Place"], json.load(answer)

        def turn(messages: list[dict]) -> tuple[str, list[dict], int]:
            place, answer = ask(messages, session_id=messages[0]["content"], park=True)
            used = answer["usage"]
            follow = [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            return place, [*messages, *follow], cached

        self.addCleanup(serve.shutdown)
        start()
        with self.assertRaises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen("http://127.0.0.1:8000/v1/models")
        self.assertEqual(refused.exception.code, 401)
        with urllib.request.urlopen("http://127.0.0.1:8000/health") as answer:
            self.assertEqual(json.load(answer), {"status": "ok"})
        with urllib.request.urlopen("http://127.0.0.1:8000/") as answer:
            self.assertIn("text/html", answer.headers["Content-Type"])
        chats = [[{"role": "user", "content": f"Question {number}: what does Vec::push do?"}] for number in range(8)]
        first = [turn(chat) for chat in chats]
        self.assertEqual(len({place for place, _, _ in first}), 2, "all conversations went to one node")
        second = [turn(chat) for _, chat, _ in first]
        self.assertEqual([place for place, _, _ in second], [place for place, _, _ in first])
        self.assertTrue(all(cached > 0 for _, _, cached in second), second)
        serve.shutdown()
        start()
        third = [turn(chat) for _, chat, _ in second]
        self.assertEqual([place for place, _, _ in third], [place for place, _, _ in first])
        self.assertTrue(all(cached > 0 for _, _, cached in third), "the parked conversations were not found")

        request = urllib.request.Request(
            "http://127.0.0.1:8000/v1/completions",
            json.dumps({"prompt": "Once", "max_tokens": 5, "stream": True, "ignore_eos": True}).encode(),
            {"Authorization": "Bearer secret", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            events = answer.read().decode().split("\n\n")
        self.assertEqual(events[-2], "data: [DONE]")
        self.assertGreaterEqual(len(events), 6)

    def test_what_names_a_conversation(self) -> None:
        def named(**fields: object) -> str:
            return hpp.ray.conversation(json.dumps(fields).encode(), "/v1/models")

        begun = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        later = [*begun, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
        self.assertEqual(named(messages=begun), named(messages=later, temperature=1))
        self.assertNotEqual(named(messages=begun), named(messages=begun, model="other"))
        self.assertEqual(named(messages=begun, session_id="x"), named(messages=later[2:], session_id="x"))
        self.assertEqual(named(prompt="a" * 300), named(prompt="a" * 400))
        self.assertEqual(named(prompt=[1] * 300), named(prompt=[1] * 400))
        self.assertEqual(hpp.ray.conversation(b"", "/v1/models"), "/v1/models")


class Profile(unittest.TestCase):
    def test_parts_of_a_corpus_have_the_statistics_of_the_whole(self) -> None:
        directory = in_directory()
        corpus = directory / "corpus.txt"
        corpus.write_text("".join(f"the quick brown fox {number} jumps over\n" for number in range(11)))
        options = {"quick": True, "providers": ["cpu"], "contexts": [8, 16], "prefill_tokens": [4, 8], "decode_tokens": 2, "threads": THREADS}
        one = hpp.profile(LEARNED, directory / "one.yaml", progress=False, prompts=corpus, max_prompts=11, **options)
        both = hpp.ray.profile(LEARNED, corpus, directory / "both.yaml", **options)
        self.assertEqual(list(both), ["first", "second"])
        whole = yaml.safe_load(one.read_text())["corpus"]
        for path in both.values():
            merged = yaml.safe_load(path.read_text())["corpus"]
            self.assertEqual((merged["hash"], merged["prompts_done"]), (whole["hash"], 11))
            self.same(merged["statistics"], whole["statistics"], "statistics")

    def same(self, one: object, other: object, where: str) -> None:
        """Integers and names are equal, other numbers but for their last bits."""
        if isinstance(one, dict):
            self.assertEqual(one.keys(), other.keys(), where)
            for name in one:
                self.same(one[name], other[name], f"{where}.{name}")
        elif isinstance(one, list):
            self.assertEqual(len(one), len(other), where)
            for number, (a, b) in enumerate(zip(one, other)):
                self.same(a, b, f"{where}[{number}]")
        elif isinstance(one, float) or isinstance(other, float):
            self.assertLessEqual(abs(one - other), 1e-12 * (1 + abs(other)), where)
        else:
            self.assertEqual(one, other, where)


if __name__ == "__main__":
    unittest.main()
