//! The layout of quantized experts' weights (`QMoE`), which an ONNX file need not state.
//!
//! The attribute `weights_prepacked` is 0 for weights of `[experts, outputs, inputs / 2]`, and 1 for weights that the exporter arranged for a
//! provider's kernels. Without it each provider expects the arrangement of its own kernels: the CPU provider the former, CUDA the
//! interleaved one of its matrix products. One file then gives different answers on both, without an error (docs/PROVIDERS.md).
//!
//! CUDA computes `QMoE` in 16 bits only, so the layout of nodes in float32 is left open: weights of which may be inputs of a session, and those
//! of nodes whose layout is stated may not (`hpp_onnx` keeps them constants, because CUDA arranges them when it loads them).

use crate::ModelConfig;
use hpp_graph::{Attribute, Graph, Node};
use hpp_onnx::proto::{AttributeProto, NodeProto};
use hpp_onnx::{Model, set_int_attribute};
use hpp_schema::{DType, Provider, ProviderFault};

const OPERATOR: &str = "QMoE";
const ATTRIBUTE: &str = "weights_prepacked";
const AS_EXPORTED: i64 = 0;
const FOR_ITS_PROVIDER: i64 = 1;

/// What goes wrong elsewhere with weights that were arranged for CUDA.
static ARRANGED_FOR_CUDA: ProviderFault = ProviderFault {
    provider: Provider::CPU,
    operator: OPERATOR,
    what: "reads the experts' weights wrongly, which were exported in the layout of CUDA's kernels",
};

/// States the layout of each `QMoE` in 16 bits that does not: that of CUDA's kernels if the model was exported for CUDA, the plain one otherwise.
pub(crate) fn state(model: &mut Model, graph: &mut Graph, config: &ModelConfig) {
    let layout = if config.is_for_cuda { FOR_ITS_PROVIDER } else { AS_EXPORTED };
    let open: Vec<_> = graph.node_ids().filter(|id| is_open(graph, graph.node(*id))).collect();
    let first_output =
        |id| graph.node(id).outputs.first().copied().flatten().map(|value| graph.value(value).name.clone());
    let outputs = open.iter().filter_map(|id| first_output(*id)).collect();
    set_int_attribute(model, &outputs, ATTRIBUTE, layout);
    for id in open {
        graph.nodes[id.0 as usize].attributes.insert(ATTRIBUTE.to_owned(), Attribute::Int(layout));
    }
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

/// Whether a node states that its weights were arranged for the provider of the export: CUDA, the only one with an arrangement of its own.
pub(crate) fn is_for_cuda(node: &NodeProto) -> bool {
    let is_stated = |attribute: &AttributeProto| attribute.name() == ATTRIBUTE && attribute.i() == FOR_ITS_PROVIDER;
    node.op_type() == OPERATOR && node.attribute.iter().any(is_stated)
}

/// The fault of a provider that would read this node's weights in another layout.
pub(crate) fn fault(node: &Node, provider: Provider) -> Option<&'static ProviderFault> {
    let is_for_cuda = node.op_type == OPERATOR && node.int(ATTRIBUTE) == Some(FOR_ITS_PROVIDER);
    (is_for_cuda && provider != Provider::CUDA).then_some(&ARRANGED_FOR_CUDA)
}
