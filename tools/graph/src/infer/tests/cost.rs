//! Operations and weight bytes of nodes, against numbers computed by hand.

use super::{Net, int, text};
use crate::infer::{bytes_read, flops};
use crate::{NodeId, ValueId};
use hpp_schema::DType::*;
use hpp_schema::Symbols;

fn symbols(pairs: &[(&str, u64)]) -> Symbols {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}

/// Operations and weight bytes of the last node.
fn cost(net: &mut Net, pairs: &[(&str, u64)]) -> (Option<u64>, Option<u64>) {
    net.infer();
    let last = NodeId(net.graph.nodes.len() as u32 - 1);
    let symbols = symbols(pairs);
    (flops(&net.graph, last, &symbols), bytes_read(&net.graph, last, &symbols))
}

const STEP: &[(&str, u64)] = &[("b", 2), ("s", 3), ("past", 5)];

#[test]
fn products() {
    let mut net = Net::new(21);
    let (x, w) = (net.input(Float16, "b, s, 64"), net.weight(Float16, &[64, 100]));
    net.node("MatMul", &[x, w], &[]);
    assert_eq!(cost(&mut net, STEP), (Some(2 * 6 * 64 * 100), Some(2 * 64 * 100)));
    assert_eq!(cost(&mut net, &[("b", 2)]).0, None);

    let (packed, scales) = (net.weight(Uint8, &[100, 2, 16]), net.weight(Float16, &[100, 2]));
    net.node("com.microsoft::MatMulNBits", &[x, packed, scales], &[("K", int(64)), ("N", int(100))]);
    assert_eq!(cost(&mut net, STEP), (Some(2 * 6 * 64 * 100), Some(3200 + 400)));

    let (a, b) = (net.input(Float32, "b, s, 4, 16"), net.input(Float32, "b, 7, 4, 16"));
    net.node("Einsum", &[a, b], &[("equation", text("bshd,bthd->bhst"))]);
    assert_eq!(cost(&mut net, STEP), (Some(2 * 2 * 3 * 7 * 4 * 16), Some(0)));
}

#[test]
fn convolution() {
    let mut net = Net::new(21);
    let (x, w) = (net.input(Float32, "b, 4, 8, 8"), net.weight(Float32, &[6, 2, 3, 3]));
    net.node("Conv", &[x, w], &[("group", int(2))]);
    assert_eq!(cost(&mut net, STEP), (Some(2 * (2 * 6 * 6 * 6) * (2 * 9)), Some(4 * 108)));
}

/// A gather counts rows, not the table. A table that is read twice counts once.
#[test]
fn gathers_read_rows() {
    let mut net = Net::new(21);
    let (table, ids) = (net.weight(Float16, &[1000, 64]), net.input(Int64, "b, s"));
    net.node("Gather", &[table, ids], &[]);
    assert_eq!(cost(&mut net, STEP), (Some(0), Some(6 * 128)));
    assert_eq!(cost(&mut net, &[("b", 100), ("s", 100)]).1, Some(128_000));
    net.node("Mul", &[table, table], &[]);
    assert_eq!(cost(&mut net, STEP), (Some(64_000), Some(128_000)));
}

fn grouped(net: &mut Net, attributes: super::Attributes) -> Vec<ValueId> {
    let (q, k) = (net.input(Float32, "b, s, 64"), net.input(Float32, "b, s, 32"));
    let past = net.input(Float32, "b, 2, past, 16");
    let (lengths, total) = (net.input(Int32, "b"), net.input(Int32, ""));
    let caches = net.weight(Float32, &[100, 8]);
    let inputs = [q, k, k, past, past, lengths, total, caches, caches].map(Some);
    net.many("com.microsoft::GroupQueryAttention", &inputs, attributes, 3)
}

#[test]
fn attention_counts_the_total_length() {
    let heads = [("num_heads", int(4)), ("kv_num_heads", int(2))];
    let mut net = Net::new(21);
    grouped(&mut net, &heads);
    assert_eq!(cost(&mut net, STEP), (Some(2 * (2 * 4 * 3) * 8 * 32), Some(6 * 32)));
    let window = [heads.as_slice(), &[("local_window_size", int(4))]].concat();
    let mut net = Net::new(21);
    grouped(&mut net, &window);
    assert_eq!(cost(&mut net, STEP).0, Some(2 * (2 * 4 * 3) * 4 * 32));
}

/// A declared length of `present` takes precedence, so that a buffer of fixed capacity is counted by its current length.
#[test]
fn attention_follows_the_declared_present() {
    let mut net = Net::new(21);
    let outputs = grouped(&mut net, &[("num_heads", int(4)), ("kv_num_heads", int(2))]);
    net.input(Int64, "b, total");
    net.graph.values[outputs[1].0 as usize].shape = Some(super::shape("b, 2, total, 16"));
    let step = [STEP, &[("total", 6)]].concat();
    assert_eq!(cost(&mut net, &step).0, Some(2 * (2 * 4 * 3) * 6 * 32));
}

/// Two of eight experts per token: six tokens may use all experts, one token uses a quarter.
#[test]
fn experts_by_k() {
    let mut net = Net::new(21);
    let (x, router) = (net.input(Float32, "b, s, 64"), net.input(Float32, "n, 8"));
    let (up, down) = (net.weight(Uint8, &[8, 96, 32]), net.weight(Uint8, &[8, 64, 48]));
    let inputs = [Some(x), Some(router), Some(up), None, None, Some(down)];
    net.many("com.microsoft::QMoE", &inputs, &[("k", int(2)), ("expert_weight_bits", int(4))], 1);
    let expert = 96 * 64 + 64 * 96;
    assert_eq!(cost(&mut net, STEP), (Some(2 * 6 * 2 * expert), Some(8 * expert / 2)));
    assert_eq!(cost(&mut net, &[("b", 1), ("s", 1)]), (Some(2 * 2 * expert), Some(2 * expert / 2)));
}

/// A byte of 8-bit weights is one element: as many operations as in 4 bits, and twice the bytes.
#[test]
fn experts_of_8_bits() {
    let mut net = Net::new(21);
    let (x, router) = (net.input(Float32, "b, s, 64"), net.input(Float32, "n, 8"));
    let (up, down) = (net.weight(Uint8, &[8, 96, 64]), net.weight(Uint8, &[8, 64, 96]));
    let inputs = [Some(x), Some(router), Some(up), None, None, Some(down)];
    net.many("com.microsoft::QMoE", &inputs, &[("k", int(2)), ("expert_weight_bits", int(8))], 1);
    let expert = 96 * 64 + 64 * 96;
    assert_eq!(cost(&mut net, &[("b", 1), ("s", 1)]), (Some(2 * 2 * expert), Some(2 * expert)));
}

#[test]
fn data_movement_is_free_and_unknown_operators_have_no_cost() {
    let mut net = Net::new(21);
    let x = net.input(Float32, "b, s, 64");
    net.node("Transpose", &[x], &[]);
    assert_eq!(cost(&mut net, STEP).0, Some(0));
    net.node("ReduceSum", &[x], &[]);
    assert_eq!(cost(&mut net, STEP).0, Some(384));
    net.node("my.domain::Op", &[x], &[]);
    assert_eq!(cost(&mut net, STEP), (None, Some(0)));
}
