"""Asks an installed wheel a question: splits a model, loads the plan and prints the answer.

    python answer.py MODEL
"""

import sys
import tempfile

import hpp


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        plan = hpp.split(model, vram=0, partitions=2, out=f"{directory}/plan")
        # Windows removes no file that is mapped, so the model is closed before the directory goes.
        with hpp.load(plan) as loaded:
            answer = loaded.generate(messages=[{"role": "user", "content": "What is ownership?"}], max_new=48)
    print(answer.text)
    assert "value" in answer.text, answer


if __name__ == "__main__":
    main(sys.argv[1])
