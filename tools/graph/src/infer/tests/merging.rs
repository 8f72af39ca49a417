//! Merging of declarations and inferred facts: declarations stay, gaps are filled, contradictions are reported.

use super::{Net, shape, tensor};
use crate::infer::Disagreement;
use crate::{Graph, ValueId};
use hpp_schema::DType::*;

fn declare(graph: &mut Graph, id: ValueId, dims: &str) {
    graph.values[id.0 as usize].shape = Some(shape(dims));
}

#[test]
fn declarations_stay() {
    let mut net = Net::new(18);
    let x = net.input(Float32, "batch, seq, total, 4");
    let y = net.node("Relu", &[x], &[]);
    declare(&mut net.graph, y, "batch, total, total, 4");
    let report = net.infer();
    assert_eq!(report.disagreements, []);
    assert_eq!(net.fact(y), "float32[batch, total, total, 4]");
}

#[test]
fn contradictions_are_reported_and_the_declaration_kept() {
    let mut net = Net::new(18);
    let x = net.input(Float32, "batch, seq, 4");
    let (rank, size, offset) = (net.node("Relu", &[x], &[]), net.node("Relu", &[x], &[]), net.node("Relu", &[x], &[]));
    declare(&mut net.graph, rank, "batch, seq");
    declare(&mut net.graph, size, "batch, seq, 5");
    declare(&mut net.graph, offset, "batch, seq + 1, 4");
    net.graph.values[size.0 as usize].dtype = Some(Int8);
    let report = net.infer();
    let contradiction =
        |value, dims| Disagreement::Shape { value, declared: shape(dims), inferred: shape("batch, seq, 4") };
    assert_eq!(
        report.disagreements,
        [
            contradiction(rank, "batch, seq"),
            Disagreement::DType { value: size, declared: Int8, inferred: Float32 },
            contradiction(size, "batch, seq, 5"),
            contradiction(offset, "batch, seq + 1, 4"),
        ]
    );
    assert_eq!(net.fact(size), "int8[batch, seq, 5]");
}

#[test]
fn gaps_and_exporter_symbols_are_replaced() {
    let mut net = Net::new(18);
    let x = net.input(Float32, "batch, seq, 4");
    let (y, z) = (net.node("Relu", &[x], &[]), net.node("my.domain::Op", &[x], &[]));
    declare(&mut net.graph, y, "?, unk__7, 4");
    declare(&mut net.graph, z, "unk__7, unk__8");
    net.infer();
    assert_eq!(net.fact(y), "float32[batch, seq, 4]");
    assert_eq!(net.fact(z), "?[seq, unk__8]");
}

#[test]
fn a_symbol_with_two_meanings_stays() {
    let mut net = Net::new(18);
    let x = net.input(Float32, "batch, seq");
    let (a, b) = (net.node("Relu", &[x], &[]), net.node("my.domain::Op", &[x], &[]));
    declare(&mut net.graph, a, "unk, unk");
    declare(&mut net.graph, b, "unk");
    net.infer();
    assert_eq!(net.fact(a), "float32[batch, seq]");
    assert_eq!(net.fact(b), "?[unk]");
}

/// Some exporters declare constant vectors as scalars. The tensor is authoritative.
#[test]
fn the_tensor_of_a_constant_takes_precedence() {
    let mut net = Net::new(18);
    let c = net.node("Constant", &[], &[("value", tensor(Int64, &[1], Some(&[1])))]);
    declare(&mut net.graph, c, "");
    let report = net.infer();
    assert_eq!(report.disagreements.len(), 1);
    assert_eq!(net.fact(c), "int64[1]");
}
