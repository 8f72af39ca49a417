"""Writes a random-weight Llama for llama.cpp: write_gguf.py FILE f32|q4_0 LAYERS [HIDDEN INTERMEDIATE HEADS KV_HEADS].

Without a shape it uses the benchmark's."""

import sys
import typing

import gguf
import numpy as np

VOCAB, CONTEXT = 32000, 4096


class Shape(typing.NamedTuple):
    layers: int
    hidden: int = 1024
    intermediate: int = 2816
    heads: int = 16
    kv_heads: int = 8


def tensors(shape):
    """Names and shapes, [outputs, inputs]."""
    hidden, intermediate = shape.hidden, shape.intermediate
    kv = hidden // shape.heads * shape.kv_heads
    yield "token_embd.weight", (VOCAB, hidden)
    for index in range(shape.layers):
        block = f"blk.{index}"
        yield f"{block}.attn_norm.weight", (hidden,)
        yield f"{block}.attn_q.weight", (hidden, hidden)
        yield f"{block}.attn_k.weight", (kv, hidden)
        yield f"{block}.attn_v.weight", (kv, hidden)
        yield f"{block}.attn_output.weight", (hidden, hidden)
        yield f"{block}.ffn_norm.weight", (hidden,)
        yield f"{block}.ffn_gate.weight", (intermediate, hidden)
        yield f"{block}.ffn_up.weight", (intermediate, hidden)
        yield f"{block}.ffn_down.weight", (hidden, intermediate)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (VOCAB, hidden)


def describe(writer, shape, kind):
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0 if kind == "q4_0" else gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{index:02X}>" if index < 256 else f"t{index}" for index in range(VOCAB)])
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([int(gguf.TokenType.BYTE if index < 256 else gguf.TokenType.NORMAL) for index in range(VOCAB)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def main():
    path, kind, shape = sys.argv[1], sys.argv[2], Shape(*map(int, sys.argv[3:]))
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    describe(writer, shape, kind)
    for name, sizes in tensors(shape):
        if len(sizes) == 1:
            writer.add_tensor(name, np.ones(sizes, np.float32))
            continue
        data = random.standard_normal(sizes, np.float32) / np.sqrt(np.float32(sizes[1]))
        # The embedding stays in float32, as in the ONNX model.
        if kind == "q4_0" and name != "token_embd.weight":
            quantized = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(name, gguf.quants.quantize(data, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
