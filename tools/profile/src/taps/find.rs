//! Queries on a graph that the search for taps uses.

use hpp_graph::{Graph, Node, NodeId, ValueId, WeightUse, ops};
use hpp_schema::{DType, Dim};
use std::collections::BTreeSet;

/// A graph and which of its values are weights.
#[derive(Clone, Copy)]
pub(super) struct GraphView<'a> {
    pub graph: &'a Graph,
    pub weights: &'a WeightUse,
}

/// Most nodes on a path that a query follows.
const MAX_DEPTH: usize = 12;

impl<'a> GraphView<'a> {
    pub fn node(&self, id: NodeId) -> &'a Node {
        self.graph.node(id)
    }

    /// Whether a value is a weight or made of weights alone.
    pub fn is_weight(&self, value: ValueId) -> bool {
        self.weights.is_weight_like(self.graph, value)
    }

    /// Inputs that are present and not weights.
    pub fn data_inputs(&self, node: &'a Node) -> impl Iterator<Item = ValueId> + use<'a, '_> {
        node.inputs.iter().flatten().copied().filter(|value| !self.is_weight(*value))
    }

    /// Whether a node is a product with a weight.
    pub fn is_projection(&self, id: NodeId) -> bool {
        let node = self.node(id);
        ops::is_product(node) && node.inputs.iter().flatten().any(|value| self.is_weight(*value))
    }

    /// Whether a node is a product of two activations.
    pub fn is_mixing(&self, id: NodeId) -> bool {
        let node = self.node(id);
        ops::is_product(node) && self.data_inputs(node).count() >= 2
    }

    /// Follows a value backwards over operators that neither contract nor normalise. Whether at least one product is reached and `is` accepts every
    /// product that is reached.
    pub fn comes_from(&self, value: ValueId, is: impl Fn(NodeId) -> bool) -> bool {
        let mut found = false;
        let mut seen = BTreeSet::new();
        let mut todo = vec![(value, 0)];
        while let Some((value, far)) = todo.pop() {
            let Some(id) = self.graph.producer(value).filter(|id| far < MAX_DEPTH && seen.insert(*id)) else {
                continue;
            };
            if ops::is_product(self.node(id)) {
                if !is(id) {
                    return false;
                }
                found = true;
            } else if passes(self.node(id)) {
                todo.extend(self.data_inputs(self.node(id)).map(|input| (input, far + 1)));
            }
        }
        found
    }

    /// Whether a projection is reached from a value, forwards over operators that neither contract nor normalise.
    pub fn leads_to_projection(&self, value: ValueId) -> bool {
        let mut seen = BTreeSet::new();
        let mut todo = vec![(value, 0)];
        while let Some((value, far)) = todo.pop() {
            for id in self.graph.value(value).consumers.iter().copied().filter(|id| far < MAX_DEPTH && seen.insert(*id))
            {
                if self.is_projection(id) {
                    return true;
                }
                if passes(self.node(id)) {
                    todo.extend(self.node(id).writes().map(|output| (output, far + 1)));
                }
            }
        }
        false
    }

    /// The size of a value's last axis; `None` if it varies between passes.
    pub fn width(&self, value: ValueId) -> Option<u64> {
        self.graph.value(value).shape.as_ref()?.last().and_then(Dim::as_fixed)
    }

    pub fn rank(&self, value: ValueId) -> Option<usize> {
        self.graph.value(value).shape.as_ref().map(Vec::len)
    }

    /// Whether statistics support the element type.
    pub fn is_counted(&self, value: ValueId) -> bool {
        matches!(self.graph.value(value).dtype, Some(DType::Float32 | DType::Float16 | DType::Bfloat16))
    }
}

/// Whether an operator only moves, scales, shifts or clips elements.
fn passes(node: &Node) -> bool {
    let arithmetic = matches!(
        node.op_type.as_str(),
        "Add" | "Sub" | "Mul" | "Div" | "Pow" | "Max" | "Min" | "Clip" | "Tanh" | "Relu" | "Dropout"
    );
    arithmetic || ops::is_movement(node)
}
