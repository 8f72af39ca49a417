//! Element types that differ from that of the first input.

use super::{Net, int, output_of, outputs_of, tensor};
use crate::{Attribute, Body};
use DType::*;
use hpp_schema::DType;

#[test]
fn fixed_types() {
    for (op, expected) in [
        ("Shape", "int64[2]"),
        ("Size", "int64[]"),
        ("NonZero", "int64[2, ?]"),
        ("ArgMax", "int64[1, 3]"),
        ("IsNaN", "bool[b, 3]"),
        ("IsInf", "bool[b, 3]"),
    ] {
        assert_eq!(output_of(op, &[(Float16, "b, 3")], &[]), expected, "{op}");
    }
    for op in ["Equal", "Less", "GreaterOrEqual"] {
        assert_eq!(output_of(op, &[(Float16, "b, 3"), (Float16, "3")], &[]), "bool[b, 3]", "{op}");
    }
}

#[test]
fn types_from_attributes() {
    let x = [(Float32, "b")];
    assert_eq!(output_of("Cast", &x, &[("to", int(10))]), "float16[b]");
    assert_eq!(output_of("BitCast", &x, &[("to", int(6))]), "int32[b]");
    assert_eq!(output_of("EyeLike", &[(Float32, "3, 3")], &[("dtype", int(11))]), "float64[3, 3]");
    assert_eq!(output_of("EyeLike", &[(Int32, "3, 3")], &[]), "int32[3, 3]");
    assert_eq!(output_of("RandomNormal", &[], &[("shape", super::ints(&[2, 3]))]), "float32[2, 3]");
    assert_eq!(output_of("RandomNormalLike", &x, &[("dtype", int(16))]), "bfloat16[b]");
    assert_eq!(output_of("Constant", &[], &[("value", tensor(Uint8, &[2, 2], None))]), "uint8[2, 2]");
    assert_eq!(output_of("Constant", &[], &[("value_ints", super::ints(&[4, 5]))]), "int64[2]");
    assert_eq!(output_of("Constant", &[], &[("value_float", Attribute::Float(0.5))]), "float32[]");
    let fill = tensor(Float16, &[1], None);
    assert_eq!(output_of("ConstantOfShape", &[(Int64, "3")], &[("value", fill)]), "float16[?, ?, ?]");
    assert_eq!(output_of("ConstantOfShape", &[(Int64, "1")], &[]), "float32[?]");
}

#[test]
fn types_from_another_input() {
    assert_eq!(output_of("Where", &[(Bool, "b, 1"), (Float16, "b, s"), (Float16, "1")], &[]), "float16[b, s]");
    assert_eq!(output_of("CastLike", &[(Int32, "b"), (Float16, "")], &[]), "float16[b]");
    assert_eq!(output_of("OneHot", &[(Int64, "b"), (Int64, ""), (Float32, "2")], &[]), "float32[b, ?]");
    assert_eq!(output_of("Pow", &[(Float16, "b"), (Float32, "")], &[]), "float16[b]");
    assert_eq!(output_of("RMSNormalization", &[(Float32, "b, 8"), (Float16, "8")], &[]), "float16[b, 8]");
}

#[test]
fn quantization() {
    let x = (Float16, "b, 8");
    assert_eq!(output_of("QuantizeLinear", &[x, (Float16, "")], &[]), "uint8[b, 8]");
    assert_eq!(output_of("QuantizeLinear", &[x, (Float16, ""), (Int4, "")], &[]), "int4[b, 8]");
    assert_eq!(output_of("QuantizeLinear", &[x, (Float16, "")], &[("output_dtype", int(3))]), "int8[b, 8]");
    assert_eq!(output_of("DequantizeLinear", &[(Int4, "8, 8"), (Float16, "8, 1")], &[]), "float16[8, 8]");
    assert_eq!(
        outputs_of("DynamicQuantizeLinear", &[(Float32, "b, 8")], &[], 3),
        ["uint8[b, 8]", "float32[]", "uint8[]"]
    );
    assert_eq!(output_of("MatMulInteger", &[(Uint8, "b, 8"), (Int8, "8, 4")], &[]), "int32[b, 4]");
    let q = [
        (Uint8, "b, 8"),
        (Float32, ""),
        (Uint8, ""),
        (Int8, "8, 4"),
        (Float32, ""),
        (Int8, ""),
        (Float32, ""),
        (Int8, ""),
    ];
    assert_eq!(output_of("QLinearMatMul", &q, &[]), "int8[b, 4]");
}

#[test]
fn secondary_outputs() {
    let x = [(Float16, "b, s, 8"), (Float16, "8"), (Float16, "8")];
    assert_eq!(
        outputs_of("LayerNormalization", &x, &[], 3),
        ["float16[b, s, 8]", "float32[b, s, 1]", "float32[b, s, 1]"]
    );
    assert_eq!(
        outputs_of("LayerNormalization", &x, &[("axis", int(1)), ("stash_type", int(10))], 2),
        ["float16[b, s, 8]", "float16[b, 1, 1]"]
    );
    assert_eq!(outputs_of("Dropout", &[(Float16, "b")], &[], 2), ["float16[b]", "bool[b]"]);
    assert_eq!(outputs_of("TopK", &[(Float32, "b, 9"), (Int64, "1")], &[], 2), ["float32[b, ?]", "int64[b, ?]"]);
    assert_eq!(outputs_of("Unique", &[(Int32, "n")], &[], 2), ["int32[?]", "int64[?]"]);
}

#[test]
fn bodies_determine_types() {
    let body = |types: &[Option<DType>]| {
        Attribute::Body(Body {
            structure: 0,
            output_dtypes: types.to_vec(),
            output_shapes: vec![],
            weight_bytes: 0,
            nodes: 1,
            packed: Default::default(),
        })
    };
    let branches = [("then_branch", body(&[None, Some(Int64)])), ("else_branch", body(&[Some(Float16), None]))];
    assert_eq!(outputs_of("If", &[(Bool, "")], &branches, 2), ["float16?", "int64?"]);

    let repeat = [("body", body(&[Some(Bool), None, Some(Float32)]))];
    let inputs = [(Int64, ""), (Bool, ""), (Int32, "b")];
    assert_eq!(outputs_of("Loop", &inputs, &repeat, 2), ["int32?", "float32?"]);

    let scan = [("body", body(&[None, Some(Float16)])), ("num_scan_inputs", int(1))];
    assert_eq!(outputs_of("Scan", &[(Float32, "8"), (Float16, "s, 8")], &scan, 2), ["float32[8]", "float16?"]);
}

#[test]
fn unknown_operators_have_untyped_outputs() {
    let mut net = Net::new(21);
    let x = net.input(Float32, "b, 4");
    let strange = net.node("my.domain::Add", &[x], &[]);
    let strange_ms = net.node("com.microsoft::NotAnOp", &[x], &[]);
    let sequence = net.node("SplitToSequence", &[x], &[]);
    let after = net.node("Relu", &[strange], &[]);
    let report = net.infer();
    assert_eq!(report.untyped, [strange, strange_ms, sequence, after]);
    let ops: Vec<(&str, usize)> = report.unknown_ops.iter().map(|(op, n)| (op.as_str(), *n)).collect();
    assert_eq!(ops, [("com.microsoft::NotAnOp", 1), ("my.domain::Add", 1)]);
}
