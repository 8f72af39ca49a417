//! Puts parts back together and says where they do not fit. The opposite of [`crate::cut`].

use crate::{Graph, Node, NodeId, Origin, Part, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Why parts do not join.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// A node reads what its part does not have.
    #[error(
        "cannot join parts: in part {part}, node {node:?} reads {value:?}, which is neither given nor made before it"
    )]
    Missing {
        /// Index of the part.
        part: usize,
        /// Name of the reader.
        node: String,
        /// Name of the value.
        value: String,
    },
    /// A part takes what neither the model nor an earlier part gives.
    #[error("cannot join parts: part {part} takes {value:?}, which no earlier part gives")]
    NotGiven {
        /// Index of the part.
        part: usize,
        /// Name of the value.
        value: String,
    },
    /// A part gives what it does not have.
    #[error("cannot join parts: part {part} gives {value:?}, which it does not make")]
    NotMade {
        /// Index of the part.
        part: usize,
        /// Name of the value.
        value: String,
    },
    /// No part gives an output of the model.
    #[error("cannot join parts: no part gives the model output {value:?}")]
    NoOutput {
        /// Name of the value.
        value: String,
    },
    /// A node runs in no part.
    #[error("cannot join parts: node {node:?} ({op_type}) is in none of them")]
    Lost {
        /// Name of the node.
        node: String,
        /// Its operator.
        op_type: String,
    },
    /// A node runs in several parts without being listed as duplicated in all but one.
    #[error("cannot join parts: node {node:?} belongs to {owners} of them")]
    Owners {
        /// Name of the node.
        node: String,
        /// How many parts claim it.
        owners: usize,
    },
}

/// Checks that parts, run one after the other, compute the model, and returns the nodes they run, each once.
///
/// Weight-only nodes nobody reads may be missing; everything else of the graph must be there.
pub fn join(graph: &Graph, parts: &[Part], is_weight_only: impl Fn(NodeId) -> bool) -> Result<Vec<NodeId>, JoinError> {
    let mut given: BTreeSet<ValueId> = graph.inputs.iter().copied().collect();
    let mut owners: BTreeMap<NodeId, usize> = BTreeMap::new();
    for (index, part) in parts.iter().enumerate() {
        given.extend(run(graph, index, part, &given)?);
        for id in &part.nodes {
            *owners.entry(*id).or_default() += usize::from(!part.duplicated.contains(id));
        }
    }
    let returned: BTreeSet<ValueId> = parts.iter().flat_map(|p| p.outputs.iter().copied()).collect();
    if let Some(missing) = graph.outputs.iter().find(|v| !returned.contains(v)) {
        return Err(JoinError::NoOutput { value: graph.value(*missing).name.clone() });
    }
    for id in graph.node_ids().filter(|id| !is_weight_only(*id)) {
        let node = graph.node(id);
        match owners.get(&id) {
            None => return Err(JoinError::Lost { node: label(node), op_type: node.op_type.clone() }),
            Some(1) => {}
            Some(owners) => return Err(JoinError::Owners { node: label(node), owners: *owners }),
        }
    }
    Ok(owners.into_keys().collect())
}

fn label(node: &Node) -> String {
    if node.name.is_empty() { node.op_type.clone() } else { node.name.clone() }
}

/// Runs one part in thought; answers with what it gives.
fn run(graph: &Graph, index: usize, part: &Part, given: &BTreeSet<ValueId>) -> Result<Vec<ValueId>, JoinError> {
    let name = |v: ValueId| graph.value(v).name.clone();
    if let Some(value) = part.inputs.iter().find(|v| !given.contains(v)) {
        return Err(JoinError::NotGiven { part: index, value: name(*value) });
    }
    let mut have: BTreeSet<ValueId> = part.inputs.iter().copied().collect();
    let at_hand =
        |have: &BTreeSet<ValueId>, v: ValueId| matches!(graph.value(v).origin, Origin::Weight(_)) || have.contains(&v);
    for id in &part.nodes {
        let node = graph.node(*id);
        for value in node.reads().map(|v| part.same_shape.get(&v).copied().unwrap_or(v)) {
            if !at_hand(&have, value) {
                return Err(JoinError::Missing { part: index, node: label(node), value: name(value) });
            }
        }
        have.extend(node.writes());
    }
    match part.outputs.iter().find(|v| !at_hand(&have, **v)) {
        Some(value) => Err(JoinError::NotMade { part: index, value: name(*value) }),
        None => Ok(part.outputs.clone()),
    }
}
