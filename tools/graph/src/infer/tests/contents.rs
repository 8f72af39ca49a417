//! Elements of small integer tensors, tracked so that reshapes and expansions keep symbols.

use super::{Net, int, tensor};
use crate::ValueId;
use hpp_schema::DType::*;

/// Adds `Shape(x)[at]` as a vector of one element, in the form that exporters use.
fn size_of(net: &mut Net, x: ValueId, at: i64) -> ValueId {
    let shape = net.node("Shape", &[x], &[]);
    let (index, axes) = (net.scalar(at), net.list(&[0]));
    let size = net.node("Gather", &[shape, index], &[]);
    net.node("Unsqueeze", &[size, axes], &[])
}

#[test]
fn reshape_to_heads_and_back() {
    let mut net = Net::new(18);
    let x = net.input(Float32, "batch, seq, 64");
    let (b, s) = (size_of(&mut net, x, 0), size_of(&mut net, x, 1));
    let (heads, width, rest) = (net.list(&[4]), net.list(&[16]), net.list(&[-1]));
    let split = net.node("Concat", &[b, s, heads, width], &[("axis", int(0))]);
    let split = net.node("Reshape", &[x, split], &[]);
    let turned = net.node("Transpose", &[split], &[("perm", super::ints(&[0, 2, 1, 3]))]);
    let merged = net.node("Concat", &[b, s, rest], &[("axis", int(0))]);
    let merged = net.node("Reshape", &[split, merged], &[]);
    let zeros = net.list(&[0, 0, -1]);
    let copied = net.node("Reshape", &[split, zeros], &[]);
    net.infer();
    assert_eq!(net.fact(turned), "float32[batch, 4, seq, 16]");
    assert_eq!(net.fact(merged), "float32[batch, seq, 64]");
    assert_eq!(net.fact(copied), "float32[batch, seq, 64]");
}

#[test]
fn one_unknown_reshape_size_follows_from_the_others() {
    let mut net = Net::new(18);
    let x = net.input(Float32, "batch, past + seq, 8, 16");
    let (b, free) = (size_of(&mut net, x, 0), net.input(Int64, "1"));
    let width = net.list(&[128]);
    let target = net.node("Concat", &[b, free, width], &[("axis", int(0))]);
    let one_free = net.node("Reshape", &[x, target], &[]);
    let target = net.node("Concat", &[free, free, width], &[("axis", int(0))]);
    let two_free = net.node("Reshape", &[x, target], &[]);
    net.infer();
    assert_eq!(net.fact(one_free), "float32[batch, past + seq, 128]");
    assert_eq!(net.fact(two_free), "float32[?, ?, 128]");
}

/// PyTorch's `expand(-1, ..)` becomes `Where(shape == -1, ones, shape)`.
#[test]
fn expand_with_minus_one() {
    let mut net = Net::new(18);
    let mask = net.input(Bool, "batch, 1, 1, past + seq");
    let x = net.input(Float32, "batch, seq, 64");
    let (b, s) = (size_of(&mut net, x, 0), size_of(&mut net, x, 1));
    let (one, minus) = (net.list(&[1]), net.list(&[-1]));
    let target = net.node("Concat", &[b, one, s, minus], &[("axis", int(0))]);
    let rank = net.node("Shape", &[target], &[]);
    let ones = net.node("ConstantOfShape", &[rank], &[("value", tensor(Int64, &[1], Some(&[1])))]);
    let minus_ones = net.node("Mul", &[ones, minus], &[]);
    let unset = net.node("Equal", &[target, minus_ones], &[]);
    let target = net.node("Where", &[unset, ones, target], &[]);
    let expanded = net.node("Expand", &[mask, target], &[]);
    net.infer();
    assert_eq!(net.fact(expanded), "bool[batch, 1, seq, past + seq]");
}

#[test]
fn positions_from_lengths() {
    let mut net = Net::new(18);
    let (cache, x) = (net.input(Float32, "b, 2, past, 16"), net.input(Float32, "b, seq, 64"));
    let (past, seq) = (size_of(&mut net, cache, 2), size_of(&mut net, x, 1));
    let axes = net.list(&[0]);
    let past = net.node("Squeeze", &[past, axes], &[]);
    let seq = net.node("Squeeze", &[seq, axes], &[]);
    let total = net.node("Add", &[past, seq], &[]);
    let one = net.scalar(1);
    let positions = net.node("Range", &[past, total, one], &[]);
    let all = net.node("Cast", &[total], &[("to", int(6))]);
    let all = net.node("Unsqueeze", &[all, axes], &[]);
    let filled = net.node("ConstantOfShape", &[all], &[]);
    net.infer();
    assert_eq!(net.fact(positions), "int64[seq]");
    assert_eq!(net.fact(filled), "float32[past + seq]");
}

#[test]
fn slices_with_symbolic_bounds() {
    let mut net = Net::new(18);
    let table = net.input(Float32, "1, 1, 1024, 1024");
    let (q, k) = (net.input(Float32, "b, seq, 64"), net.input(Float32, "b, past + seq, 64"));
    let (queries, keys) = (size_of(&mut net, q, 1), size_of(&mut net, k, 1));
    let start = net.node("Sub", &[keys, queries], &[]);
    let (axis2, axis3, zero) = (net.list(&[2]), net.list(&[3]), net.list(&[0]));
    let rows = net.node("Slice", &[table, start, keys, axis2], &[]);
    let window = net.node("Slice", &[rows, zero, keys, axis3], &[]);
    net.infer();
    assert_eq!(net.fact(window), "float32[1, 1, seq, past + seq]");
}

#[test]
fn slices_with_constant_bounds() {
    for (dims, start, end, step, expected) in [
        ("s", 0, i64::MAX, 1, "[s]"),
        ("s", -1, i64::MAX, 1, "[1]"),
        ("s", 0, 1, 1, "[1]"),
        ("s", 0, 5, 1, "[?]"),
        ("s + 8", 0, 5, 1, "[5]"),
        ("s + 8", 0, -3, 1, "[s + 5]"),
        ("s", -5, i64::MAX, 1, "[?]"),
        ("2*s", 0, i64::MAX, 2, "[s]"),
        ("s", 0, i64::MAX, 2, "[?]"),
        ("10", -3, 100, 1, "[3]"),
        ("10", 8, 2, 1, "[0]"),
        ("10", -1, i64::MIN, -1, "[10]"),
        ("10", 7, 2, -2, "[3]"),
        ("s", -1, i64::MIN, -1, "[s]"),
    ] {
        let mut net = Net::new(18);
        let x = net.input(Float32, dims);
        let (start_v, end_v, axes, step_v) = (net.list(&[start]), net.list(&[end]), net.list(&[0]), net.list(&[step]));
        let cut = net.node("Slice", &[x, start_v, end_v, axes, step_v], &[]);
        net.infer();
        assert_eq!(net.fact(cut), format!("float32{expected}"), "{dims}[{start}:{end}:{step}]");
    }
}

#[test]
fn arithmetic_on_sizes() {
    let mut net = Net::new(18);
    let x = net.input(Float32, "batch, seq, 64");
    let shape = net.node("Shape", &[x], &[("start", int(1))]);
    let both = net.node("ReduceProd", &[shape], &[]);
    let half = net.list(&[2]);
    let halves = net.node("Div", &[both, half], &[]);
    let filled = net.node("ConstantOfShape", &[halves], &[]);
    let count = net.node("Size", &[x], &[]);
    let axes = net.list(&[0]);
    let count = net.node("Unsqueeze", &[count, axes], &[]);
    let all = net.node("ConstantOfShape", &[count], &[]);
    net.infer();
    assert_eq!(net.fact(filled), "float32[32*seq]");
    assert_eq!(net.fact(all), "float32[64*batch*seq]");
}

/// Elements can be queried after inference, for a caller that feeds small tensors itself.
#[test]
fn contents_are_available_after_inference() {
    let mut net = Net::new(18);
    let x = net.input(Float32, "batch, past + seq, 64");
    let unknown = net.input(Int64, "2");
    let length = size_of(&mut net, x, 1);
    let minus = net.list(&[-1]);
    let target = net.node("Concat", &[length, minus, unknown], &[("axis", int(0))]);
    let floats = net.node("Cast", &[x], &[("to", int(10))]);
    net.infer();
    let contents = crate::infer::contents(&net.graph);
    let shown = |id: ValueId| contents[id.0 as usize].as_ref().map(|elements| format!("{elements:?}"));
    assert_eq!(shown(length).as_deref(), Some("[past + seq]"));
    assert_eq!(shown(target).as_deref(), Some("[past + seq, -1, ?, ?]"));
    assert_eq!((shown(unknown), shown(floats)), (None, None));
}
