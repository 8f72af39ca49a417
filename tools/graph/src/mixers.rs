//! Finds token mixers (attention, convolution, recurrence) and groups them, one group per layer.

use crate::ops;
use crate::spine::{Spine, SpinePosition, rounds};
use crate::states::digits;
use crate::{NodeId, StateChange, StatePair, ValueId};
use std::collections::BTreeSet;

/// The token mixer of one layer, as a range of positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mixer {
    /// Position of its first node.
    pub first: usize,
    /// Position of its last node.
    pub last: usize,
}

/// A node that shows that a token mixer is here: it joins a state with the hidden state, or it is an attention.
#[derive(Clone, Debug)]
struct MixerEvidence {
    position: usize,
    /// The numbers in the name of the state that the node joins.
    digits: Option<Vec<u64>>,
    /// The node is a complete attention, or the last product of one.
    attention: bool,
    round: usize,
}

/// The mixers in order, one per layer.
pub(crate) fn find_mixers(spine: &Spine, states: &[StatePair]) -> Vec<Mixer> {
    let mut evidence = collect_evidence(spine, states);
    evidence.sort_by_key(|e| e.position);
    let mut groups: Vec<Vec<MixerEvidence>> = vec![];
    let segments: Vec<usize> = spine.dominators.iter().filter_map(|n| spine.position(*n)).collect();
    let segment = |e: &MixerEvidence| segments.partition_point(|p| *p <= e.position);
    for item in evidence {
        match groups.last_mut() {
            Some(group) if segment(&group[0]) == segment(&item) => group.push(item),
            _ => groups.push(vec![item]),
        }
    }
    let groups = groups.into_iter().flat_map(split_if_several).collect();
    let mixers = join_if_one_layer(groups).into_iter();
    mixers.map(|g| Mixer { first: g[0].position, last: g.iter().map(|e| e.position).max().unwrap_or(0) }).collect()
}

fn collect_evidence(spine: &Spine, states: &[StatePair]) -> Vec<MixerEvidence> {
    let rounds = rounds(spine);
    let attentions = self_attentions(spine, states);
    let updated_states = states.iter().filter(|s| s.change != StateChange::ReadOnly);
    let mut evidence = vec![];
    for state in updated_states {
        for join in joins_with_entry(spine, state.past).into_iter().filter(|join| feeds_spine(spine, *join)) {
            if let Some(position) = spine.position(join) {
                let digits = Some(digits(&spine.graph().value(state.past).name));
                let attention = attentions.contains(&join);
                evidence.push(MixerEvidence { position, digits, attention, round: rounds[join.0 as usize].0 });
            }
        }
    }
    for id in attentions {
        if let Some(position) = spine.position(id) {
            evidence.push(MixerEvidence { position, digits: None, attention: true, round: rounds[id.0 as usize].0 });
        }
    }
    evidence
}

/// The first nodes downstream of a state that also depend on the entry. Other nodes, such as a `Slice` or a `Cast` of the state, may come before.
fn joins_with_entry(spine: &Spine, past: ValueId) -> Vec<NodeId> {
    let mut seen = BTreeSet::new();
    let mut todo: Vec<NodeId> = spine.flow.data_consumers(past).collect();
    let mut joins = vec![];
    while let Some(id) = todo.pop() {
        if !seen.insert(id) {
            continue;
        }
        match spine.depends_on_entry[id.0 as usize] {
            true => joins.push(id),
            false => todo.extend(spine.graph().node(id).writes().flat_map(|v| spine.flow.data_consumers(v))),
        }
    }
    joins
}

/// Whether a node on the path from entry to output depends on this node.
fn feeds_spine(spine: &Spine, id: NodeId) -> bool {
    if spine.on_path[id.0 as usize] {
        return true;
    }
    let mut seen = BTreeSet::from([id]);
    let mut todo = vec![id];
    while let Some(id) = todo.pop() {
        for next in spine.graph().node(id).writes().flat_map(|v| spine.flow.data_consumers(v)) {
            if spine.on_path[next.0 as usize] {
                return true;
            }
            if seen.insert(next) {
                todo.push(next);
            }
        }
    }
    false
}

/// Attentions whose keys and values come from the hidden state, or from a state that grows with it: self-attention, not
/// cross-attention.
fn self_attentions(spine: &Spine, states: &[StatePair]) -> BTreeSet<NodeId> {
    let read_only: BTreeSet<ValueId> =
        states.iter().filter(|s| s.change == StateChange::ReadOnly).map(|s| s.past).collect();
    let whole = spine.graph().node_ids().filter(|id| ops::is_attention(spine.graph().node(*id)));
    let whole = whole.filter(|id| spine.on_path[id.0 as usize] && is_self_attention(spine, *id, &read_only));
    let mut found: BTreeSet<NodeId> = whole.collect();
    let after_softmax = downstream_of_softmax(spine);
    let products = spine.graph().node_ids().filter(|id| spine.on_path[id.0 as usize] && contracts(spine, *id));
    let products: Vec<NodeId> = products.collect();
    let weighted_sums = |id: &&NodeId| spine.flow.data_reads(**id).any(|v| is_any(spine, v, &after_softmax));
    let mut cores: Vec<NodeId> = products.iter().filter(weighted_sums).copied().collect();
    if cores.is_empty() && found.is_empty() && states.is_empty() {
        cores = products;
    }
    found.extend(cores.into_iter().filter(|id| both_sides_depend_on_entry(spine, *id)));
    found
}

/// Whether a node is a matrix product of two activations.
fn contracts(spine: &Spine, id: NodeId) -> bool {
    let reads = spine.flow.data_reads(id).collect::<BTreeSet<_>>();
    ops::is_contraction(spine.graph().node(id)) && (reads.len() >= 2 || multiplies_by_itself(spine, id))
}

fn multiplies_by_itself(spine: &Spine, id: NodeId) -> bool {
    let inputs = &spine.graph().node(id).inputs;
    inputs.len() == 2 && inputs[0] == inputs[1]
}

fn both_sides_depend_on_entry(spine: &Spine, id: NodeId) -> bool {
    spine.flow.data_reads(id).all(|v| is_any(spine, v, &spine.depends_on_entry))
}

fn is_any(spine: &Spine, value: ValueId, set: &[bool]) -> bool {
    spine.graph().producer(value).is_some_and(|p| set[p.0 as usize])
}

/// Whether a fused operator is self-attention: its keys (the second input) come from the hidden state, are packed with
/// the queries, or are in a state that grows.
fn is_self_attention(spine: &Spine, id: NodeId, read_only: &BTreeSet<ValueId>) -> bool {
    let node = spine.graph().node(id);
    if node.reads().any(|v| read_only.contains(&v)) {
        return false;
    }
    match node.inputs.get(1).copied().flatten() {
        Some(key) => {
            spine.flow.weights.is_weight_like(spine.graph(), key) || is_any(spine, key, &spine.depends_on_entry)
        }
        None => true,
    }
}

/// Nodes whose output is the softmax of a product of activations, possibly moved, masked or scaled.
fn downstream_of_softmax(spine: &Spine) -> Vec<bool> {
    let graph = spine.graph();
    let mut scores = vec![false; graph.nodes.len()];
    let mut weights = vec![false; graph.nodes.len()];
    for id in graph.node_ids().filter(|id| matches!(spine.positions[id.0 as usize], SpinePosition::At(_))) {
        let node = graph.node(id);
        let from = |set: &[bool]| spine.flow.data_producers(id).any(|p| set[p.0 as usize]);
        let passes = ops::is_movement(node) || (ops::is_elementwise_or_reduction(node) && !ops::is_softmax(node));
        let i = id.0 as usize;
        scores[i] = contracts(spine, id) || (passes && from(&scores));
        weights[i] = (ops::is_softmax(node) && from(&scores)) || (passes && from(&weights));
        // A decomposed softmax (Exp, ReduceSum, Div) ends with a division by a sum.
        if node.op_type == "Div" && passes && from(&scores) && divides_by_sum(spine, id) {
            weights[i] = true;
        }
    }
    weights
}

fn divides_by_sum(spine: &Spine, id: NodeId) -> bool {
    let divisor = spine.graph().node(id).inputs.get(1).copied().flatten();
    divisor.and_then(|v| spine.graph().producer(v)).is_some_and(|p| spine.graph().node(p).op_type == "ReduceSum")
}

/// Splits a group that holds several layers: values that skip layers can hide the dominators between them.
fn split_if_several(group: Vec<MixerEvidence>) -> Vec<Vec<MixerEvidence>> {
    let names: BTreeSet<&Vec<u64>> = group.iter().filter_map(layer_number).collect();
    let attended: BTreeSet<usize> = group.iter().filter(|e| e.attention).map(|e| e.round).collect();
    if names.len() < 2 && attended.len() < 2 {
        return vec![group];
    }
    let mut parts: Vec<Vec<MixerEvidence>> = vec![];
    for item in group {
        match parts.last_mut() {
            Some(part) if part[0].round == item.round => part.push(item),
            _ => parts.push(vec![item]),
        }
    }
    parts
}

fn layer_number(evidence: &MixerEvidence) -> Option<&Vec<u64>> {
    evidence.digits.as_ref().filter(|d| !d.is_empty())
}

/// Joins neighbours whose states carry the same number: they are one layer, such as time mixing and channel mixing.
fn join_if_one_layer(groups: Vec<Vec<MixerEvidence>>) -> Vec<Vec<MixerEvidence>> {
    let mut joined: Vec<Vec<MixerEvidence>> = vec![];
    for group in groups {
        let number = group.iter().find_map(layer_number).cloned();
        match joined.last_mut() {
            Some(last) if number.is_some() && last.iter().find_map(layer_number).cloned() == number => {
                last.extend(group)
            }
            _ => joined.push(group),
        }
    }
    joined
}
