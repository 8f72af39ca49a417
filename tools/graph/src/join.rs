//! Checks that parts add up to the model: the inverse of [`crate::cut`], used by tests.

use crate::{Graph, Node, NodeId, Origin, PartitionGraph, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// The reason why parts do not add up to the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot join parts: {0}")]
pub struct JoinError(String);

/// Checks that parts, run in order, compute the model. Returns the nodes that they run, each once.
///
/// Unread weight-only nodes may be missing; every other node must run in exactly one part, duplicates aside.
pub fn join(
    graph: &Graph,
    parts: &[PartitionGraph],
    is_weight_only: impl Fn(NodeId) -> bool,
) -> Result<Vec<NodeId>, JoinError> {
    let mut available: BTreeSet<ValueId> = graph.inputs.iter().copied().collect();
    let mut owners: BTreeMap<NodeId, usize> = BTreeMap::new();
    for (index, part) in parts.iter().enumerate() {
        available.extend(check_part(graph, index, part, &available)?);
        for id in &part.nodes {
            *owners.entry(*id).or_default() += usize::from(!part.duplicated.contains(id));
        }
    }
    let returned: BTreeSet<ValueId> = parts.iter().flat_map(|p| p.outputs.iter().copied()).collect();
    if let Some(missing) = graph.outputs.iter().find(|v| !returned.contains(v)) {
        return Err(JoinError(format!("no part returns the model output {:?}", graph.value(*missing).name)));
    }
    for id in graph.node_ids().filter(|id| !is_weight_only(*id)) {
        let node = graph.node(id);
        match owners.get(&id) {
            None => return Err(JoinError(format!("no part runs node {:?} ({})", label(node), node.op_type))),
            Some(1) => {}
            Some(owners) => return Err(JoinError(format!("{owners} parts own node {:?}", label(node)))),
        }
    }
    Ok(owners.into_keys().collect())
}

fn label(node: &Node) -> String {
    if node.name.is_empty() { node.op_type.clone() } else { node.name.clone() }
}

/// Checks that one part can run with the available values; returns its outputs.
fn check_part(
    graph: &Graph,
    index: usize,
    part: &PartitionGraph,
    available: &BTreeSet<ValueId>,
) -> Result<Vec<ValueId>, JoinError> {
    let name = |v: ValueId| &graph.value(v).name;
    if let Some(value) = part.inputs.iter().find(|v| !available.contains(v)) {
        return Err(JoinError(format!("part {index} takes {:?}, which no earlier part returns", name(*value))));
    }
    let mut present: BTreeSet<ValueId> = part.inputs.iter().copied().collect();
    let is_present = |present: &BTreeSet<ValueId>, v: ValueId| {
        matches!(graph.value(v).origin, Origin::Weight(_)) || present.contains(&v)
    };
    for id in &part.nodes {
        let node = graph.node(*id);
        for value in node.reads().map(|v| part.same_shape.get(&v).copied().unwrap_or(v)) {
            if !is_present(&present, value) {
                let (node, value) = (label(node), name(value));
                return Err(JoinError(format!(
                    "in part {index}, node {node:?} reads {value:?} before it is available"
                )));
            }
        }
        present.extend(node.writes());
    }
    match part.outputs.iter().find(|v| !is_present(&present, **v)) {
        Some(value) => Err(JoinError(format!("part {index} returns {:?}, which it does not compute", name(*value)))),
        None => Ok(part.outputs.clone()),
    }
}
