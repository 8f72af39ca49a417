"""One measured generation in llama.cpp, after a warm-up: run_llama_cpp.py GGUF PROMPT NEW CONTEXT THREADS [mapped].

`mapped` leaves weights in the layout of their file; llama.cpp would otherwise repack all 4-bit ones in memory."""

import json
import sys
import time

import llama_cpp.llama_cpp
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


def leave_mapped():
    default = llama_cpp.llama_cpp.llama_model_default_params

    def params():
        found = default()
        found.use_extra_bufts = False
        return found

    llama_cpp.llama_cpp.llama_model_default_params = params


def main():
    if sys.argv[6:] == ["mapped"]:
        leave_mapped()
    prompt, new, context, threads = map(int, sys.argv[2:6])
    llama = Llama(sys.argv[1], n_ctx=context, n_threads=threads, n_threads_batch=threads, n_batch=prompt, verbose=False)
    tokens = [(index * 7 + 11) % 500 + 3 for index in range(prompt)]
    generate(llama, tokens, new)
    print(json.dumps(generate(llama, tokens, new)))


main()
