//! Finds nodes that compute on weights only, and the weights that each node uses. Does not know blocks.

use crate::ops;
use crate::{Attribute, Graph, NodeId, Origin, ValueId};

/// The weights that each node uses, directly or through weight-only nodes.
///
/// A weight-only node (a transposed or dequantized weight, a `Constant`) is treated like a weight: every partition that
/// reads it gets a copy.
#[derive(Clone, Debug)]
pub struct WeightUse {
    weight_only: Vec<bool>,
    matrix: Vec<bool>,
    used: Vec<Vec<ValueId>>,
}

impl WeightUse {
    /// Analyses a graph in one pass.
    pub fn of(graph: &Graph) -> Self {
        let count = graph.nodes.len();
        let mut this =
            WeightUse { weight_only: vec![false; count], matrix: vec![false; count], used: vec![vec![]; count] };
        for id in graph.node_ids() {
            let mut used: Vec<ValueId> = graph.node(id).reads().flat_map(|v| this.weights_behind(graph, v)).collect();
            used.sort_unstable();
            used.dedup();
            this.used[id.0 as usize] = used;
            this.weight_only[id.0 as usize] = this.computes_on_weights(graph, id);
            this.matrix[id.0 as usize] = this.makes_matrix(graph, id);
        }
        this
    }

    fn computes_on_weights(&self, graph: &Graph, id: NodeId) -> bool {
        let node = graph.node(id);
        let constant = ops::is_standard(node) && node.op_type == "Constant";
        let mut reads = node.reads().peekable();
        let reads_anything = reads.peek().is_some();
        (constant || reads_anything)
            && ops::is_recomputable(node)
            && !ops::has_body(node)
            && reads.all(|v| self.is_weight_like(graph, v))
    }

    /// Whether a node computes on weights only.
    pub fn is_weight_only(&self, node: NodeId) -> bool {
        self.weight_only[node.0 as usize]
    }

    /// Whether a value is a weight or computed from weights only.
    pub fn is_weight_like(&self, graph: &Graph, value: ValueId) -> bool {
        match graph.value(value).origin {
            Origin::Weight(_) => true,
            Origin::Input => false,
            Origin::Node { node, .. } => self.is_weight_only(node),
        }
    }

    /// The weights a node reads, directly or through weight-only nodes, each once, in order.
    pub fn used_by(&self, node: NodeId) -> &[ValueId] {
        &self.used[node.0 as usize]
    }

    /// The weights that a weight-like value is computed from; empty for other values.
    pub fn weights_behind(&self, graph: &Graph, value: ValueId) -> Vec<ValueId> {
        match graph.value(value).origin {
            Origin::Weight(_) => vec![value],
            Origin::Node { node, .. } if self.is_weight_only(node) => self.used[node.0 as usize].clone(),
            _ => vec![],
        }
    }

    /// The weights that several nodes use, each once, in order.
    pub fn used_by_all(&self, nodes: impl IntoIterator<Item = NodeId>) -> Vec<ValueId> {
        let mut all: Vec<ValueId> = nodes.into_iter().flat_map(|n| self.used_by(n).iter().copied()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Whether a value is a weight with at least two dimensions larger than one, or computed from one.
    pub fn is_matrix(&self, graph: &Graph, value: ValueId) -> bool {
        match graph.value(value).origin {
            Origin::Weight(_) => has_two_dims(graph, value),
            Origin::Node { node, .. } => self.is_weight_only(node) && self.matrix[node.0 as usize],
            Origin::Input => false,
        }
    }

    fn makes_matrix(&self, graph: &Graph, id: NodeId) -> bool {
        let node = graph.node(id);
        let inline = node.attributes.values().any(|a| match a {
            Attribute::Tensor(t) => t.dims.iter().filter(|d| **d > 1).count() >= 2,
            _ => false,
        });
        inline || (!ops::reads_shape_only(node) && node.reads().any(|v| self.is_matrix(graph, v)))
    }
}

/// Total bytes of these weights.
pub fn weight_bytes(graph: &Graph, weights: &[ValueId]) -> u64 {
    weights.iter().filter_map(|w| graph.weight(*w)).fold(0u64, |sum, w| sum.saturating_add(w.bytes))
}

fn has_two_dims(graph: &Graph, weight: ValueId) -> bool {
    let dims = graph.value(weight).shape.iter().flatten();
    dims.filter(|d| d.as_fixed().is_none_or(|d| d > 1)).count() >= 2
}
