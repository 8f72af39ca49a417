//! The layout of quantized experts' weights (`QMoE`), which an ONNX file need not state.
//!
//! The attribute `weights_prepacked` is 0 for the plain layout, `[experts, outputs, inputs / 2]`, and 1 for the layout of a provider's
//! kernels. Without it each provider expects the layout of its own kernels: the CPU provider the plain one, CUDA the interleaved one of its
//! matrix products. One file then gives different answers on both, without an error (docs/PROVIDERS.md).
//!
//! CUDA computes `QMoE` in 16 bits only, so nodes in float32 are left as exported. `hpp_onnx` keeps the weights of a node with the value 0
//! constant, because CUDA repacks them when it loads them; those of other nodes may be inputs of a session.

use crate::{Analysis, ModelConfig};
use hpp_graph::{Attribute, Graph, Node, NodeId};
use hpp_onnx::{Model, set_int_attribute};
use hpp_schema::DType;

const ATTRIBUTE: &str = "weights_prepacked";
const PLAIN: i64 = 0;
/// Inputs: the first matrices of all experts, and their scales, `[experts, outputs, ...]`.
const WEIGHTS: usize = 2;
const SCALES: usize = 3;

/// States the plain layout in each `QMoE` in 16 bits that states none, if the weights have its shape and the model was not exported for CUDA.
pub(crate) fn state(model: &mut Model, graph: &mut Graph, config: &ModelConfig) {
    if config.is_for_cuda {
        return;
    }
    let plain: Vec<NodeId> = unstated(graph).filter(|id| has_plain_shape(graph, graph.node(*id))).collect();
    set_in_both(model, graph, &plain, (ATTRIBUTE, PLAIN));
}

/// Sets an integer attribute of nodes in the model and in its graph.
pub(crate) fn set_in_both(model: &mut Model, graph: &mut Graph, nodes: &[NodeId], (name, value): (&str, i64)) {
    let first_output =
        |id: &NodeId| Some(graph.value(graph.node(*id).outputs.first().copied().flatten()?).name.clone());
    let outputs = nodes.iter().filter_map(first_output).collect();
    set_int_attribute(model, &outputs, name, value);
    for id in nodes {
        graph.nodes[id.0 as usize].attributes.insert(name.to_owned(), Attribute::Int(value));
    }
}

impl Analysis {
    /// Blocks with experts that CUDA and other providers may read differently, by label: in 16 bits, in a layout that is not stated.
    pub fn blocks_with_unstated_experts(&self) -> Vec<&str> {
        let open: Vec<NodeId> = unstated(&self.graph).collect();
        let blocks = self.segmentation.blocks.iter().filter(|block| block.nodes.iter().any(|node| open.contains(node)));
        blocks.map(|block| block.label.as_str()).collect()
    }
}

/// Nodes with integer weights that compute in 16 bits and do not state the layout of their weights.
fn unstated(graph: &Graph) -> impl Iterator<Item = NodeId> {
    graph.node_ids().filter(|id| {
        let node = graph.node(*id);
        let dtype = || graph.value(node.inputs.first().copied().flatten()?).dtype;
        let has_integers = match node.attributes.get("quant_type") {
            None => true,
            Some(kind) => *kind == Attribute::String(b"int".to_vec()),
        };
        node.op_type == "QMoE"
            && has_integers
            && matches!(node.int(ATTRIBUTE), None | Some(-1))
            && matches!(dtype(), Some(DType::Float16 | DType::Bfloat16))
    })
}

/// Whether the weights have one row for each output. Those that GenAI exports for CUDA have one for each input.
fn has_plain_shape(graph: &Graph, node: &Node) -> bool {
    let rows = |input: usize| {
        let value = graph.value(node.inputs.get(input).copied().flatten()?);
        value.shape.as_deref()?.get(1)?.as_fixed()
    };
    rows(WEIGHTS).is_some_and(|outputs| rows(SCALES) == Some(outputs))
}
