"""One measured generation in onnxruntime-genai, after a warm-up: run_genai.py MODEL PROMPT NEW CONTEXT.

Prints decode tokens per second, seconds to the first token, and the memory of the interpreter before it loaded the library.
"""

import json
import sys
import time

import numpy as np


def resident():
    with open("/proc/self/statm", encoding="utf-8") as statm:
        return int(statm.read().split()[1]) * 4096


def generate(og, model, prompt, new, context):
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=context, min_length=context, do_sample=False)
    generator = og.Generator(model, params)
    start = time.monotonic()
    generator.append_tokens(prompt)
    generator.generate_next_token()
    first = time.monotonic()
    for _ in range(new - 1):
        generator.generate_next_token()
    end = time.monotonic()
    return {"ttft": first - start, "decode": (new - 1) / (end - first)}


def main():
    folder, (prompt, new, context) = sys.argv[1], map(int, sys.argv[2:5])
    bare = resident()
    import onnxruntime_genai as og  # pylint: disable=import-outside-toplevel  # after the memory was read

    model = og.Model(folder)
    tokens = (np.arange(prompt, dtype=np.int32) * 7 + 11) % 500 + 3
    generate(og, model, tokens, new, context)
    print(json.dumps(dict(generate(og, model, tokens, new, context), bare_rss=bare)))


main()
