//! What selects the experts of a mixture whose experts are nodes of their own: a table of scores, which are zero for tokens that did not
//! select the expert, or the numbers of the experts that each token selects.

use crate::{Attribute, Graph, Node, ValueId, ops};
use hpp_schema::{DType, SelectedBy};
use std::collections::BTreeSet;

/// The search from the scores back to the `TopK` that chooses experts looks at this many nodes at most.
const MAX_STEPS: usize = 64;

/// What selects the experts of a mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Selection {
    /// A table with one row for each token. The row has the scores of all experts, or the numbers of the experts that the token selects.
    pub value: ValueId,
    /// Whether `value` has scores or numbers.
    pub by: SelectedBy,
}

/// The part of a selection that concerns one expert: its scores, or a mask of the tokens that select it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpertSelector {
    pub selection: Selection,
    /// The expert's number.
    pub expert: u64,
}

impl ExpertSelector {
    /// The expert that a value is about, and its selection. The value may have any shape.
    pub fn of(graph: &Graph, value: ValueId) -> Option<ExpertSelector> {
        let mut value = value;
        loop {
            let node = graph.node(graph.producer(value)?);
            if !ops::is_standard(node) {
                return None;
            }
            match node.op_type.as_str() {
                "Unsqueeze" | "Squeeze" | "Reshape" | "Identity" | "Cast" => value = input(node, 0)?,
                "Slice" | "Gather" => return part(graph, node),
                _ => return None,
            }
        }
    }
}

/// The column of scores, or the row of a mask, that a `Slice` or `Gather` takes.
fn part(graph: &Graph, node: &Node) -> Option<ExpertSelector> {
    let all = input(node, 0)?;
    let (axis, index) = if node.op_type == "Slice" { sliced(graph, node)? } else { gathered(graph, node)? };
    let expert = u64::try_from(index).ok()?;
    let rank = graph.value(all).shape.as_ref()?.len();
    let is_float = matches!(graph.value(all).dtype, Some(DType::Float32 | DType::Float16));
    if is_float && (axis == -1 || usize::try_from(axis).is_ok_and(|axis| axis + 1 == rank)) {
        return Some(ExpertSelector { selection: Selection { value: all, by: SelectedBy::Scores }, expert });
    }
    let value = numbers_of_mask(graph, all).filter(|_| axis == 0)?;
    Some(ExpertSelector { selection: Selection { value, by: SelectedBy::Numbers }, expert })
}

/// The numbers of the selected experts from which `OneHot` makes this mask. The first axis of the mask counts experts.
fn numbers_of_mask(graph: &Graph, mask: ValueId) -> Option<ValueId> {
    let transpose = graph.node(graph.producer(mask)?);
    let one_hot = graph.node(graph.producer(input(transpose, 0)?)?);
    let Some(Attribute::Ints(order)) = transpose.attributes.get("perm") else { return None };
    let is_first =
        transpose.op_type == "Transpose" && order.first().copied() == i64::try_from(order.len()).ok()?.checked_sub(1);
    let is_last = one_hot.op_type == "OneHot" && one_hot.int("axis").unwrap_or(-1) == -1;
    let is_mask = graph.ints(input(one_hot, 2)?) == Some(&[0, 1]);
    let numbers = input(one_hot, 0).filter(|_| is_first && is_last && is_mask)?;
    let width = graph.value(numbers).shape.as_ref()?.last()?.as_fixed();
    let selection = Selection { value: numbers, by: SelectedBy::Numbers };
    let is_readable =
        graph.value(numbers).dtype == Some(DType::Int64) && width.is_some() && width == selection.active(graph);
    is_readable.then_some(numbers)
}

impl Selection {
    /// How many experts there are.
    pub fn count(self, graph: &Graph) -> Option<u64> {
        let value = graph.value(self.value);
        if self.by == SelectedBy::Scores {
            return value.shape.as_ref()?.last()?.as_fixed();
        }
        let depth = value.consumers.iter().find_map(|id| {
            let node = graph.node(*id);
            input(node, 1).filter(|_| node.op_type == "OneHot")
        });
        graph.ints(depth?)?.first().and_then(|depth| u64::try_from(*depth).ok())
    }

    /// How many experts a token selects: `k` of the last `TopK` before the selection. `None` if there is no `TopK`.
    pub fn active(self, graph: &Graph) -> Option<u64> {
        let mut open = BTreeSet::from([graph.producer(self.value)?]);
        for _ in 0..MAX_STEPS {
            let id = open.pop_last()?;
            let node = graph.node(id);
            if ops::is_standard(node) && node.op_type == "TopK" {
                return graph.ints(input(node, 1)?)?.first().and_then(|number| u64::try_from(*number).ok());
            }
            if !ops::reads_shape_only(node) {
                open.extend(graph.producers_of(id));
            }
        }
        None
    }
}

fn input(node: &Node, at: usize) -> Option<ValueId> {
    node.inputs.get(at).copied().flatten()
}

/// Axis and index of a `Slice` that takes a single index.
fn sliced(graph: &Graph, node: &Node) -> Option<(i64, i64)> {
    let single = |at: usize| match graph.ints(input(node, at)?)? {
        [single] => Some(*single),
        _ => None,
    };
    let (start, end, axis) = (single(1)?, single(2)?, single(3)?);
    (end == start + 1 && (input(node, 4).is_none() || single(4) == Some(1))).then_some((axis, start))
}

/// Axis and index of a `Gather` that takes a single index.
fn gathered(graph: &Graph, node: &Node) -> Option<(i64, i64)> {
    match graph.ints(input(node, 1)?)? {
        [index] => Some((node.int("axis").unwrap_or(0), *index)),
        _ => None,
    }
}
