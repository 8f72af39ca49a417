//! Caches of which the graph itself drops the oldest tokens: `present = concat(past, new)[-kept:]`. Layers with a sliding window of Transformers 5
//! do this, with one token less than the window.

mod counting;

use crate::roles::input_role;
use hpp_graph::{Graph, Node, StateChange, StatePair, ValueId, ops};
use hpp_schema::InputRole;
use std::collections::{BTreeMap, BTreeSet};

/// The sliding caches of a model.
pub(crate) struct SlidingCaches {
    /// The tokens that each keeps, by past.
    kept: BTreeMap<ValueId, u64>,
    /// Why texts cannot go on beyond what they keep; `None` if they can.
    obstacle: Option<SlidingObstacle>,
}

/// Why a text ends where a sliding cache is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlidingObstacle {
    /// The graph counts tokens by the length of such a cache.
    CountsTokens,
    /// A cache of another length has the same symbol for its tokens.
    SharesLength,
}

impl SlidingCaches {
    /// Finds them. A text can go on beyond what they keep if two things hold. Positions are an input, or the graph counts tokens by something else than
    /// the length of such a cache, which would count only those that are kept. And no cache of another length has the same symbol for its tokens: ONNX
    /// Runtime reuses buffers of equal symbolic shapes, and fails where these differ.
    pub fn of<'a>(graph: &Graph, pairs: impl Iterator<Item = &'a StatePair>) -> Self {
        let growing = pairs.filter_map(|pair| Some((pair, token_axis(graph, pair)?)));
        let lengths: Vec<_> = growing
            .filter_map(|(pair, axis)| {
                let symbol = graph.value(pair.past).shape.as_ref()?.get(axis)?.as_symbol()?;
                Some((symbol, kept(graph, pair, axis), pair.past))
            })
            .collect();
        let has_positions = graph.inputs.iter().any(|id| input_role(graph, *id) == InputRole::PositionIds);
        let is_shared = |(symbol, kept, _): &(&str, Option<u64>, ValueId)| {
            kept.is_some() && lengths.iter().any(|(other, length, _)| other == symbol && length != kept)
        };
        let sliding: BTreeSet<&str> =
            lengths.iter().filter(|(_, kept, _)| kept.is_some()).map(|(symbol, ..)| *symbol).collect();
        let obstacle = if lengths.iter().any(is_shared) {
            Some(SlidingObstacle::SharesLength)
        } else if !sliding.is_empty() && !has_positions && !counting::counts_without(graph, &sliding) {
            Some(SlidingObstacle::CountsTokens)
        } else {
            None
        };
        let kept = lengths.iter().filter_map(|(_, kept, past)| Some((*past, (*kept)?))).collect();
        SlidingCaches { kept, obstacle }
    }

    /// The tokens that a cache keeps, if texts can go on beyond them.
    pub fn followed(&self, past: ValueId) -> Option<u64> {
        self.kept.get(&past).copied().filter(|_| self.obstacle.is_none())
    }

    /// The tokens of the longest text, the cache that limits it and why, if texts cannot go on beyond what a cache keeps.
    pub fn limit(&self) -> Option<(u64, ValueId, SlidingObstacle)> {
        let (kept, past) = self.kept.iter().map(|(past, kept)| (*kept, *past)).min()?;
        Some((kept, past, self.obstacle?))
    }
}

/// The axis of tokens of a state that grows.
fn token_axis(graph: &Graph, pair: &StatePair) -> Option<usize> {
    match pair.change {
        StateChange::Append { axis } => Some(axis),
        StateChange::Replace => growing_axis(graph, pair),
        StateChange::SharedBuffer { .. } | StateChange::ReadOnly => None,
    }
}

/// The axis along which a state grows that each pass rebuilds: it takes several caches apart, appends to each and stacks them again (GPT-2
/// exports have one state for keys and values). The size of this axis has another name after the pass, and no other size changes.
pub(crate) fn growing_axis(graph: &Graph, pair: &StatePair) -> Option<usize> {
    let shape = |id: ValueId| graph.value(id).shape.as_ref();
    let (past, present) = (shape(pair.past)?, shape(pair.present?)?);
    let mut changed = past.iter().zip(present).enumerate().filter(|(_, (before, after))| before != after);
    let (axis, (before, _)) = changed.next().filter(|_| past.len() == present.len())?;
    // The first axis is the batch where it has a name.
    (changed.next().is_none() && axis > 0 && before.as_symbol().is_some()).then_some(axis)
}

/// The tokens that a state keeps along `axis`, its axis of tokens; `None` if the graph drops none.
fn kept(graph: &Graph, pair: &StatePair, axis: usize) -> Option<u64> {
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
                let kept = last(graph, node, is_along)?;
                let joined = graph.node(graph.producer(first)?);
                let is_appended =
                    is_join(joined, is_along) && holds(graph, input(joined, 0)?, pair.past, is_along, kept);
                return is_appended.then_some(kept);
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

fn is_join(node: &Node, is_along: impl Fn(i64) -> bool) -> bool {
    ops::is_standard(node) && node.op_type == "Concat" && node.int("axis").is_some_and(is_along)
}

/// Whether a value is this input, perhaps with another type, behind an empty start, or with only as many of its tokens as matter.
fn holds(graph: &Graph, mut value: ValueId, past: ValueId, is_along: impl Fn(i64) -> bool + Copy, kept: u64) -> bool {
    while value != past {
        let Some(node) = graph.producer(value).map(|node| graph.node(node)).filter(|node| ops::is_standard(node))
        else {
            return false;
        };
        let before = match node.op_type.as_str() {
            "Identity" | "Cast" => input(node, 0),
            // A pass of one token needs one token less than the cache keeps.
            "Slice" if last(graph, node, is_along).is_some_and(|left| left + 1 >= kept) => input(node, 0),
            "Concat" if is_join(node, is_along) => input(node, node.inputs.len().saturating_sub(1)),
            _ => None,
        };
        let Some(before) = before else { return false };
        value = before;
    }
    true
}

fn input(node: &Node, at: usize) -> Option<ValueId> {
    node.inputs.get(at).copied().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LogitsMode, analyse};
    use std::path::Path;

    #[test]
    fn texts_go_on_where_positions_are_an_input_and_lengths_have_symbols_of_their_own() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/torch/gemma3-sliding-dynamo");
        let analysis = analyse(&model, None, LogitsMode::All).unwrap();
        let pairs = || analysis.segmentation.states.iter().map(|state| &state.pair);
        let pasts: Vec<ValueId> = pairs().map(|pair| pair.past).collect();
        let kept = |graph: &Graph| {
            let found = SlidingCaches::of(graph, pairs());
            (
                pasts.iter().map(|past| found.followed(*past)).collect::<Vec<_>>(),
                found.limit().map(|(tokens, _, why)| (tokens, why)),
            )
        };
        let followed = vec![Some(11), Some(11), None, None, Some(11), Some(11)];
        assert_eq!(kept(&analysis.graph), (followed.clone(), None));

        // Without an input of positions, it matters what the graph counts tokens by: the length of the first layer's cache, which drops tokens, or that
        // of the second layer's, which does not.
        let positions = analysis.graph.find("position_ids").unwrap();
        let counting_by = |length: &str| {
            let mut graph = analysis.graph.clone();
            let length = graph.find(length).unwrap();
            graph.values[positions.0 as usize].name = "unread".into();
            let inputs = graph.nodes.iter_mut().flat_map(|node| &mut node.inputs);
            inputs.filter(|input| **input == Some(positions)).for_each(|input| *input = Some(length));
            graph
        };
        let shape_of = |past: &str| {
            let past = analysis.graph.find(past).unwrap();
            let reads = |node: &&Node| node.op_type == "Shape" && node.inputs[0] == Some(past);
            let node = analysis.graph.nodes.iter().find(reads).unwrap();
            analysis.graph.value(node.outputs[0].unwrap()).name.clone()
        };
        let counts = Some((11, SlidingObstacle::CountsTokens));
        assert_eq!(kept(&counting_by(&shape_of("past_key_values.0.key"))), (vec![None; 6], counts));
        assert_eq!(kept(&counting_by(&shape_of("past_key_values.1.value"))), (followed.clone(), None));
        assert_eq!(kept(&counting_by("attention_mask")), (followed, None));

        let mut one_symbol = analysis.graph.clone();
        let shape = one_symbol.value(pasts[2]).shape.clone();
        one_symbol.values[pasts[0].0 as usize].shape = shape;
        assert_eq!(kept(&one_symbol), (vec![None; 6], Some((11, SlidingObstacle::SharesLength))));
    }
}
