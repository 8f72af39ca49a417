"""The module as a program uses it: recorded tokens, the same bits as hpp-exec, streams, cancellation, errors.

fixtures/end-to-end/tests/python.rs runs it, with the compiled module in a package of its own and these variables:
HPP_TEST_MODELS, the recorded models; HPP_TEST_SLOW_MODEL, one whose prompts take seconds. The commands are on PATH.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import warnings
from pathlib import Path

import hpp
import numpy
from hpp._answers import claim, model_hash
from hpp._commands import flags

MODELS = Path(os.environ["HPP_TEST_MODELS"])
LEARNED = MODELS / "genai" / "learned-llama-fp32-cpu"
QUESTION = [{"role": "user", "content": "What does Vec::push do?"}]


def in_directory() -> Path:
    directory = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(directory.cleanup)
    return Path(directory.name)


def hpp_exec(*arguments: object) -> dict:
    done = subprocess.run(["hpp-exec", *map(str, arguments), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class OnLearnedModel(unittest.TestCase):
    """A model that answers in sentences, in two partitions."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.directory = in_directory()
        cls.plan = hpp.split(LEARNED, ram="1G", vram=0, partitions=2, out=cls.directory / "plan")
        cls.model = hpp.load(cls.plan)
        cls.recorded = numpy.load(LEARNED / "reference.npz")

    @classmethod
    def tearDownClass(cls) -> None:
        cls.model.close()

    def test_split_returns_the_plan_and_what_the_command_printed(self) -> None:
        self.assertEqual(self.plan.path, self.directory / "plan" / "plan.yaml")
        self.assertEqual([partition.name for partition in self.plan.partitions], ["cpu_0", "cpu_1"])
        self.assertIn("cpu_1", self.plan.report or "")
        self.assertEqual(self.plan.context, self.model.context)
        self.assertGreater(self.plan.predictions["decode_tokens_per_second"], 0)
        self.assertEqual(self.plan.partitions[0].blocks[0], "embedding")
        for partition, data in zip(self.plan.partitions, self.plan.data["partitions"]):
            self.assertIn(f"({partition.weight_bytes} B)", data["bytes"]["weights"])

    def test_the_library_is_that_of_this_python(self) -> None:
        self.assertNotIn("ORT_DYLIB_PATH", os.environ)
        spec = importlib.util.find_spec("onnxruntime")
        assert spec is not None and spec.origin is not None
        self.assertEqual(Path(self.model.onnxruntime).parent, Path(spec.origin).parent / "capi")

    def test_tokens_are_the_recorded_ones_and_logits_have_the_bits_of_the_command(self) -> None:
        prompt, tokens = self.recorded["prompt_ids"].ravel(), self.recorded["tokens"].ravel()
        generated = self.model.generate(
            tokens=prompt, max_new=len(tokens), temperature=0, ignore_eos=True, logits=True, reuse="nothing"
        )
        self.assertEqual(generated.tokens, tokens.tolist())
        self.assertEqual((generated.finish_reason, generated.prompt_tokens), ("length", len(prompt)))
        file = self.directory / "logits.npy"
        ids = ",".join(map(str, prompt))
        report = hpp_exec(
            self.plan.path, "--tokens", ids, "--max-new", len(tokens), "--temperature", 0, "--ignore-eos", "--logits", file
        )
        self.assertEqual(generated.tokens, report["tokens"])
        self.assertEqual(generated.text, report["text"])
        expected = numpy.load(file)
        self.assertEqual((generated.logits.shape, generated.logits.dtype), (expected.shape, expected.dtype))
        numpy.testing.assert_array_equal(generated.logits.view(numpy.uint32), expected.view(numpy.uint32))
        last = self.model.logits(prompt.astype(numpy.int32), last=True)
        numpy.testing.assert_array_equal(last.view(numpy.uint32), expected[0].view(numpy.uint32))

    def test_logits_after_every_token_are_those_after_each_start_of_the_text(self) -> None:
        prompt = self.recorded["prompt_ids"].ravel().tolist()
        every = self.model.logits(prompt)
        self.assertEqual(every.shape, (len(prompt), self.model.vocab_size))
        for length in (1, len(prompt) // 2, len(prompt)):
            last = self.model.logits(prompt[:length], last=True)
            numpy.testing.assert_allclose(every[length - 1], last, rtol=1e-4, atol=1e-4)

    def test_a_conversation_is_rendered_and_answered_as_by_the_command(self) -> None:
        answer = self.model.generate(messages=QUESTION, max_new=48, temperature=0, reuse="nothing")
        report = hpp_exec(self.plan.path, "--chat", "-p", QUESTION[0]["content"], "-n", 48, "--temperature", 0)
        self.assertEqual((answer.text, answer.tokens), (report["text"], report["tokens"]))
        self.assertEqual(answer.finish_reason, report["finish_reason"])
        self.assertEqual(self.model.tokenize(messages=QUESTION), report["prompt_token_ids"])
        self.assertGreater(answer.timings.decode_tokens_per_second, 0)
        self.assertEqual(str(answer), answer.text)

    def test_a_stream_has_the_text_in_pieces(self) -> None:
        whole = self.model.generate("Vec::push", max_new=24, temperature=0, ignore_eos=True, reuse="nothing")
        stream = self.model.generate("Vec::push", max_new=24, temperature=0, ignore_eos=True, reuse="nothing", stream=True)
        pieces = list(stream)
        self.assertGreater(len(pieces), 5)
        self.assertEqual("".join(pieces), whole.text)
        self.assertEqual(stream.result.tokens, whole.tokens)

    def test_a_stream_that_is_left_early_is_cancelled(self) -> None:
        with self.model.generate("Vec", temperature=0, ignore_eos=True, stream=True) as stream:
            first = next(stream)
        result = stream.result
        self.assertTrue(first and result.text.startswith(first))
        self.assertEqual(result.finish_reason, "cancelled")
        self.assertLess(len(result.tokens), self.model.context // 2)

    def test_signal_handlers_run_while_tokens_come_quickly(self) -> None:
        def generated() -> float:
            started = time.monotonic()
            self.model.generate("Vec", temperature=0, ignore_eos=True, reuse="nothing")
            return time.monotonic() - started

        handled: list[float] = []
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, lambda *_: handled.append(time.monotonic())))
        threading.Timer(generated() / 4, os.kill, [os.getpid(), signal.SIGINT]).start()
        whole = generated()
        # At the end of the call, Python would run them in any case.
        self.assertGreater(time.monotonic() - handled[0], whole / 4)

    def test_sampling_follows_the_seed_and_stop_texts_end_the_answer(self) -> None:
        def sampled(seed: int) -> hpp.Generated:
            return self.model.generate("fn", max_new=24, temperature=1.5, top_k=50, top_p=0.99, seed=seed, ignore_eos=True)

        self.assertEqual(sampled(7).tokens, sampled(7).tokens)
        self.assertNotEqual(sampled(7).tokens, sampled(8).tokens)
        self.assertEqual(sampled(7).seed, 7)
        whole = self.model.generate(messages=QUESTION, max_new=48, temperature=0).text
        word = whole.split()[3]
        stopped = self.model.generate(messages=QUESTION, max_new=48, temperature=0, stop=word)
        self.assertEqual((stopped.finish_reason, stopped.text), ("stop", whole.split(word)[0]))

    def test_minus_one_is_every_token_a_new_seed_and_no_limit(self) -> None:
        one, other = (self.model.generate("fn", max_new=4, top_k=-1, seed=-1, ignore_eos=True) for _ in range(2))
        self.assertNotEqual(one.seed, other.seed)
        again = self.model.generate("fn", max_new=4, top_k=0, seed=one.seed, ignore_eos=True)
        self.assertEqual(again.tokens, one.tokens)
        self.assertEqual(self.model.generate("fn", max_new=-1, seed=2**64 - 1).seed, 2**64 - 1)

    def test_the_next_turn_of_a_conversation_starts_from_the_states_of_the_last(self) -> None:
        prompt = self.model.tokenize("Vec::push appends")
        first = self.model.generate(tokens=prompt, max_new=8, temperature=0, ignore_eos=True, reuse="nothing")
        longer = prompt + first.tokens + self.model.tokenize(" and", special=False)
        second = self.model.generate(tokens=longer, max_new=8, temperature=0, ignore_eos=True)
        # All but the last token of the answer, which was chosen and not computed.
        self.assertEqual(second.reused_tokens, len(prompt) + len(first.tokens) - 1)
        again = self.model.generate(tokens=longer, max_new=8, temperature=0, ignore_eos=True)
        self.assertEqual((again.reused_tokens, again.tokens), (0, second.tokens))
        prefix = self.model.generate(tokens=longer[:-1], max_new=8, temperature=0, ignore_eos=True, reuse="prefix")
        self.assertEqual(prefix.reused_tokens, len(longer) - 2)

    def test_ngram_drafts_change_no_token(self) -> None:
        with hpp.load(self.plan, speculate="ngram") as drafting:
            prompt = "a b c d a b c d a b c"
            expected = self.model.generate(prompt, max_new=32, temperature=0, ignore_eos=True).tokens
            self.assertEqual(drafting.generate(prompt, max_new=32, temperature=0, ignore_eos=True).tokens, expected)

    def test_text_becomes_tokens_and_tokens_become_text(self) -> None:
        tokens = self.model.tokenize("Vec::push", special=False)
        self.assertEqual(self.model.detokenize(numpy.array(tokens, dtype=numpy.uint64)), "Vec::push")

    def test_threads_take_turns_and_the_lock_of_python_is_free_meanwhile(self) -> None:
        answers: list[hpp.Generated] = []

        def ask() -> None:
            answers.append(self.model.generate("Vec", max_new=64, temperature=0, ignore_eos=True, reuse="nothing"))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        counted = 0
        while any(thread.is_alive() for thread in threads):
            counted += 1
            time.sleep(0)
        self.assertGreater(counted, 100)
        self.assertEqual(len({tuple(answer.tokens) for answer in answers}), 1)
        self.assertEqual(len(answers), 3)

    def test_errors_have_the_words_of_the_commands(self) -> None:
        missing = self.directory / "no plan"
        done = subprocess.run(["hpp-exec", str(missing), "-p", "x"], capture_output=True, text=True)
        with self.assertRaises(hpp.HppError) as caught:
            hpp.load(missing)
        error = caught.exception
        self.assertEqual(f"error: {error}\n", done.stderr)
        self.assertTrue(error.hint and error.hint in str(error))
        for model in (LEARNED, LEARNED / "model.onnx"):
            with self.assertRaisesRegex(hpp.HppError, "is a model, not a plan"):
                hpp.Plan(model)
        for wrong, words in [
            (lambda: self.model.generate(), "no prompt was given"),
            (lambda: self.model.generate("a", tokens=[1]), "prompt and tokens were given"),
            (lambda: self.model.generate(tokens=[]), "the prompt is empty"),
            (lambda: self.model.generate(tokens=[1] * 9999), "9999 tokens and the context holds"),
            (lambda: self.model.generate(tokens=[10**6]), "token 1000000 at position 0 is out of range"),
            (lambda: self.model.generate(tokens=[-1]), "out of range"),
            (lambda: self.model.generate(tokens=[0.5]), "float64, not integers"),
            (lambda: self.model.generate("a", temperature=-1), "temperature must be zero or"),
            (lambda: self.model.generate("a", max_new=-2), "max_new cannot be -2"),
            (lambda: self.model.generate("a", top_k=-2), "top_k cannot be -2"),
            (lambda: self.model.generate("a", seed=numpy.int64(-2)), "seed cannot be -2"),
            (lambda: self.model.generate("a", seed=2**64), "seed cannot be 18446744073709551616"),
            (lambda: self.model.generate("a", reuse="all"), "reuse cannot be"),
            (lambda: self.model.generate(messages=[{"role": "tool", "content": ""}]), "role of a message cannot be"),
            (lambda: self.model.generate(messages=[{"role": "user"}]), "no role or no content"),
            (lambda: self.model.logits([]), "the prompt is empty"),
            (lambda: self.model.detokenize([1, 99999]), "the vocabulary has no token 99999"),
            (lambda: hpp.load(self.plan, providers=["T P U"]), "cannot be the name of a provider"),
            (lambda: hpp.load(self.plan, providers=["tpu"]), "there is no provider"),
            (lambda: hpp.load(self.plan, ep_lib={"cpu": "x.so"}), "cpu provider is part of ONNX Runtime"),
            (lambda: hpp.load(self.plan, ep_lib={"npu": ""}), "is not NAME=PATH"),
            (lambda: hpp.load(self.plan, ep_lib={"npu": "/no/such.so"}, providers=["npu"], strict=True), "npu: there is no such file"),
            (lambda: hpp.load(self.plan, ep_option={"precision": "F32"}), "is not NAME.KEY=VALUE"),
            (lambda: hpp.load(self.plan, ep_option={"cuda.x": 1}), "takes no options"),
            (lambda: hpp.load(self.plan, ep_option={"openvino.x": 1}, strict=True), "no partition of this plan tries"),
            (lambda: hpp.load(self.plan, providers=["cuda"], strict=True), "providers: no partition of this plan can compute with cuda"),
            (lambda: hpp.load(self.plan, ort_lib=__file__), "all models of a process share ONNX Runtime"),
            (lambda: hpp.load(self.plan, threads=0), "threads cannot be 0"),
            (lambda: hpp.load(self.plan, context=-1), "context cannot be -1"),
            (lambda: hpp.load(self.plan, pinned=-1), "pinned cannot be -1"),
            (lambda: hpp.load(self.plan, weights="never"), "weights cannot be"),
            (lambda: hpp.load(self.plan, context=10**9), "context of 1000000000 tokens is not possible"),
        ]:
            with self.subTest(words), self.assertRaisesRegex(hpp.HppError, words) as caught:
                wrong()
            self.assertEqual(str(caught.exception).count("error: "), 0)
        # It answers after all of these.
        self.assertEqual(len(self.model.generate("a", max_new=2, ignore_eos=True).tokens), 2)

    def test_failures_of_commands_are_errors_with_their_hint(self) -> None:
        with self.assertRaises(hpp.HppError) as caught:
            hpp.split(LEARNED, ram="1G", vram=0, out=self.plan.path.parent)
        self.assertIn("--force", caught.exception.hint or "")
        with self.assertRaisesRegex(hpp.HppError, "no-such-option"):
            hpp.split(LEARNED, no_such_option=True)
        with self.assertRaisesRegex(hpp.HppError, "writes no plan"):
            hpp.split(LEARNED, dry_run=True)
        with self.assertRaisesRegex(hpp.HppError, "writes no plan"):
            hpp.split(LEARNED, machine="list")
        with self.assertRaises(hpp.HppError) as caught:
            hpp.profile(self.directory / "no-model", progress=False)
        self.assertTrue(str(caught.exception))

    def test_lists_become_options_that_are_repeated(self) -> None:
        given = {"stop": ["a, b", "c"], "providers": ("cuda", "cpu"), "vram": ["12M", "8M"], "out": Path("x"), "force": True, "ram": None}
        expected = ["--stop=a, b", "--stop=c", "--providers=cuda", "--providers=cpu", "--vram=12M,8M", "--out=x", "--force"]
        self.assertEqual(flags(given), expected)
        lists = {"vram": ["12M", "8M"], "assign": ["layers.0=gpu", "head=cpu"], "mechanisms": ["resident", "cpu"], "providers": ["cuda", "openvino", "cpu"]}
        plan = hpp.split(LEARNED, ram="1G", out=self.directory / "lists", ep_option=["openvino.A=1,2", "openvino.B=3"], **lists)
        self.assertIn("{'A': '1,2', 'B': '3'}", str(plan.data["devices"]))

    def test_a_quiet_split_returns_the_plan(self) -> None:
        plan = hpp.split(LEARNED, ram="1G", vram=0, out=self.directory / "quiet", quiet=True)
        self.assertEqual(plan.path, self.directory / "quiet" / "plan.yaml")

    def test_providers_that_no_partition_tries_are_warned_of(self) -> None:
        with self.assertWarnsRegex(hpp.HppWarning, "no partition of this plan can compute with cuda: make a plan for a GPU"):
            hpp.load(self.plan, providers=["cuda"]).close()

    def test_a_plan_for_a_gpu_runs_here_with_a_warning(self) -> None:
        plan = hpp.split(LEARNED, ram="1G", vram="12M", gpu_layers=2, out=self.directory / "gpu")
        with warnings.catch_warnings(record=True) as issued:
            warnings.simplefilter("always")
            with hpp.load(plan, providers=["cuda"]) as model:
                tokens = model.generate("a", max_new=4, temperature=0, ignore_eos=True).tokens
        messages = [str(warning.message) for warning in issued if warning.category is hpp.HppWarning]
        self.assertTrue(any("runs on the CPU" in message for message in messages), messages)
        self.assertTrue(all(warning.filename == __file__ for warning in issued), issued)
        self.assertEqual(tokens, self.model.generate("a", max_new=4, temperature=0, ignore_eos=True).tokens)
        with self.assertRaisesRegex(hpp.HppError, "CUDA"):
            hpp.load(plan, providers=["cuda"], strict=True)

    def test_a_closed_model_says_so(self) -> None:
        model = hpp.load(self.plan)
        model.close()
        model.close()
        with self.assertRaisesRegex(hpp.HppError, "this model is closed"):
            model.generate("a")


class OnPlugin(unittest.TestCase):
    """OpenVINO on the processor, where it can be had (tools/scripts/with-openvino.sh)."""

    def test_a_plug_in_is_named_and_gets_its_options(self) -> None:
        library = os.environ.get("HPP_OPENVINO_LIB")
        if not library:
            return print("SKIPPED: HPP_OPENVINO_LIB is not set", file=sys.stderr)
        # A model of which it takes every operator, so that strict holds.
        plan = hpp.split(MODELS / "torch" / "llama-dynamo-kv", ram="1G", vram=0, out=in_directory() / "plan")
        settings = {"tokens": [5, 6, 7], "max_new": 8, "temperature": 0, "ignore_eos": True}
        with hpp.load(plan) as model:
            expected = model.generate(**settings).tokens
        asked = {"providers": ["openvino", "cpu"], "ep_lib": {"openvino": library}, "strict": True}
        with hpp.load(plan, **asked, ep_option={"openvino.INFERENCE_NUM_THREADS": 1}) as model:
            self.assertEqual(model.generate(**settings).tokens, expected)
        # Options are those of one model, and libraries those of the process.
        with self.assertRaisesRegex(hpp.HppError, "openvino.INFERENCE_NUM_TREADS=1: .*Unsupported property"):
            hpp.load(plan, **asked, ep_option={"openvino.INFERENCE_NUM_TREADS": 1})
        hpp.load(plan, **asked).close()
        with self.assertRaisesRegex(hpp.HppError, "share their providers"):
            hpp.load(plan, ep_lib={"openvino": "/another/libopenvino.so"})


class AnswersOfOneModel(unittest.TestCase):
    """The directory of answers of `hpp.ray.jobs`, without Ray."""

    def test_all_plans_of_a_model_have_its_hash_and_another_model_has_another(self) -> None:
        directory = in_directory()
        whole = hpp.split(LEARNED, ram="1G", vram=0, out=directory / "whole")
        cut = hpp.split(LEARNED, ram="1G", vram="12M", gpu_layers=2, out=directory / "cut")
        self.assertEqual(whole.source.resolve(), (LEARNED / "model.onnx").resolve())
        hashes = {model_hash(path) for path in (LEARNED, LEARNED / "model.onnx", whole, whole.path, cut.path.parent)}
        self.assertEqual(len(hashes), 1)
        self.assertNotIn(model_hash(MODELS / "genai" / "llama3-fp32-cpu"), hashes)

    def test_weights_of_the_same_shape_are_another_model(self) -> None:
        tuned = in_directory() / "tuned"
        shutil.copytree(LEARNED, tuned)
        before = model_hash(tuned)
        with (tuned / "model.onnx.data").open("r+b") as weights:
            weights.write(b"changed")
        self.assertNotEqual(model_hash(tuned), before)

    def test_a_directory_is_refused_for_another_model(self) -> None:
        work = in_directory()
        for _ in range(2):
            claim(work, "a" * 64, "models/first")
        with self.assertRaisesRegex(hpp.HppError, r"answers of another model \(models/first\) than models/second") as caught:
            claim(work, "b" * 64, "models/second")
        self.assertIn("directory of its own", caught.exception.hint or "")
        self.assertEqual([path.name for path in work.iterdir()], ["model-" + "a" * 64])

    def test_answers_of_no_model_are_refused(self) -> None:
        work = in_directory()
        (work / "answers-1.jsonl").write_text('{"id": "x"}\n')
        with self.assertRaisesRegex(hpp.HppError, "do not say of which model") as caught:
            claim(work, "a" * 64, "models/first")
        self.assertIn("model-" + "a" * 64, caught.exception.hint or "")
        (work / ("model-" + "a" * 64)).touch()
        claim(work, "a" * 64, "models/first")


class OnSlowModel(unittest.TestCase):
    """A model whose prompt of thousands of tokens is one pass of seconds."""

    @classmethod
    def setUpClass(cls) -> None:
        plan = hpp.split(os.environ["HPP_TEST_SLOW_MODEL"], ram="4G", vram=0, out=in_directory() / "plan")
        cls.model = hpp.load(plan)
        cls.prompt = [7] * 2500
        started = time.monotonic()
        cls.model.logits(cls.prompt, last=True)
        whole = time.monotonic() - started
        # What ends before three quarters of the pass has not waited for it.
        cls.stop_after, cls.soon = whole / 8, whole * 3 / 4

    @classmethod
    def tearDownClass(cls) -> None:
        cls.model.close()

    def test_cancel_stops_within_a_pass(self) -> None:
        threading.Timer(self.stop_after, self.model.cancel).start()
        started = time.monotonic()
        generated = self.model.generate(tokens=self.prompt, max_new=1)
        self.assertEqual((generated.finish_reason, generated.tokens), ("cancelled", []))
        self.assertLess(time.monotonic() - started, self.soon)
        self.assertIsNone(generated.timings.prefill_tokens_per_second)
        self.assertEqual(len(self.model.generate(tokens=[7, 8], max_new=2, ignore_eos=True).tokens), 2)

    def test_ctrl_c_stops_within_a_pass(self) -> None:
        for work in (
            lambda: self.model.generate(tokens=self.prompt, max_new=1),
            lambda: self.model.logits(self.prompt, last=True),
        ):
            threading.Timer(self.stop_after, os.kill, [os.getpid(), signal.SIGINT]).start()
            started = time.monotonic()
            with self.assertRaises(KeyboardInterrupt):
                work()
            # The next request waits until the pass has stopped.
            self.assertEqual(len(self.model.generate(tokens=[7, 8], max_new=2, ignore_eos=True).tokens), 2)
            self.assertLess(time.monotonic() - started, self.soon)

    def test_a_request_that_waits_is_cancelled_too(self) -> None:
        reasons: list[str] = []

        def ask() -> None:
            reasons.append(self.model.generate(tokens=self.prompt, max_new=1).finish_reason)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(self.stop_after)
        started = time.monotonic()
        self.model.cancel()
        for thread in threads:
            thread.join()
        self.assertEqual(reasons, ["cancelled", "cancelled"])
        self.assertLess(time.monotonic() - started, self.soon)


class InProcessesOfTheirOwn(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.plan = str(hpp.split(LEARNED, ram="1G", vram=0, out=in_directory() / "plan").path)

    def run_python(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **variables}
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)

    def test_the_interpreter_ends_while_a_model_is_open_and_busy(self) -> None:
        script = f"""
import hpp
model = hpp.load({self.plan!r})
stream = model.generate("Vec", ignore_eos=True, stream=True)
print(next(stream) != "")
"""
        done = self.run_python(script)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "True\n", ""))

    def test_the_package_beside_which_it_is_imported_changes_nothing(self) -> None:
        script = f"""
import numpy, onnxruntime, hpp
onnxruntime.InferenceSession({str(LEARNED / "model.onnx")!r})
with hpp.load({self.plan!r}) as model:
    print(model.generate("Vec", max_new=4, temperature=0, ignore_eos=True).tokens)
"""
        with hpp.load(self.plan) as model:
            expected = model.generate("Vec", max_new=4, temperature=0, ignore_eos=True).tokens
        done = self.run_python(script)
        self.assertEqual((done.returncode, done.stdout), (0, f"{expected}\n"), done.stderr)

    def test_without_onnxruntime_the_error_says_how_to_install_it(self) -> None:
        script = f"""
import hpp
try:
    hpp.load({self.plan!r}, ort_lib="/no/such/libonnxruntime.so")
except hpp.HppError as error:
    print(error)
"""
        done = self.run_python(script)
        self.assertIn("ONNX Runtime 1.31 or newer was not found", done.stdout, done.stderr)
        self.assertIn("pip install onnxruntime", done.stdout)

    def test_importing_is_quick_and_opens_no_library(self) -> None:
        script = "import hpp, sys; print('numpy' in sys.modules, 'onnxruntime' in sys.modules)"
        self.assertEqual(self.run_python(script).stdout, "False False\n")

    def test_a_list_of_tokens_is_generated_from_without_importing_numpy(self) -> None:
        script = f"""
import hpp, sys
with hpp.load({self.plan!r}) as model:
    print(len(model.generate(tokens=[1, 2], max_new=2, temperature=0, ignore_eos=True).tokens), 'numpy' in sys.modules)
"""
        done = self.run_python(script)
        self.assertEqual(done.stdout, "2 False\n", done.stderr)


if __name__ == "__main__":
    unittest.main()
