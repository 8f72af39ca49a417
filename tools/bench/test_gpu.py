"""Without a GPU, `gpu.py` reports that and succeeds, with only Python installed; earlier results are kept."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
NO_CUDA = {"library": "/lib/libonnxruntime.so", "version": "1.31.1", "cuda_driver": None,
           "providers": [{"name": "CUDA", "usable": False, "problem": "there is no driver", "version": None, "devices": []}]}


class Folder(tempfile.TemporaryDirectory):
    """A directory for results, with a fake hpp-exec that prints one answer."""

    def __enter__(self):
        self.path = super().__enter__()
        return self

    def run(self, answer, code=0):
        program = os.path.join(self.path, "hpp-exec")
        with open(program, "w", encoding="utf-8") as script:
            script.write(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\nexit {code}\n")
        os.chmod(program, 0o755)
        # -S: only Python's own packages.
        command = [sys.executable, "-S", os.path.join(HERE, "gpu.py"), "--target", self.path]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ, HPP_BENCH_OUT=self.path))


class WithoutAGpu(unittest.TestCase):
    def test_every_row_says_so_and_nothing_failed(self):
        with Folder() as folder:
            done = folder.run(json.dumps(NO_CUDA))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("| not run: no GPU"), 6, done.stdout)
        self.assertIn("there is no driver", done.stdout)

    def test_what_was_measured_before_stays(self):
        kept = {"gpu-exact": [{"measure": "tokens", "ours": "4 of 4", "theirs": "", "result": "", "target": "", "verdict": "held"}]}
        with Folder() as folder:
            with open(os.path.join(folder.path, "results-gpu.json"), "w", encoding="utf-8") as results:
                json.dump(kept, results)
            done = folder.run(json.dumps(NO_CUDA))
        self.assertIn("4 of 4", done.stdout)
        self.assertEqual(done.stdout.count("| not run: no GPU"), 5, done.stdout)

    def test_without_onnx_runtime_it_fails_and_says_what_to_set(self):
        with Folder() as folder:
            done = folder.run("error: ONNX Runtime 1.31 or newer was not found", code=1)
        self.assertEqual(done.returncode, 1)
        self.assertIn("ORT_DYLIB_PATH", done.stderr)


if __name__ == "__main__":
    unittest.main()
