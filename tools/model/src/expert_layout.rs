//! The layout of quantized experts' weights (`QMoE`), which an ONNX file need not state.
//!
//! The attribute `weights_prepacked` is 0 for weights of `[experts, outputs, inputs / 2]`, and 1 for weights that the exporter arranged for a
//! provider's kernels. Without it each provider expects the arrangement of its own kernels: the CPU provider the former, CUDA the
//! interleaved one of its matrix products. One file then gives different answers on both, without an error (docs/PROVIDERS.md).
//!
//! CUDA computes `QMoE` in 16 bits only. The layout of nodes in float32 is left open, so that their weights may be inputs of a session:
//! `hpp_onnx` keeps those of a node with the value 0 constant, because CUDA arranges them when it loads them.

use crate::{ModelConfig, ModelError};
use hpp_graph::{Attribute, Graph, Node, NodeId};
use hpp_onnx::{Model, set_int_attribute};
use hpp_schema::DType;

const OPERATOR: &str = "QMoE";
const ATTRIBUTE: &str = "weights_prepacked";
const PLAIN: i64 = 0;

/// States the plain layout in each `QMoE` in 16 bits that states none. Refuses a model that was exported for CUDA: no other provider
/// reads its experts, and any block may compute on the CPU.
pub(crate) fn state(model: &mut Model, graph: &mut Graph, config: &ModelConfig) -> Result<(), ModelError> {
    let open: Vec<NodeId> = graph.node_ids().filter(|id| is_open(graph, graph.node(*id))).collect();
    if config.is_for_cuda && !open.is_empty() {
        return Err(ModelError::setting(
            "the experts (QMoE) of this model are arranged for CUDA's kernels, and the CPU would read them wrongly: its genai_config.json says \
             that it was exported for CUDA",
            "export it for the CPU or WebGPU (GenAI's builder: -e cpu, -e webgpu), which HPP runs on CUDA too; if it was, and only the \
             configuration names CUDA, remove `cuda` from provider_options in genai_config.json",
        ));
    }
    let first_output = |id| Some(graph.value(graph.node(id).outputs.first().copied().flatten()?).name.clone());
    let outputs = open.iter().copied().filter_map(first_output).collect();
    set_int_attribute(model, &outputs, ATTRIBUTE, PLAIN);
    for id in open {
        graph.nodes[id.0 as usize].attributes.insert(ATTRIBUTE.to_owned(), Attribute::Int(PLAIN));
    }
    Ok(())
}

/// Whether a node has integer weights, computes in 16 bits, and does not state their layout.
fn is_open(graph: &Graph, node: &Node) -> bool {
    let dtype = || graph.value(node.inputs.first().copied().flatten()?).dtype;
    let has_integers = match node.attributes.get("quant_type") {
        None => true,
        Some(kind) => *kind == Attribute::String(b"int".to_vec()),
    };
    node.op_type == OPERATOR
        && has_integers
        && matches!(node.int(ATTRIBUTE), None | Some(-1))
        && matches!(dtype(), Some(DType::Float16 | DType::Bfloat16))
}
