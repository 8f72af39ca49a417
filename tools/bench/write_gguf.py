"""Writes a random-weight Llama of the benchmark's shape for llama.cpp: write_gguf.py FILE LAYERS f32|q4_0."""

import sys

import gguf
import numpy as np

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB, CONTEXT = 1024, 2816, 16, 8, 32000, 4096


def tensors(layers):
    """Names and shapes, [outputs, inputs]."""
    kv = HIDDEN // HEADS * KV_HEADS
    yield "token_embd.weight", (VOCAB, HIDDEN)
    for index in range(layers):
        block = f"blk.{index}"
        yield f"{block}.attn_norm.weight", (HIDDEN,)
        yield f"{block}.attn_q.weight", (HIDDEN, HIDDEN)
        yield f"{block}.attn_k.weight", (kv, HIDDEN)
        yield f"{block}.attn_v.weight", (kv, HIDDEN)
        yield f"{block}.attn_output.weight", (HIDDEN, HIDDEN)
        yield f"{block}.ffn_norm.weight", (HIDDEN,)
        yield f"{block}.ffn_gate.weight", (INTERMEDIATE, HIDDEN)
        yield f"{block}.ffn_up.weight", (INTERMEDIATE, HIDDEN)
        yield f"{block}.ffn_down.weight", (HIDDEN, INTERMEDIATE)
    yield "output_norm.weight", (HIDDEN,)
    yield "output.weight", (VOCAB, HIDDEN)


def describe(writer, layers, kind):
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
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
    path, layers, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    describe(writer, layers, kind)
    for name, shape in tensors(layers):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        data = random.standard_normal(shape, np.float32) / np.sqrt(np.float32(shape[1]))
        # The embedding stays in float32, as in the ONNX model.
        if kind == "q4_0" and name != "token_embd.weight":
            quantised = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(name, gguf.quants.quantize(data, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
