//! Finds the weights that are multiplied by exactly zero for a token because a ReLU switched their neuron off, and how these weights are stored.

use crate::ops::is_standard;
use crate::segmentation::Block;
use crate::{Graph, Node, NodeId, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// A product of a ReLU's output, possibly squared or gated, with a constant matrix. A neuron whose ReLU gives 0 contributes nothing to it:
/// 0 times a finite number is 0, and adding 0 changes no sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReluProduct {
    /// The product.
    pub node: NodeId,
    /// The matrix, as it is stored.
    pub weight: ValueId,
    /// How many neurons there are.
    pub neurons: u64,
    /// Bytes of the matrix.
    pub bytes: u64,
    /// The product that the ReLU's output is a gate of, if there is one.
    pub gated: Option<GatedProduct>,
    /// Where the weights of one neuron are in the matrix.
    pub layout: NeuronLayout,
}

/// A product with a constant matrix that is multiplied with a ReLU's output and has no other reader: where the ReLU gives 0, it is not needed
/// either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedProduct {
    /// The product.
    pub node: NodeId,
    /// The multiplication with the ReLU's output.
    pub gating: NodeId,
    /// The ReLU's output.
    pub gate: ValueId,
    /// The matrix, as it is stored.
    pub weight: ValueId,
    /// Bytes of the matrix.
    pub bytes: u64,
}

/// Where the weights of one neuron are in a stored matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeuronLayout {
    /// Side by side: the matrix is `[neurons, hidden]`.
    Rows,
    /// One in each row: the matrix is `[hidden, neurons]`, as `Gemm` with `transB` reads it.
    Columns,
    /// In quantization blocks that hold several neurons.
    Quantized,
}

impl ReluProduct {
    /// The products of a block of which a ReLU switches neurons off, in execution order. Products whose matrix another node reads too are left out.
    pub fn of(graph: &Graph, block: &Block) -> Vec<ReluProduct> {
        let inside: BTreeSet<NodeId> = block.nodes.iter().copied().collect();
        // Values that are 0 for inactive neurons, with the products that were multiplied with them.
        let mut zeros = BTreeMap::new();
        let mut found = Vec::new();
        // Node ids are in execution order.
        for id in &inside {
            let node = graph.node(*id);
            let is_relu = is_standard(node) && node.op_type == "Relu";
            let first = node.inputs.first().copied().flatten();
            if is_relu || keeps_zeros(graph, node, &zeros) {
                let known = node.inputs.iter().flatten().find_map(|input| zeros.get(input).copied().flatten());
                let gated = known.or_else(|| gated(graph, *id, |input| zeros.contains_key(&input)));
                zeros.extend(node.outputs.first().copied().flatten().map(|output| (output, gated)));
            } else if let Some(gated) = first.and_then(|input| zeros.get(&input)) {
                found.extend(product(graph, *id).map(|found| ReluProduct { gated: *gated, ..found }));
            }
        }
        found
    }

    /// Bytes of all weights that belong to neurons which may be off.
    pub fn all_bytes(&self) -> u64 {
        self.bytes + self.gated.map_or(0, |gated| gated.bytes)
    }

    /// Bytes of the weights of one neuron.
    pub fn row_bytes(&self) -> u64 {
        self.all_bytes() / self.neurons.max(1)
    }
}

/// The product that a multiplication gates with a value that is 0 for inactive neurons.
fn gated(graph: &Graph, gating: NodeId, is_gate: impl Fn(ValueId) -> bool) -> Option<GatedProduct> {
    let node = graph.node(gating);
    let [Some(a), Some(b)] = node.inputs[..] else { return None };
    let (gate, value) = if is_gate(a) { (a, b) } else { (b, a) };
    let node = graph.producer(value).filter(|_| node.op_type == "Mul" && is_read_once(graph, value))?;
    let ReluProduct { weight, bytes, .. } = product(graph, node)?;
    Some(GatedProduct { node, gating, gate, weight, bytes })
}

/// Whether the node's output is 0 wherever its input is, for an input in `zeros`: conversions, a square, a product with a gate. The exponent of a
/// `Pow` is not checked; activation functions use positive ones.
fn keeps_zeros(graph: &Graph, node: &Node, zeros: &BTreeMap<ValueId, Option<GatedProduct>>) -> bool {
    let first = node.inputs.first().copied().flatten();
    let has = |input: Option<ValueId>| input.is_some_and(|id| zeros.contains_key(&id));
    is_standard(node)
        && match node.op_type.as_str() {
            "Mul" => node.inputs.iter().any(|input| has(*input)),
            "Cast" | "Identity" | "Dropout" | "Pow" => has(first),
            // Tokens may be merged into one axis or separated again; neurons stay in the last one.
            "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze" => {
                let output = node.outputs.first().copied().flatten();
                has(first)
                    && first.zip(output).is_some_and(|(a, b)| last(graph, a).is_some_and(|n| last(graph, b) == Some(n)))
            }
            _ => false,
        }
}

/// The last dimension of a value, if it is fixed.
fn last(graph: &Graph, id: ValueId) -> Option<u64> {
    graph.value(id).shape.as_ref()?.last()?.as_fixed()
}

/// The product that a node computes, if its second input is a constant matrix that nothing else reads.
fn product(graph: &Graph, id: NodeId) -> Option<ReluProduct> {
    let node = graph.node(id);
    let second = node.inputs.get(1).copied().flatten()?;
    match node.op_type.as_str() {
        "MatMulNBits" => {
            let neurons = u64::try_from(node.int("K")?).ok()?;
            let bytes = graph.weight(second).filter(|_| is_read_once(graph, second))?.bytes;
            Some(ReluProduct { node: id, weight: second, neurons, bytes, gated: None, layout: NeuronLayout::Quantized })
        }
        "MatMul" if is_standard(node) => matrix(graph, id, second, NeuronLayout::Rows),
        "Gemm" if is_standard(node) && node.int("transA").unwrap_or(0) == 0 => {
            let is_transposed = node.int("transB").unwrap_or(0) != 0;
            matrix(graph, id, second, if is_transposed { NeuronLayout::Columns } else { NeuronLayout::Rows })
        }
        _ => None,
    }
}

/// Finds the stored matrix behind a product's input, through conversions and transpositions. `layout` is the layout of that input.
fn matrix(graph: &Graph, node: NodeId, input: ValueId, layout: NeuronLayout) -> Option<ReluProduct> {
    if !is_read_once(graph, input) {
        return None;
    }
    if let Some(weight) = graph.weight(input) {
        let shape = graph.value(input).shape.as_ref().filter(|shape| shape.len() == 2)?;
        let axis = if layout == NeuronLayout::Columns { 1 } else { 0 };
        let neurons = shape[axis].as_fixed().filter(|neurons| *neurons > 1)?;
        return Some(ReluProduct { node, weight: input, neurons, bytes: weight.bytes, gated: None, layout });
    }
    let producer = graph.node(graph.producer(input)?);
    let source = producer.inputs.first().copied().flatten()?;
    match producer.op_type.as_str() {
        "Cast" | "Identity" => matrix(graph, node, source, layout),
        "Transpose" => matrix(graph, node, source, layout.transposed()),
        "DequantizeLinear" => {
            matrix(graph, node, source, layout).map(|found| ReluProduct { layout: NeuronLayout::Quantized, ..found })
        }
        _ => None,
    }
}

impl NeuronLayout {
    fn transposed(self) -> NeuronLayout {
        match self {
            NeuronLayout::Rows => NeuronLayout::Columns,
            NeuronLayout::Columns => NeuronLayout::Rows,
            NeuronLayout::Quantized => NeuronLayout::Quantized,
        }
    }
}

fn is_read_once(graph: &Graph, id: ValueId) -> bool {
    graph.value(id).consumers.len() == 1
}
