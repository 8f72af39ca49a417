"""Splits a decoder of the GenAI style in the middle with onnx.utils.extract_model. Prints the seconds of the two calls.

The checker is off: it does not know the contrib operators in these models.
"""

import json
import os
import sys
import tempfile
import time

import onnx
import onnx.utils


def main():
    folder, layers = sys.argv[1], int(sys.argv[2])
    path = os.path.join(folder, "model.onnx")
    graph = onnx.load(path, load_external_data=False).graph
    last = layers // 2 - 1
    boundary = [f"/model/layers.{last}/post_attention_layernorm/output_3", f"/model/layers.{last}/mlp/down_proj/MatMul/output_0"]

    def state(values, first, end):
        return [v.name for v in values if v.name.split(".")[0] in ("past_key_values", "present")
                and first <= int(v.name.split(".")[1]) < end]

    halves = [
        (["input_ids", "attention_mask"] + state(graph.input, 0, last + 1), boundary + state(graph.output, 0, last + 1)),
        (boundary + ["attention_mask"] + state(graph.input, last + 1, layers), ["logits"] + state(graph.output, last + 1, layers)),
    ]
    with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as out:
        start = time.monotonic()
        for index, (inputs, outputs) in enumerate(halves):
            onnx.utils.extract_model(path, os.path.join(out, f"{index}.onnx"), inputs, outputs, check_model=False)
        print(json.dumps({"extract_seconds": time.monotonic() - start}))


main()
