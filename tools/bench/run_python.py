"""The first generation of a loaded plan by the module hpp: run_python.py PLAN PROMPT NEW THREADS.

Prints decoded tokens per second: the tokens after the first over the time until `generate` has returned, so Python's own work counts.
"""

import json
import sys
import time

import hpp


def main():
    plan, (prompt, new, threads) = sys.argv[1], map(int, sys.argv[2:5])
    tokens = [(7 * at + 11) % 500 + 3 for at in range(prompt)]
    with hpp.load(plan, threads=threads) as model:
        start = time.monotonic()
        generated = model.generate(tokens=tokens, max_new=new, temperature=0, ignore_eos=True)
        seconds = time.monotonic() - start
        first = generated.timings.time_to_first_token_ms / 1000
        print(json.dumps({"decode": (new - 1) / (seconds - first)}))


main()
