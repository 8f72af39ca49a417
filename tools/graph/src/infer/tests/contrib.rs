//! Fused operators of `com.microsoft` in exported language models.

use super::{Net, int, ints, output_of, outputs_of, text};
use hpp_schema::DType::{Float16, Float32, Int8, Int32, Int64, Uint4, Uint8};

#[test]
fn skip_normalization() {
    let inputs = [(Float16, "b, s, 64"), (Float16, "b, s, 64"), (Float16, "64")];
    assert_eq!(
        outputs_of("com.microsoft::SkipSimplifiedLayerNormalization", &inputs, &[], 4),
        ["float16[b, s, 64]", "float32[b, s, 1]", "float32[b, s, 1]", "float16[b, s, 64]"]
    );
}

/// One grouped-query attention: packed or not, with caches or without, growing or windowed.
fn grouped(packed: bool, caches: bool, windowed: bool) -> Vec<String> {
    let mut net = Net::new(21);
    let query = net.input(Float16, if packed { "b, s, 128" } else { "b, s, 64" });
    let key = (!packed).then(|| net.input(Float16, "b, s, 32"));
    let value = (!packed).then(|| net.input(Float16, "b, s, 32"));
    let cache = |net: &mut Net| caches.then(|| net.input(Float16, "b, 2, past, 16"));
    let (past_key, past_value) = (cache(&mut net), cache(&mut net));
    let (lengths, total) = (net.input(Int32, "b"), net.input(Int32, "1"));
    let inputs = [Some(query), key, value, past_key, past_value, Some(lengths), Some(total)];
    let mut attributes = vec![("num_heads", int(4)), ("kv_num_heads", int(2))];
    if windowed {
        attributes.push(("sliding_window_cache", int(1)));
    }
    let outputs = net.many("com.microsoft::GroupQueryAttention", &inputs, &attributes, 3);
    net.infer();
    outputs.into_iter().map(|id| net.fact(id)).collect()
}

#[test]
fn grouped_query_attention() {
    let grown = ["float16[b, s, 64]", "float16[b, 2, past + s, 16]", "float16[b, 2, past + s, 16]"];
    let fresh = ["float16[b, s, 64]", "float16[b, 2, s, 16]", "float16[b, 2, s, 16]"];
    let window = ["float16[b, s, 64]", "float16[b, 2, past, 16]", "float16[b, 2, past, 16]"];
    assert_eq!(grouped(false, true, false), grown);
    assert_eq!(grouped(false, false, false), fresh);
    assert_eq!(grouped(false, true, true), window);
    assert_eq!(grouped(true, false, false), ["float16[b, s, 64]", "float16[b, 2, s, 16]", "float16[b, 2, s, 16]"]);
}

#[test]
fn multi_head_attention() {
    let heads = [("num_heads", int(4))];
    let apart = [(Float32, "b, s, 64"), (Float32, "b, t, 64"), (Float32, "b, t, 32")];
    assert_eq!(
        outputs_of("com.microsoft::MultiHeadAttention", &apart, &heads, 3),
        ["float32[b, s, 32]", "float32[b, 4, t, 16]", "float32[b, 4, t, 8]"]
    );
    let packed = [(Float32, "b, s, 4, 3, 16")];
    assert_eq!(output_of("com.microsoft::MultiHeadAttention", &packed, &heads), "float32[b, s, 64]");
    let projected = [(Float32, "b, s, 64"), (Float32, "64, 192"), (Float32, "192")];
    assert_eq!(
        outputs_of("com.microsoft::Attention", &projected, &heads, 2),
        ["float32[b, s, 64]", "float32[2, b, 4, s, 16]"]
    );
}

#[test]
fn paged_attention() {
    let inputs = [
        (Float16, "tokens, 128"),
        (Float16, "tokens, 32"),
        (Float16, "tokens, 32"),
        (Float16, "blocks, 256, 2, 16"),
        (Float16, "blocks, 256, 2, 16"),
    ];
    let heads = [("num_heads", int(8)), ("kv_num_heads", int(2))];
    assert_eq!(
        outputs_of("com.microsoft::PagedAttention", &inputs, &heads, 3),
        ["float16[tokens, 128]", "float16[blocks, 256, 2, 16]", "float16[blocks, 256, 2, 16]"]
    );
}

#[test]
fn packed_weights() {
    let inputs = [(Float16, "b, s, 64"), (Uint8, "96, 2, 16"), (Float16, "96, 2")];
    let attributes = [("K", int(64)), ("N", int(96)), ("bits", int(4)), ("block_size", int(32))];
    assert_eq!(output_of("com.microsoft::MatMulNBits", &inputs, &attributes), "float16[b, s, 96]");
    let table = |dtype, dims, bits| {
        let inputs = [(dtype, dims), (Int64, "b, s"), (Float16, "512, 2")];
        output_of("com.microsoft::GatherBlockQuantized", &inputs, &[("bits", int(bits)), ("block_size", int(32))])
    };
    assert_eq!(table(Uint8, "512, 32", 4), "float16[b, s, 64]");
    assert_eq!(table(Uint8, "512, 64", 8), "float16[b, s, 64]");
    assert_eq!(table(Uint4, "512, 64", 4), "float16[b, s, 64]");
}

#[test]
fn state_of_hybrid_layers() {
    let conv = [(Float16, "b, 64, s"), (Float16, "64, 1, 4"), (Float16, "64"), (Float16, "b, 64, 3")];
    assert_eq!(
        outputs_of("com.microsoft::CausalConvWithState", &conv, &[], 2),
        ["float16[b, 64, s]", "float16[b, 64, 3]"]
    );
    assert_eq!(
        outputs_of("com.microsoft::CausalConvWithState", &conv[..3], &[("dilation", int(2))], 2),
        ["float16[b, 64, s]", "float16[b, 64, 6]"]
    );
    let heads = [("q_num_heads", int(2)), ("kv_num_heads", int(4))];
    let linear = [(Float16, "b, s, 32"), (Float16, "b, s, 64"), (Float16, "b, s, 128")];
    assert_eq!(
        outputs_of("com.microsoft::LinearAttention", &linear, &heads, 2),
        ["float16[b, s, 128]", "float16[b, 4, 16, 32]"]
    );
}

#[test]
fn fused_products() {
    let inputs = [(Float32, "b, s, 4, 16"), (Float32, "b, t, 4, 16")];
    let batched = [("transBatchA", int(1)), ("transBatchB", int(1)), ("transB", int(1))];
    // [b, s, 4, 16] -> [s, 4, b, 16] on the left, [t, 4, 16, b] on the right.
    assert_eq!(output_of("com.microsoft::FusedMatMul", &inputs, &batched), "float32[?, 4, b, b]");
    let plain = [(Float32, "b, 4, s, 16"), (Float32, "b, 4, t, 16")];
    assert_eq!(output_of("com.microsoft::FusedMatMul", &plain, &[("transB", int(1))]), "float32[b, 4, s, t]");
    assert_eq!(
        output_of("com.microsoft::BiasSplitGelu", &[(Float16, "b, s, 64"), (Float16, "64")], &[]),
        "float16[b, s, 32]"
    );
}

#[test]
fn experts_keep_the_shape() {
    let inputs = [(Float16, "b, s, 64"), (Float16, "t, 8")];
    for op in ["MoE", "QMoE"] {
        assert_eq!(output_of(&format!("com.microsoft::{op}"), &inputs, &[("k", int(2))]), "float16[b, s, 64]");
    }
}

#[test]
fn quantized_fusions() {
    let concat = [(Float32, ""), (Int8, ""), (Int8, "b, 3"), (Float32, ""), (Int8, ""), (Int8, "b, 5")];
    assert_eq!(output_of("com.microsoft::QLinearConcat", &concat, &[("axis", int(1))]), "int8[b, 8]");
    let split = [("qkv_hidden_sizes", ints(&[8, 8, 4])), ("num_heads", int(2)), ("equation", text("unused"))];
    let attention = [(Float32, "b, s, 8"), (Float32, "8, 20")];
    assert_eq!(output_of("com.microsoft::Attention", &attention, &split), "float32[b, s, 4]");
}
