//! Caches of rotary embeddings: tables with a row for each position that a model was exported for.
//!
//! Every partition that reads a cache holds it, and one whose weights are read from disk reads it in each pass. At 131,072 positions a
//! cache of 64 float32 numbers in a row has 32 MiB, which may be more than a layer of 4-bit weights. A plan is for a context of fewer tokens:
//! [`shorten`] leaves out the rows of positions that no token of it has.

use crate::roles;
use hpp_graph::{Graph, Node, NodeId, Origin, ValueId};
use hpp_onnx::{Model, keep_rows};
use hpp_schema::{Dim, InputRole};
use std::collections::BTreeMap;

/// Caches of at most this many bytes stay whole, so that a run may have a longer context than its plan.
const SMALL: u64 = 256 << 10;

/// The inputs of an operator that are caches of rotary embeddings, and the input with the positions of the tokens.
#[derive(Clone, Copy, Debug)]
pub struct RotaryInputs {
    /// Cosines and sines, `[positions, numbers]`.
    pub caches: [usize; 2],
    /// Positions. An operator without this input counts the tokens of the sequence.
    pub positions: usize,
}

impl RotaryInputs {
    /// The inputs of a node; `None` if its operator has no such caches.
    pub fn of(node: &Node) -> Option<RotaryInputs> {
        let has_input = |at: usize| node.inputs.get(at).copied().flatten().is_some();
        match (node.domain.as_str(), node.op_type.as_str()) {
            ("com.microsoft", "GroupQueryAttention") => Some(RotaryInputs { caches: [7, 8], positions: 9 }),
            ("com.microsoft", "RotaryEmbedding") => Some(RotaryInputs { caches: [2, 3], positions: 1 }),
            ("" | "ai.onnx", "RotaryEmbedding") if has_input(3) => Some(RotaryInputs { caches: [1, 2], positions: 3 }),
            _ => None,
        }
    }
}

/// Shortens the caches to the positions below `context`, in the model and its graph. Returns the fewest rows that a shortened one has;
/// `None` if all stay whole.
pub fn shorten(model: &mut Model, graph: &mut Graph, context: u64) -> Option<u64> {
    let caches = graph.value_ids().filter(|id| is_read_by_position_only(graph, *id));
    let rows: BTreeMap<String, u64> =
        caches.filter_map(|id| Some((graph.value(id).name.clone(), rows_to_keep(graph, id, context)?))).collect();
    let shortened = keep_rows(model, &rows);
    for id in graph.value_ids().collect::<Vec<_>>() {
        if shortened.contains(&graph.value(id).name) {
            set_rows(graph, id, rows[&graph.value(id).name]);
        }
    }
    shortened.iter().map(|name| rows[name]).min()
}

/// Rows for positions below `context`, and no fewer than a small cache has; `None` if the table has no more.
fn rows_to_keep(graph: &Graph, id: ValueId, context: u64) -> Option<u64> {
    let weight = graph.weight(id)?;
    let [rows, _] = graph.value(id).shape.as_deref()? else { return None };
    let rows = rows.as_fixed().filter(|rows| *rows > 0)?;
    let small = SMALL / (weight.bytes / rows).max(1);
    Some(context.max(small)).filter(|kept| *kept < rows)
}

fn set_rows(graph: &mut Graph, id: ValueId, kept: u64) {
    let value = &mut graph.values[id.0 as usize];
    let Some(rows) = value.shape.as_mut().and_then(|shape| shape.first_mut()) else { return };
    let all = rows.as_fixed().unwrap_or(kept);
    *rows = Dim::fixed(kept);
    if let Origin::Weight(weight) = &mut value.origin {
        weight.bytes = weight.bytes / all * kept;
    }
}

/// Whether all readers of a weight take rows of it by the positions of tokens.
fn is_read_by_position_only(graph: &Graph, id: ValueId) -> bool {
    let readers = &graph.value(id).consumers;
    graph.weight(id).is_some()
        && !readers.is_empty()
        && !graph.outputs.contains(&id)
        && readers.iter().all(|reader| reads_by_position(graph, *reader, id))
}

/// Whether a node reads a weight as a cache only, and its positions are those of tokens.
fn reads_by_position(graph: &Graph, reader: NodeId, id: ValueId) -> bool {
    let node = graph.node(reader);
    let Some(RotaryInputs { caches, positions }) = RotaryInputs::of(node) else { return false };
    let elsewhere = node.inputs.iter().enumerate().any(|(at, input)| *input == Some(id) && !caches.contains(&at));
    let positions = node.inputs.get(positions).copied().flatten();
    !elsewhere && !node.captures.contains(&id) && positions.is_none_or(|positions| are_of_tokens(graph, positions))
}

/// Whether integers are the model's input of positions, perhaps with another shape or type.
fn are_of_tokens(graph: &Graph, mut id: ValueId) -> bool {
    loop {
        let Origin::Node { node, .. } = graph.value(id).origin else {
            return matches!(graph.value(id).origin, Origin::Input)
                && roles::input_role(graph, id) == InputRole::PositionIds;
        };
        let node = graph.node(node);
        let keeps_numbers =
            matches!(node.op_type.as_str(), "Identity" | "Cast" | "Reshape" | "Squeeze" | "Unsqueeze" | "Expand");
        match node.inputs.first().copied().flatten().filter(|_| keeps_numbers) {
            Some(source) => id = source,
            None => return false,
        }
    }
}
