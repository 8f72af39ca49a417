//! Which products a ReLU switches off in part, and how their matrices are stored.

mod build;

use build::Build;
use hpp_graph::{Block, BlockKind, ClassId, Graph, NeuronLayout, NodeId, ReluProduct};
use hpp_schema::DType;

/// All nodes of a graph as one block.
fn found(graph: &Graph) -> Vec<ReluProduct> {
    let nodes = (0..graph.nodes.len()).map(|id| NodeId(id as u32)).collect();
    let kind = BlockKind::Layer(0);
    let block = Block {
        label: "all".into(),
        kind,
        nodes,
        states: vec![],
        weights: vec![],
        class: ClassId(0),
        is_experts: false,
        shard: None,
    };
    ReluProduct::of(graph, &block)
}

/// A network of 64 neurons: the up projection, these operators and the down projection of this kind.
fn network(inner: impl Fn(&mut Build) -> &'static str, down: impl Fn(&mut Build, &str)) -> Graph {
    let mut b = Build::default();
    b.input("x", DType::Float32, "batch, sequence, 8");
    b.weight("up", "8, 64");
    b.node("MatMul", &["x", "up"], &["u"]);
    let hidden = inner(&mut b);
    down(&mut b, hidden);
    b.output("y");
    b.graph
}

fn relu(b: &mut Build) -> &'static str {
    b.node("Relu", &["u"], &["h"]);
    "h"
}

fn by_rows(b: &mut Build, hidden: &str) {
    b.weight("down", "64, 8");
    b.node("MatMul", &[hidden, "down"], &["y"]);
}

#[test]
fn a_matrix_after_a_relu_has_rows_or_columns_of_neurons() {
    let layout = |graph: &Graph| {
        let [found] = found(graph)[..] else { panic!("{:?}", found(graph)) };
        assert_eq!((found.neurons, found.bytes, found.row_bytes()), (64, 64 * 8 * 4, 32));
        assert_eq!(graph.value(found.weight).name, "down");
        found.layout
    };
    assert_eq!(layout(&network(relu, by_rows)), NeuronLayout::Rows);
    let gemm = |dims: &'static str, transposed: i64| {
        network(relu, move |b, hidden| {
            b.weight("down", dims);
            b.node_with("Gemm", &[hidden, "down"], &["y"], &[("transB", transposed)]);
        })
    };
    assert_eq!(layout(&gemm("64, 8", 0)), NeuronLayout::Rows);
    assert_eq!(layout(&gemm("8, 64", 1)), NeuronLayout::Columns);
    // A transposition turns one into the other, conversions change nothing.
    let transposed = network(relu, |b, hidden| {
        b.weight("down", "8, 64");
        b.node("Transpose", &["down"], &["turned"]);
        b.node("Cast", &["turned"], &["wide"]);
        b.node("MatMul", &[hidden, "wide"], &["y"]);
    });
    assert_eq!(layout(&transposed), NeuronLayout::Columns);
}

#[test]
fn squares_and_gates_stay_zero() {
    let gated = |b: &mut Build| {
        b.weight("gate", "8, 64");
        b.node("MatMul", &["x", "gate"], &["g"]);
        b.node("Relu", &["g"], &["on"]);
        b.node("Mul", &["u", "on"], &["h"]);
        "h"
    };
    let squared = |b: &mut Build| {
        b.node("Relu", &["u"], &["on"]);
        b.node("Mul", &["on", "on"], &["h"]);
        "h"
    };
    let power = |b: &mut Build| {
        b.weight("two", "1");
        b.node("Relu", &["u"], &["on"]);
        b.node("Pow", &["on", "two"], &["h"]);
        "h"
    };
    // Behind a gate the other matrix is not needed for inactive neurons either; a product that the ReLU itself reads is.
    let itself = |b: &mut Build| {
        b.node("Relu", &["u"], &["on"]);
        b.node("Mul", &["on", "u"], &["h"]);
        "h"
    };
    for (graph, gated) in [
        (network(gated, by_rows), 64 * 8 * 4),
        (network(squared, by_rows), 0),
        (network(power, by_rows), 0),
        (network(itself, by_rows), 0),
    ] {
        let [found] = found(&graph)[..] else { panic!("{:?}", found(&graph)) };
        assert_eq!((found.gated.map_or(0, |gated| gated.bytes), found.row_bytes()), (gated, 32 + gated / 64));
    }
}

/// What is added is no longer zero; a smooth activation function never is; a matrix that another node reads is needed whole.
#[test]
fn nothing_is_found_where_nothing_is_off() {
    let shifted = |b: &mut Build| {
        b.weight("bias", "64");
        b.node("Relu", &["u"], &["on"]);
        b.node("Add", &["on", "bias"], &["h"]);
        "h"
    };
    let smooth = |b: &mut Build| {
        b.node("Gelu", &["u"], &["h"]);
        "h"
    };
    let tied = network(relu, |b, hidden| {
        by_rows(b, hidden);
        b.node("MatMul", &["u", "down"], &["z"]);
    });
    // Tokens and neurons change places: a row of the matrix no longer belongs to a neuron.
    let reshaped = |b: &mut Build| {
        b.node("Relu", &["u"], &["on"]);
        b.typed("on", DType::Float32, "1, 8, 64");
        b.weight("size", "3");
        b.node("Reshape", &["on", "size"], &["h"]);
        b.typed("h", DType::Float32, "1, 64, 8");
        "h"
    };
    for graph in [network(shifted, by_rows), network(smooth, by_rows), tied, network(reshaped, by_rows)] {
        assert_eq!(found(&graph), []);
    }
}

#[test]
fn quantized_matrices_have_no_rows_of_neurons() {
    let graph = network(relu, |b, hidden| {
        b.weight("down", "8, 2, 16");
        b.node_with("com.microsoft::MatMulNBits", &[hidden, "down"], &["y"], &[("K", 64), ("N", 8), ("bits", 4)]);
    });
    let [found] = found(&graph)[..] else { panic!() };
    assert_eq!((found.neurons, found.layout), (64, NeuronLayout::Quantized));
}
