//! Shapes by operator family, with symbols.

use super::{Net, int, ints, output_of, outputs_of, text};
use hpp_schema::DType::{Float16, Float32, Int64};

#[test]
fn broadcasting_is_certain_or_unknown() {
    for (a, b, expected) in [
        ("b, s, 64", "64", "[b, s, 64]"),
        ("b, 1, s", "b, 4, s", "[b, 4, s]"),
        ("b, s", "b, past + s", "[b, ?]"),
        ("s", "?", "[?]"),
        ("?", "7", "[7]"),
        ("past + s", "s + past", "[past + s]"),
        ("s + 2", "t", "[s + 2]"),
        ("", "b", "[b]"),
        ("0", "1", "[0]"),
    ] {
        assert_eq!(output_of("Add", &[(Float32, a), (Float32, b)], &[]), format!("float32{expected}"), "{a} + {b}");
    }
}

#[test]
fn matrix_products() {
    for (a, b, expected) in [
        ("b, s, 64", "64, 128", "[b, s, 128]"),
        ("b, 4, s, 16", "b, 4, 16, past + s", "[b, 4, s, past + s]"),
        ("64", "64, 8", "[8]"),
        ("b, 64", "64", "[b]"),
        ("64", "64", "[]"),
    ] {
        assert_eq!(output_of("MatMul", &[(Float32, a), (Float32, b)], &[]), format!("float32{expected}"));
    }
    let gemm = [(Float32, "64, b"), (Float32, "128, 64"), (Float32, "128")];
    assert_eq!(output_of("Gemm", &gemm, &[("transA", int(1)), ("transB", int(1))]), "float32[b, 128]");
    let einsum = |equation| {
        output_of("Einsum", &[(Float32, "b, s, 4, 16"), (Float32, "b, t, 4, 16")], &[("equation", text(equation))])
    };
    assert_eq!(einsum("bshd,bthd->bhst"), "float32[b, 4, s, t]");
    assert_eq!(einsum("b...d , b ... d -> b..."), "float32[b, ?, 4]");
    assert_eq!(einsum("bshd,bthd"), "float32[s, t]");
    assert_eq!(einsum("bsh,bthd->bs"), "float32?");
}

#[test]
fn axes_are_added_and_removed() {
    let x = (Float32, "b, 1, s");
    for opset in [11, 13] {
        let mut net = Net::new(opset);
        let value = net.input(x.0, x.1);
        let (axes, attribute) = (net.list(&[1]), [("axes", ints(&[1]))]);
        let (up, down) = if opset < 13 {
            (net.node("Unsqueeze", &[value], &attribute), net.node("Squeeze", &[value], &attribute))
        } else {
            (net.node("Unsqueeze", &[value, axes], &[]), net.node("Squeeze", &[value, axes], &[]))
        };
        net.infer();
        assert_eq!((net.fact(up).as_str(), net.fact(down).as_str()), ("float32[b, 1, 1, s]", "float32[b, s]"));
    }
    assert_eq!(output_of("Squeeze", &[x], &[]), "float32?");
    assert_eq!(output_of("Squeeze", &[(Float32, "1, 3, 1")], &[]), "float32[3]");
    assert_eq!(output_of("Unsqueeze", &[x], &[("axes", ints(&[-1, 0]))]), "float32[1, b, 1, s, 1]");
    assert_eq!(output_of("Unsqueeze", &[x], &[("axes", ints(&[9]))]), "float32?");
    assert_eq!(output_of("Transpose", &[x], &[]), "float32[s, 1, b]");
    assert_eq!(output_of("Transpose", &[x], &[("perm", ints(&[0, 2, 1]))]), "float32[b, s, 1]");
    assert_eq!(output_of("Flatten", &[(Float32, "b, s, 4, 2")], &[("axis", int(2))]), "float32[b*s, 8]");
}

#[test]
fn reductions_by_attribute_and_input() {
    let x = (Float32, "b, s, 64");
    assert_eq!(output_of("ReduceMean", &[x], &[("axes", ints(&[-1]))]), "float32[b, s, 1]");
    assert_eq!(output_of("ReduceMean", &[x], &[("axes", ints(&[-1])), ("keepdims", int(0))]), "float32[b, s]");
    assert_eq!(output_of("ReduceMax", &[x], &[("keepdims", int(0))]), "float32[]");
    assert_eq!(output_of("ReduceSum", &[x], &[("noop_with_empty_axes", int(1))]), "float32[b, s, 64]");
    assert_eq!(output_of("ReduceSum", &[x, (Int64, "1")], &[]), "float32[?, ?, ?]");
    assert_eq!(output_of("ArgMax", &[x], &[("axis", int(-1)), ("keepdims", int(0))]), "int64[b, s]");
}

#[test]
fn gathers_and_scatters() {
    assert_eq!(output_of("Gather", &[(Float16, "512, 64"), (Int64, "b, s")], &[]), "float16[b, s, 64]");
    assert_eq!(output_of("Gather", &[(Float16, "b, s, 64"), (Int64, "")], &[("axis", int(1))]), "float16[b, 64]");
    assert_eq!(output_of("GatherElements", &[(Float16, "b, 9"), (Int64, "b, 3")], &[]), "float16[b, 3]");
    assert_eq!(output_of("GatherND", &[(Float16, "b, s, 64"), (Int64, "n, 2")], &[]), "float16[n, 64]");
    let batched = output_of("GatherND", &[(Float16, "b, s, 64"), (Int64, "b, n, 1")], &[("batch_dims", int(1))]);
    assert_eq!(batched, "float16[b, n, 64]");
    let scatter = [(Float32, "b, s"), (Int64, "n, 2"), (Float32, "n")];
    assert_eq!(output_of("ScatterND", &scatter, &[]), "float32[b, s]");
}

#[test]
fn joining_and_splitting() {
    let cache = [(Float16, "b, 2, past, 16"), (Float16, "b, 2, s, 16")];
    assert_eq!(output_of("Concat", &cache, &[("axis", int(-2))]), "float16[b, 2, past + s, 16]");
    assert_eq!(output_of("Concat", &[(Float16, "?, 4"), (Float16, "b, 4")], &[("axis", int(1))]), "float16[b, 8]");
    let parts = |attributes: super::Attributes, n| outputs_of("Split", &[(Float32, "b, 10")], attributes, n);
    assert_eq!(parts(&[("axis", int(1)), ("split", ints(&[2, 8]))], 2), ["float32[b, 2]", "float32[b, 8]"]);
    assert_eq!(parts(&[("axis", int(1))], 2), ["float32[b, 5]", "float32[b, 5]"]);
    assert_eq!(parts(&[("axis", int(1)), ("num_outputs", int(3))], 3)[2], "float32[b, 2]");
    assert_eq!(parts(&[], 2), ["float32[?, 10]", "float32[?, 10]"]);
    assert_eq!(output_of("Pad", &[(Float32, "b, s")], &[("pads", ints(&[0, 1, 0, 2]))]), "float32[b, s + 3]");
}

#[test]
fn convolution_and_pooling() {
    let image = (Float32, "n, 3, 224, w");
    let weight = (Float32, "64, 3, 7, 7");
    let conv = [("strides", ints(&[2, 1])), ("pads", ints(&[3, 3, 3, 3]))];
    assert_eq!(output_of("Conv", &[image, weight], &conv), "float32[n, 64, 112, w]");
    let same = [("auto_pad", text("SAME_UPPER")), ("strides", ints(&[3, 1]))];
    assert_eq!(output_of("Conv", &[image, weight], &same), "float32[n, 64, 75, w]");
    let dilated = [("dilations", ints(&[2, 2]))];
    assert_eq!(output_of("Conv", &[image, weight], &dilated), "float32[n, 64, 212, w - 12]");
    let pool = [("kernel_shape", ints(&[3, 3])), ("strides", ints(&[2, 2])), ("ceil_mode", int(1))];
    assert_eq!(outputs_of("MaxPool", &[image], &pool, 2), ["float32[n, 3, 112, ?]", "int64[n, 3, 112, ?]"]);
    // The last window would begin in the padding: it is not counted.
    let hanging = [("kernel_shape", ints(&[1, 1])), ("strides", ints(&[2, 2])), ("ceil_mode", int(1))];
    assert_eq!(output_of("MaxPool", &[(Float32, "1, 1, 2, 2")], &hanging), "float32[1, 1, 1, 1]");
    assert_eq!(output_of("GlobalAveragePool", &[image], &[]), "float32[n, 3, 1, 1]");
    let transposed = output_of("ConvTranspose", &[image, (Float32, "3, 8, 2, 2")], &[("strides", ints(&[2, 2]))]);
    assert_eq!(transposed, "float32[n, 8, 448, 2*w]");
}

#[test]
fn recurrent_layers() {
    let inputs = [(Float32, "s, b, 10"), (Float32, "2, 80, 10"), (Float32, "2, 80, 20")];
    assert_eq!(
        outputs_of("LSTM", &inputs, &[("hidden_size", int(20))], 3),
        ["float32[s, 2, b, 20]", "float32[2, b, 20]", "float32[2, b, 20]"]
    );
}

#[test]
fn standard_attention() {
    let flat = [(Float16, "b, s, 64"), (Float16, "b, s, 32"), (Float16, "b, s, 32")];
    let heads = [("q_num_heads", int(4)), ("kv_num_heads", int(2))];
    assert_eq!(
        outputs_of("Attention", &flat, &heads, 3),
        ["float16[b, s, 64]", "float16[b, 2, s, 16]", "float16[b, 2, s, 16]"]
    );
    let mut net = Net::new(23);
    let q = net.input(Float16, "b, 4, s, 16");
    let (k, v) = (net.input(Float16, "b, 2, s, 16"), net.input(Float16, "b, 2, s, 8"));
    let (past_k, past_v) = (net.input(Float16, "b, 2, past, 16"), net.input(Float16, "b, 2, past, 8"));
    let outputs = net.many("Attention", &[Some(q), Some(k), Some(v), None, Some(past_k), Some(past_v)], &[], 4);
    net.infer();
    let facts: Vec<String> = outputs.into_iter().map(|id| net.fact(id)).collect();
    assert_eq!(
        facts,
        [
            "float16[b, 4, s, 8]",
            "float16[b, 2, past + s, 16]",
            "float16[b, 2, past + s, 8]",
            "float16[b, 4, s, past + s]"
        ]
    );
}
