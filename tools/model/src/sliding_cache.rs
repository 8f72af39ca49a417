//! Caches of which the graph itself drops the oldest tokens: `present = concat(past, new)[-kept:]`. Layers with a sliding window of Transformers 5
//! do this, with one token less than the window.

use hpp_graph::{Graph, Node, StateChange, StatePair, ValueId, ops};

/// The tokens that a state keeps along `axis`, its axis of tokens; `None` if the graph drops none.
pub(crate) fn kept(graph: &Graph, pair: &StatePair, axis: usize) -> Option<u64> {
    let mut value = pair.present.filter(|_| pair.change == StateChange::Replace)?;
    let axes = graph.value(pair.past).shape.as_ref()?.len();
    let is_along = |given: i64| usize::try_from(if given < 0 { given + axes as i64 } else { given }) == Ok(axis);
    loop {
        let node = graph.node(graph.producer(value)?);
        let first = input(node, 0)?;
        match node.op_type.as_str() {
            _ if !ops::is_standard(node) => return None,
            "Identity" | "Cast" => value = first,
            "Slice" => {
                let joined = graph.node(graph.producer(first)?);
                let is_appended = joined.op_type == "Concat" && joined.int("axis").is_some_and(is_along);
                let is_appended = is_appended && holds(graph, input(joined, 0)?, pair.past);
                return last(graph, node, is_along).filter(|_| is_appended);
            }
            _ => return None,
        }
    }
}

/// How many elements a `Slice` keeps at the end of one axis, if it is the right one.
fn last(graph: &Graph, node: &Node, is_right: impl Fn(i64) -> bool) -> Option<u64> {
    let ints = |at: usize| graph.ints(input(node, at)?);
    let ([start], [end], [axis]) = (ints(1)?, ints(2)?, ints(3)?) else { return None };
    let steps_by_one = node.inputs.get(4).is_none_or(Option::is_none) || ints(4) == Some(&[1]);
    let is_tail = *end > i64::from(i32::MAX) - 1 && steps_by_one && is_right(*axis);
    u64::try_from(start.checked_neg()?).ok().filter(|kept| *kept > 0 && is_tail)
}

/// Whether a value is this input, perhaps with another type, or with its oldest tokens dropped already.
fn holds(graph: &Graph, mut value: ValueId, past: ValueId) -> bool {
    loop {
        if value == past {
            return true;
        }
        let source = graph.producer(value).map(|node| graph.node(node));
        let source = source.filter(|node| matches!(node.op_type.as_str(), "Identity" | "Cast" | "Concat" | "Slice"));
        match source.and_then(|node| input(node, 0)) {
            Some(before) => value = before,
            None => return false,
        }
    }
}

fn input(node: &Node, at: usize) -> Option<ValueId> {
    node.inputs.get(at).copied().flatten()
}
