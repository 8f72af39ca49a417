"""One measured generation in llama.cpp, after one that warms it up: run_llama_cpp.py GGUF PROMPT NEW CONTEXT THREADS."""

import json
import sys
import time

from llama_cpp import Llama


def generate(llama, prompt, new):
    llama.reset()
    start = time.monotonic()
    llama.eval(prompt)
    token = llama.sample(temp=0.0)
    first = time.monotonic()
    for _ in range(new - 1):
        llama.eval([token])
        token = llama.sample(temp=0.0)
    return {"ttft": first - start, "decode": (new - 1) / (time.monotonic() - first)}


def main():
    prompt, new, context, threads = map(int, sys.argv[2:6])
    llama = Llama(sys.argv[1], n_ctx=context, n_threads=threads, n_threads_batch=threads, n_batch=prompt, verbose=False)
    tokens = [(index * 7 + 11) % 500 + 3 for index in range(prompt)]
    generate(llama, tokens, new)
    print(json.dumps(generate(llama, tokens, new)))


main()
