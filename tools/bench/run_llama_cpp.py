"""One measured generation in llama.cpp, after a warm-up, or of several sequences in one batch. Prints the result as JSON.

    run_llama_cpp.py GGUF --threads N --prompt N --new N --context N [--drawn] [--mapped]
    run_llama_cpp.py GGUF --threads N --batch PROMPTS.jsonl --context N [--mapped]

`--mapped` leaves weights in the layout of their file; llama.cpp would otherwise repack all 4-bit ones in memory. `--drawn` draws each token at
temperature 5, since greedy answers of random models repeat themselves. `--batch` answers the prompts of a job file (`hpp-exec jobs`) together."""

import argparse
import json
import time

import llama_cpp.llama_cpp as low
from llama_cpp import Llama


def options():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("gguf")
    for name in ("threads", "prompt", "new", "context"):
        arguments.add_argument(f"--{name}", type=int)
    arguments.add_argument("--drawn", action="store_true")
    arguments.add_argument("--mapped", action="store_true")
    arguments.add_argument("--batch")
    return arguments.parse_args()


def generate(llama, prompt, new, drawn):
    choice = {"temp": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} if drawn else {"temp": 0.0}
    llama.reset()
    start = time.monotonic()
    llama.eval(prompt)
    token = llama.sample(**choice)
    first = time.monotonic()
    for _ in range(new - 1):
        llama.eval([token])
        token = llama.sample(**choice)
    return {"ttft": first - start, "decode": (new - 1) / (time.monotonic() - first)}


def one(asked):
    llama = Llama(asked.gguf, n_ctx=asked.context, n_threads=asked.threads, n_threads_batch=asked.threads, n_batch=asked.prompt, seed=1,
                  verbose=False)
    tokens = [(index * 7 + 11) % 500 + 3 for index in range(asked.prompt)]
    generate(llama, tokens, asked.new, asked.drawn)
    return generate(llama, tokens, asked.new, asked.drawn)


def leave_mapped():
    default = low.llama_model_default_params

    def params():
        found = default()
        found.use_extra_bufts = False
        return found

    low.llama_model_default_params = params


class Batch:
    """Sequences of one context, whose next tokens are rows of one batch."""

    def __init__(self, asked, count, tokens):
        """Room for `count` sequences of `asked.context` tokens, and for `tokens` tokens in one batch."""
        # llama.cpp keeps the pointer, not the function.
        self.quiet = low.llama_log_callback(lambda *_: None)
        low.llama_log_set(self.quiet, None)
        self.model = low.llama_model_load_from_file(asked.gguf.encode(), low.llama_model_default_params())
        settings = low.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.n_outputs_max = asked.context * count, count, count
        settings.n_batch = settings.n_ubatch = tokens
        settings.n_threads = settings.n_threads_batch = asked.threads
        # Prompts of different lengths are then one pass over the weights; with a cache for each sequence they are several.
        settings.kv_unified = True
        self.context = low.llama_init_from_model(self.model, settings)
        self.batch = low.llama_batch_init(tokens, 0, 1)
        self.greedy = low.llama_sampler_init_greedy()

    def run(self, inputs):
        """Feeds each sequence its tokens, `(sequence, first position, tokens)`; returns the most likely next token of each."""
        batch, last = self.batch, []
        batch.n_tokens = 0
        for sequence, position, tokens in inputs:
            for offset, token in enumerate(tokens):
                at = batch.n_tokens
                batch.token[at], batch.pos[at] = token, position + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = offset + 1 == len(tokens)
                batch.n_tokens += 1
            last.append(batch.n_tokens - 1)
        failed = low.llama_decode(self.context, batch)
        if failed:
            raise SystemExit(f"llama_decode returned {failed}")
        return [low.llama_sampler_sample(self.greedy, self.context, row) for row in last]

    def forget(self):
        low.llama_memory_clear(low.llama_get_memory(self.context), True)


def together(asked):
    """Tokens per second of all prompts together, prompts included and loading excluded."""
    with open(asked.batch, encoding="utf-8") as lines:
        jobs = [json.loads(line) for line in lines]
    prompts, new = [job["tokens"] for job in jobs], jobs[0]["max_new"]
    batch = Batch(asked, len(prompts), sum(map(len, prompts)))
    # One pass over the weights is part of loading, as in hpp-exec.
    batch.run([(0, 0, prompts[0])])
    batch.forget()
    start = time.monotonic()
    next_tokens = batch.run([(sequence, 0, tokens) for sequence, tokens in enumerate(prompts)])
    for step in range(new - 1):
        next_tokens = batch.run([(sequence, len(prompts[sequence]) + step, [token]) for sequence, token in enumerate(next_tokens)])
    return {"tokens_per_second": len(prompts) * new / (time.monotonic() - start)}


def main():
    asked = options()
    if asked.mapped:
        leave_mapped()
    print(json.dumps(together(asked) if asked.batch else one(asked)))


main()
