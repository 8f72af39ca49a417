//! Mixtures whose experts can be divided between two operators: one with the experts that stay on a GPU, and one with the others.

use super::{AGGREGATION, ROUTER, count};
use crate::segmentation::{Block, BlockKind, Segmentation};
use crate::{Graph, Node, NodeId, ValueId};
use std::collections::BTreeSet;

/// A mixture in one operator (`QMoE`) whose experts can be divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DivisibleMixture {
    /// The operator.
    pub node: NodeId,
    /// The label of its block.
    pub block: String,
    /// How many experts there are.
    pub count: u64,
    /// How many of them each token selects.
    pub active: u64,
    /// Positions of the inputs that hold one slice for each expert along their first dimension.
    pub sliced: Vec<usize>,
}

impl DivisibleMixture {
    /// The input with the hidden states.
    pub const HIDDEN: usize = 0;
    /// The input with the router's logits, `[tokens, experts]`.
    pub const ROUTER: usize = ROUTER;
    /// The optional input with factors for the results of the selected experts, of the same shape as the router's logits. ONNX Runtime's kernel
    /// for CUDA ignores it.
    pub const AGGREGATION: usize = AGGREGATION;

    /// Bytes of the weights of one expert.
    pub fn expert_bytes(&self, graph: &Graph) -> u64 {
        let inputs = &graph.node(self.node).inputs;
        let read: BTreeSet<ValueId> = self.sliced.iter().filter_map(|at| inputs[*at]).collect();
        read.into_iter().filter_map(|id| graph.weight(id)).map(|weight| weight.bytes / self.count).sum()
    }
}

/// The divisible mixtures of the first `layers` layers, at most one for each layer.
pub fn divisible_mixtures(graph: &Graph, segmentation: &Segmentation, layers: u32) -> Vec<DivisibleMixture> {
    let is_counted = |block: &&Block| matches!(block.kind, BlockKind::Layer(layer) if layer < layers);
    let blocks = segmentation.blocks.iter().filter(is_counted);
    blocks.filter_map(|block| block.nodes.iter().find_map(|id| divisible(graph, block, *id))).collect()
}

/// Whether experts of weight 0 add nothing to the result of a mixture, so that the kernel of the CPU does not compute them: the router's values
/// are also the factors.
pub(super) fn leaves_out_unweighted(node: &Node) -> bool {
    let [router, factors] = [ROUTER, AGGREGATION].map(|at| node.inputs.get(at).copied().flatten());
    node.op_type == "QMoE" && router.is_some() && router == factors
}

fn divisible(graph: &Graph, block: &Block, id: NodeId) -> Option<DivisibleMixture> {
    let node = graph.node(id);
    // `MoE` has no input for factors. Without normalisation the kernels differ: that of the CPU weighs selected experts by the softmax of their own
    // logits all the same, that for CUDA by the softmax of all.
    let is_supported = node.op_type == "QMoE"
        && node.domain == "com.microsoft"
        && node.int("use_sparse_mixer").unwrap_or(0) == 0
        && node.int("normalize_routing_weights") == Some(1)
        && node.inputs.get(AGGREGATION).copied().flatten().is_none();
    let router = node.inputs.get(ROUTER).copied().flatten().filter(|_| is_supported)?;
    let is_matrix = graph.value(router).shape.as_ref().is_some_and(|shape| shape.len() == 2);
    let hidden = graph.value(node.inputs[DivisibleMixture::HIDDEN]?);
    let router_type = graph.value(router).dtype.filter(|dtype| dtype.is_float());
    let hidden_rank = hidden.shape.as_ref()?.len();
    let count = count(graph, node)?;
    let active = u64::try_from(node.int("k").unwrap_or(1)).ok()?;
    let sliced: Vec<usize> = (ROUTER + 1..node.inputs.len()).filter(|at| node.inputs[*at].is_some()).collect();
    let is_sliced = |at: &usize| {
        let id = node.inputs[*at]?;
        let first = graph.value(id).shape.as_ref()?.first()?.as_fixed()?;
        graph.weight(id).filter(|weight| first == count && weight.bytes.is_multiple_of(count))
    };
    let is_possible = is_matrix
        && router_type.is_some()
        && router_type == hidden.dtype
        && matches!(hidden_rank, 2 | 3)
        && (1..count).contains(&active)
        && sliced.iter().all(|at| is_sliced(at).is_some());
    is_possible.then(|| DivisibleMixture { node: id, block: block.label.clone(), count, active, sliced })
}
