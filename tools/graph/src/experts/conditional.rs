//! Experts under a condition: an `If` runs the expert only if its part of the selection has a value other than zero.

use super::large_weights;
use super::scores::{ExpertSelector, Selection};
use crate::{Attribute, Graph, Node, NodeId, ValueId};
use std::collections::BTreeMap;

/// The experts of one mixture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Conditional {
    /// What selects them.
    pub selection: Selection,
    /// The `If` of each expert, by its number.
    pub experts: Vec<NodeId>,
}

impl Conditional {
    /// The first mixture among these nodes of which every expert has an `If`.
    pub fn of(graph: &Graph, nodes: &[NodeId]) -> Option<Conditional> {
        let mut mixtures: BTreeMap<Selection, BTreeMap<u64, NodeId>> = BTreeMap::new();
        for id in nodes {
            if let Some(column) = column(graph, graph.node(*id)) {
                mixtures.entry(column.selection).or_default().insert(column.expert, *id);
            }
        }
        mixtures.into_iter().find_map(|(selection, experts)| {
            let is_whole = experts.keys().copied().eq(0..selection.count(graph)?);
            is_whole.then(|| Conditional { selection, experts: experts.into_values().collect() })
        })
    }
}

/// The large weights that a conditional expert reads.
pub(super) fn weights(graph: &Graph, expert: NodeId) -> Vec<ValueId> {
    large_weights(graph, graph.node(expert).captures.iter().copied())
}

/// The part of the selection that decides whether an `If` runs its expert. `None` for other nodes.
pub(super) fn column(graph: &Graph, node: &Node) -> Option<ExpertSelector> {
    let before = |value: ValueId, operators: &[&str]| {
        let node = graph.node(graph.producer(value)?);
        node.inputs.first().copied().flatten().filter(|_| operators.contains(&node.op_type.as_str()))
    };
    let condition = node.inputs.first().copied().flatten().filter(|_| node.op_type == "If")?;
    // The other branch returns the sum before, unchanged.
    let Some(Attribute::Body(otherwise)) = node.attributes.get("else_branch") else { return None };
    if otherwise.nodes != 1 {
        return None;
    }
    ExpertSelector::of(graph, before(before(condition, &["Cast"])?, &["ReduceL1", "ReduceMax"])?)
}
