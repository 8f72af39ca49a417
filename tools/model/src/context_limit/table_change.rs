//! Models that use other tables once a text is longer than those they were first trained on (LongRoPE): an `If` in the graph compares the
//! length of the text with a number, and gives all tokens of a pass the tables of one branch.

use super::counted::CountedFrom;
use hpp_graph::{Graph, NodeId, ValueId};

/// Most tokens of a text for which no `If` has changed its branch; `None` if none depends on the length.
pub fn tables_change_after(graph: &Graph) -> Option<u64> {
    let conditions = graph.node_ids().filter(|id| graph.node(*id).op_type == "If");
    conditions
        .filter_map(|id| longest_before_change(graph, graph.producer(graph.node(id).inputs.first().copied()??)?))
        .min()
}

/// Most tokens before a comparison of the length with a number gives another result.
fn longest_before_change(graph: &Graph, comparison: NodeId) -> Option<u64> {
    let node = graph.node(comparison);
    let (left, right) = (node.inputs.first().copied()??, node.inputs.get(1).copied()??);
    let (number, length_first) = match (integer(graph, left), integer(graph, right)) {
        (None, Some(number)) if is_length(graph, left) => (number, true),
        (Some(number), None) if is_length(graph, right) => (number, false),
        _ => return None,
    };
    let longest = match (node.op_type.as_str(), length_first) {
        ("Greater" | "LessOrEqual", true) | ("Less" | "GreaterOrEqual", false) => number,
        ("GreaterOrEqual" | "Less", true) | ("LessOrEqual" | "Greater", false) => number.checked_sub(1)?,
        _ => return None,
    };
    u64::try_from(longest).ok().filter(|longest| *longest > 1)
}

/// A single integer that the graph holds.
fn integer(graph: &Graph, id: ValueId) -> Option<i64> {
    match graph.ints(id)? {
        [single] => Some(*single),
        _ => None,
    }
}

/// Whether a value depends on the inputs through their shapes, the attention mask or the positions alone.
fn is_length(graph: &Graph, value: ValueId) -> bool {
    CountedFrom::of(graph, value)
        .is_some_and(|from| from.has_positions || from.has_mask || from.has_operator(&["Shape", "Size"]))
}
