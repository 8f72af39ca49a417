"""Writes a decoder with random weights for llama.cpp: write_gguf.py FILE and the options of `hpp-fixtures llama`.

int4 becomes q4_0, with the fixtures' distribution of levels. A mixture becomes a gpt-oss, whose experts compute what the fixtures' do, with
attention that has neither sinks nor windows."""

import argparse

import gguf
import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType

BLOCK = gguf.GGML_QUANT_SIZES[GGMLQuantizationType.Q4_0][0]
# The standard deviation of uniform levels from -8 to 7.
LEVELS = np.sqrt((16**2 - 1) / 12)
# A sink so low that it takes no share of a softmax.
NO_SINK = -1e30


def options():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("file")
    arguments.add_argument("--dtype", choices=("fp32", "int4"), required=True)
    for name in ("layers", "hidden", "intermediate", "heads", "kv-heads", "vocab", "context"):
        arguments.add_argument(f"--{name}", type=int, required=True)
    arguments.add_argument("--experts", type=int)
    arguments.add_argument("--top-k", type=int, default=2)
    arguments.add_argument("--router-skew", type=float, default=0.0)
    return arguments.parse_args()


def matrices(shape):
    """Names and shapes of the matrices, [outputs, inputs], for mixtures [experts, outputs, inputs]."""
    hidden, intermediate = shape.hidden, shape.intermediate
    kv = hidden // shape.heads * shape.kv_heads
    # The embedding stays in float32, as in the ONNX model.
    yield "token_embd.weight", (shape.vocab, hidden)
    for block in blocks(shape):
        yield f"{block}.attn_q.weight", (hidden, hidden)
        yield f"{block}.attn_k.weight", (kv, hidden)
        yield f"{block}.attn_v.weight", (kv, hidden)
        yield f"{block}.attn_output.weight", (hidden, hidden)
        many, kind = ((shape.experts,), "_exps") if shape.experts else ((), "")
        yield f"{block}.ffn_gate{kind}.weight", (*many, intermediate, hidden)
        yield f"{block}.ffn_up{kind}.weight", (*many, intermediate, hidden)
        yield f"{block}.ffn_down{kind}.weight", (*many, hidden, intermediate)
        if shape.experts:
            yield f"{block}.ffn_gate_inp.weight", (shape.experts, hidden)
    yield "output.weight", (shape.vocab, hidden)


def vectors(shape, random):
    """Names and contents of the small tensors, in float32."""
    hidden, intermediate = shape.hidden, shape.intermediate
    for block in blocks(shape):
        yield f"{block}.attn_norm.weight", np.ones(hidden)
        if not shape.experts:
            yield f"{block}.ffn_norm.weight", np.ones(hidden)
            continue
        yield f"{block}.post_attention_norm.weight", np.ones(hidden)
        yield f"{block}.attn_sinks.weight", np.full(shape.heads, NO_SINK)
        yield f"{block}.attn_output.bias", np.zeros(hidden)
        yield f"{block}.ffn_gate_inp.bias", shape.router_skew * random.standard_normal(shape.experts)
        for which, width in (("gate", intermediate), ("up", intermediate), ("down", hidden)):
            yield f"{block}.ffn_{which}_exps.bias", np.zeros((shape.experts, width))
    yield "output_norm.weight", np.ones(hidden)


def blocks(shape):
    return (f"blk.{index}" for index in range(shape.layers))


def is_quantized(shape, name):
    return shape.dtype == "int4" and name != "token_embd.weight"


def random_matrix(shape, name, sizes, random):
    """Random weights, scaled so that a sum of products has the variance of one."""
    deviation = 1 / np.sqrt(np.float32(sizes[-1]))
    if not is_quantized(shape, name):
        return random.standard_normal(sizes, np.float32) * deviation
    # A block is a scale and one byte for two levels.
    packed = np.empty((np.prod(sizes) // BLOCK, 2 + BLOCK // 2), np.uint8)
    packed[:, :2] = np.frombuffer(np.float16(deviation / LEVELS).tobytes(), np.uint8)
    packed[:, 2:] = random.integers(0, 256, (len(packed), BLOCK // 2), np.uint8)
    return packed


def describe(writer, shape):
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_layer_norm_rms_eps(1e-6)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.top_k)
        writer.add_expert_feed_forward_length(shape.intermediate)
        writer.add_sliding_window(shape.context)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_0 if shape.dtype == "int4" else LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{index:02X}>" if index < 256 else f"t{index}" for index in range(shape.vocab)])
    writer.add_token_scores([0.0] * shape.vocab)
    kinds = [gguf.TokenType.BYTE if index < 256 else gguf.TokenType.NORMAL for index in range(shape.vocab)]
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def declare(writer, shape, name, sizes):
    """Announces a matrix, whose contents are written later: all of them together may not fit into memory."""
    if is_quantized(shape, name):
        row_bytes = sizes[-1] // BLOCK * (2 + BLOCK // 2)
        packed = (*sizes[:-1], row_bytes)
        writer.add_tensor_info(name, packed, np.dtype(np.uint8), int(np.prod(packed)), raw_dtype=GGMLQuantizationType.Q4_0)
    else:
        writer.add_tensor_info(name, sizes, np.dtype(np.float32), int(np.prod(sizes)) * 4)


def main():
    shape = options()
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(shape.file, "gpt-oss" if shape.experts else "llama")
    describe(writer, shape)
    small = [(name, contents.astype(np.float32)) for name, contents in vectors(shape, random)]
    for name, contents in small:
        writer.add_tensor_info(name, contents.shape, contents.dtype, contents.nbytes)
    for name, sizes in matrices(shape):
        declare(writer, shape, name, sizes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, contents in small:
        writer.write_tensor_data(contents)
    for name, sizes in matrices(shape):
        writer.write_tensor_data(random_matrix(shape, name, sizes, random))
    writer.close()


main()
