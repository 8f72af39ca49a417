//! The spine: the path of the hidden state through the model. Finds the entry, its post-dominators (called dominators here:
//! the nodes that every path from the entry to the main output passes), a position for every heavy node, and the values
//! that are live at each position. Does not know blocks. A node is heavy if it depends on matrix weights or state
//! ([`crate::flow`]); all others are light.

use crate::flow::{Flow, PostDominators, find_entry};
use crate::{Graph, NodeId, Origin, StatePair, ValueId, ops};
use hpp_schema::Dim;
use std::collections::BTreeSet;
use std::ops::Range;

/// Where a node is relative to the spine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SpinePosition {
    /// At the entry: computes the entry value (the first hidden state), looks up another table by token id (per-layer embeddings), or computes,
    /// from such a lookup, something that the entry value depends on.
    Entry,
    /// At this position in execution order: a cut after it has the node on its left.
    At(usize),
    /// At no position, because it depends on no layer: masks, positions, rotary tables, shapes. Computed wherever it is
    /// read.
    Unpositioned,
    /// Computes on weights only.
    WeightOnly,
}

/// A model arranged along its hidden state.
pub(crate) struct Spine<'a> {
    pub flow: Flow<'a>,
    pub positions: Vec<SpinePosition>,
    /// On a data path from the entry to the main output.
    pub on_path: Vec<bool>,
    /// Depends on the contents of the entry value.
    pub depends_on_entry: Vec<bool>,
    /// Post-dominators of the entry: nodes that every path from it to the main output passes, in order.
    pub dominators: Vec<NodeId>,
    /// For each position, the number of values that cross a cut just before it.
    pub live: Vec<u64>,
    /// For each position, how many of these values grow faster than the entry value, such as attention scores, which grow with the square of the
    /// sequence.
    pub live_fast_growing: Vec<u64>,
    /// For each position, how many of these values have an unknown element type, such as sequences: no partition can receive them. 0 if the entry
    /// value's type is unknown too, because then no types were inferred.
    pub live_untyped: Vec<u64>,
    /// For each position, the bytes that cross, with a nominal size for symbols.
    pub live_bytes: Vec<u64>,
}

impl<'a> Spine<'a> {
    /// Arranges a model; `None` if no node computes an output.
    pub fn new(flow: Flow<'a>, states: &[StatePair]) -> Option<Self> {
        let sink = flow.sink(states)?;
        let to_sink = PostDominators::new(&flow, sink, &BTreeSet::new());
        let entry = find_entry(&flow, &to_sink)?;
        let mut spine = Self::along(flow, states, entry, &to_sink);
        let long = long_edges(&spine);
        if !long.is_empty() {
            let to_sink = PostDominators::new(&spine.flow, sink, &long);
            let dominators =
                to_sink.first_common(spine.flow.data_consumers(entry)).map(|n| to_sink.chain(n)).unwrap_or_default();
            spine.dominators = dominators.into_iter().filter(|n| spine.on_path[n.0 as usize]).collect();
        }
        Some(spine)
    }

    fn along(flow: Flow<'a>, states: &[StatePair], entry: ValueId, to_sink: &PostDominators) -> Self {
        let graph = flow.graph;
        let before_entry = graph.producer(entry).map_or_else(|| vec![false; graph.nodes.len()], |p| flow.upstream(p));
        let entry_nodes = entry_nodes(&flow, entry, &before_entry);
        let lookups = token_lookups(&flow, &before_entry, &entry_nodes);
        let consumers: Vec<NodeId> = flow.data_consumers(entry).filter(|c| !entry_nodes[c.0 as usize]).collect();
        let depends_on_entry = flow.downstream(&consumers);
        let from_lookups = flow.downstream(&lookups);
        let needs_position: Vec<bool> =
            (0..graph.nodes.len()).map(|i| flow.heavy[i] || depends_on_entry[i] || from_lookups[i]).collect();
        let on_path: Vec<bool> =
            graph.node_ids().map(|n| depends_on_entry[n.0 as usize] && to_sink.reaches(n)).collect();
        let dominators = to_sink.first_common(consumers.iter().copied()).map(|n| to_sink.chain(n)).unwrap_or_default();
        let mut positions: Vec<SpinePosition> = graph
            .node_ids()
            .map(|n| match n.0 as usize {
                _ if flow.weights.is_weight_only(n) => SpinePosition::WeightOnly,
                i if entry_nodes[i] || lookups.contains(&n) => SpinePosition::Entry,
                i if from_lookups[i] && before_entry[i] => SpinePosition::Entry,
                i if on_path[i] => SpinePosition::At(i),
                _ => SpinePosition::Unpositioned,
            })
            .collect();
        place_before_consumers(&flow, to_sink, &needs_position, &mut positions);
        place_after_producers(&flow, states, &needs_position, &mut positions);
        let mut spine = Spine {
            flow,
            positions,
            on_path,
            depends_on_entry,
            dominators,
            live: vec![],
            live_fast_growing: vec![],
            live_untyped: vec![],
            live_bytes: vec![],
        };
        spine.count_live(entry);
        spine
    }

    pub fn graph(&self) -> &'a Graph {
        self.flow.graph
    }

    pub fn position(&self, id: NodeId) -> Option<usize> {
        match self.positions[id.0 as usize] {
            SpinePosition::At(position) => Some(position),
            _ => None,
        }
    }

    /// The position from which a value exists. `None` for values that need not cross a cut: weights and the outputs of unpositioned nodes.
    fn first_position(&self, value: ValueId, entry: ValueId) -> Option<usize> {
        match self.graph().value(value).origin {
            Origin::Input => (value == entry).then_some(0),
            Origin::Weight(_) => None,
            Origin::Node { node, .. } => match self.positions[node.0 as usize] {
                SpinePosition::Entry => Some(0),
                SpinePosition::At(position) => Some(position + 1),
                SpinePosition::Unpositioned | SpinePosition::WeightOnly => None,
            },
        }
    }

    fn count_live(&mut self, entry: ValueId) {
        let spans: Vec<_> = self
            .graph()
            .value_ids()
            .filter_map(|v| {
                let last = self.flow.data_consumers(v).filter_map(|c| self.position(c)).max()?;
                let first = self.first_position(v, entry)?;
                (first <= last).then_some((v, first..last + 1))
            })
            .collect();
        let (graph, of_entry) = (self.graph(), growth(self.graph(), entry));
        let sums = |weight: &dyn Fn(ValueId) -> u64| {
            covering_sums(graph.nodes.len() + 1, spans.iter().map(|(v, span)| (span.clone(), weight(*v))))
        };
        self.live = sums(&|_| 1);
        self.live_fast_growing = sums(&|v| u64::from(of_entry.is_some() && growth(graph, v) > of_entry));
        let is_typed = |v: ValueId| graph.value(v).dtype.is_some();
        self.live_untyped = sums(&|v| u64::from(is_typed(entry) && !is_typed(v)));
        self.live_bytes = sums(&|v| nominal_bytes(graph, v));
    }
}

/// For each position, the sum over all spans that cover it. Each span comes with the number to add.
fn covering_sums(positions: usize, spans: impl Iterator<Item = (Range<usize>, u64)>) -> Vec<u64> {
    let mut change = vec![0i128; positions + 1];
    for (span, weight) in spans {
        change[span.start.min(positions)] += i128::from(weight);
        change[span.end.min(positions)] -= i128::from(weight);
    }
    let mut sum = 0;
    change[..positions]
        .iter()
        .map(|c| {
            sum += c;
            u64::try_from(sum).unwrap_or(u64::MAX)
        })
        .collect()
}

/// How fast a value grows with the symbols of its shape: the degree of its number of elements as a polynomial; `None` if a
/// dimension is unknown.
fn growth(graph: &Graph, value: ValueId) -> Option<usize> {
    let degree = |dim: &Dim| match dim {
        Dim::Known(terms) => terms.keys().map(Vec::len).max().or(Some(0)),
        Dim::Unknown => None,
    };
    graph.value(value).shape.as_ref()?.iter().map(degree).sum()
}

/// Bytes of a value, with every symbol at one nominal size.
fn nominal_bytes(graph: &Graph, value: ValueId) -> u64 {
    const NOMINAL: u64 = 16;
    let value = graph.value(value);
    let elements =
        value.shape.iter().flatten().map(|d| d.as_fixed().unwrap_or(NOMINAL)).fold(1u64, u64::saturating_mul);
    value.dtype.and_then(|t| t.bytes_for(elements)).unwrap_or(elements).min(1 << 40)
}

/// Light nodes that only the entry value needs: the lookup, its scaling, position embeddings, a norm. `before_entry` are the nodes that the entry
/// value depends on.
fn entry_nodes(flow: &Flow, entry: ValueId, before_entry: &[bool]) -> Vec<bool> {
    let mut inside = vec![false; flow.graph.nodes.len()];
    let Some(producer) = flow.graph.producer(entry) else { return inside };
    inside[producer.0 as usize] = true;
    for id in flow.graph.node_ids().rev().filter(|id| *id < producer && before_entry[id.0 as usize]) {
        let node = flow.graph.node(id);
        let returned = node.writes().any(|v| flow.graph.outputs.contains(&v));
        let mut consumers = node.writes().flat_map(|v| flow.data_consumers(v));
        inside[id.0 as usize] = !flow.heavy[id.0 as usize] && !returned && consumers.all(|c| inside[c.0 as usize]);
    }
    inside
}

/// Other lookups in matrix weights by the indices that the entry uses (per-layer embeddings). Their tables are as large
/// as the embedding's, so they stay with it.
fn token_lookups(flow: &Flow, before_entry: &[bool], entry_nodes: &[bool]) -> Vec<NodeId> {
    let mut keys: BTreeSet<ValueId> = BTreeSet::new();
    for id in flow.graph.node_ids().filter(|id| before_entry[id.0 as usize] && flow.looks_up_table(*id)) {
        keys.extend(flow.data_reads(id).filter(|v| {
            matches!(flow.graph.value(*v).dtype, None | Some(hpp_schema::DType::Int64 | hpp_schema::DType::Int32))
        }));
    }
    let is_light = |id: &NodeId| !flow.heavy[id.0 as usize] && !entry_nodes[id.0 as usize];
    let by_token = |id: &NodeId| flow.data_reads(*id).any(|v| keys.contains(&v));
    flow.graph.node_ids().filter(|id| is_light(id) && flow.looks_up_table(*id) && by_token(id)).collect()
}

/// Places heavy nodes that feed the spine from the side (cross-attention projections) at their first consumer.
fn place_before_consumers(
    flow: &Flow,
    to_sink: &PostDominators,
    needs_position: &[bool],
    positions: &mut [SpinePosition],
) {
    for id in flow.graph.node_ids().rev() {
        let i = id.0 as usize;
        if !needs_position[i] || positions[i] != SpinePosition::Unpositioned || !to_sink.reaches(id) {
            continue;
        }
        let consumers = flow.graph.node(id).writes().flat_map(|v| flow.data_consumers(v));
        let first = consumers.map(|c| positions[c.0 as usize]).filter(|p| matches!(p, SpinePosition::At(_))).min();
        positions[i] = first.unwrap_or(SpinePosition::Unpositioned);
    }
}

/// Places heavy nodes that only compute side outputs (a cast `present`) at their last producer.
fn place_after_producers(flow: &Flow, states: &[StatePair], needs_position: &[bool], positions: &mut [SpinePosition]) {
    for id in flow.graph.node_ids() {
        let i = id.0 as usize;
        if !needs_position[i] || positions[i] != SpinePosition::Unpositioned {
            continue;
        }
        let last = flow
            .data_producers(id)
            .map(|p| positions[p.0 as usize])
            .filter(|p| matches!(p, SpinePosition::At(_)))
            .max();
        let beside_state = || {
            let pasts = flow.data_reads(id).filter_map(|v| flow.pasts.get(&v));
            let readers = pasts.flat_map(|s| flow.data_consumers(states[*s].past));
            readers.map(|r| positions[r.0 as usize]).filter(|p| matches!(p, SpinePosition::At(_))).min()
        };
        positions[i] = last.or_else(beside_state).unwrap_or(SpinePosition::At(0));
    }
}

/// Edges that skip three or more rounds of weights and mixing (shared key/value caches, value residuals, per-layer
/// inputs). The search for dominators ignores them, because they would hide the nodes that all other paths pass.
fn long_edges(spine: &Spine) -> BTreeSet<(NodeId, NodeId)> {
    const MIN_SKIPPED_ROUNDS: usize = 3;
    let rounds = rounds(spine);
    let mut long = BTreeSet::new();
    for id in spine.graph().node_ids().filter(|id| spine.on_path[id.0 as usize]) {
        for producer in spine.flow.data_producers(id).filter(|p| spine.on_path[p.0 as usize]) {
            if rounds[id.0 as usize].0.saturating_sub(rounds[producer.0 as usize].0) >= MIN_SKIPPED_ROUNDS {
                long.insert((producer, id));
            }
        }
    }
    long
}

/// For each node, the number of rounds of "weights, then a mixer" upstream of it, and whether weights followed the last
/// mixer.
pub(crate) fn rounds(spine: &Spine) -> Vec<(usize, bool)> {
    let flow = &spine.flow;
    let mut rounds = vec![(0, true); spine.graph().nodes.len()];
    // Nodes whose values come from states, and not from the entry.
    let mut holds_state = vec![false; spine.graph().nodes.len()];
    for id in spine.graph().node_ids() {
        let i = id.0 as usize;
        let reads_state = flow.data_reads(id).any(|v| flow.pasts.contains_key(&v))
            || flow.data_producers(id).any(|p| holds_state[p.0 as usize]);
        holds_state[i] = reads_state && !spine.depends_on_entry[i];
        let joins_state = reads_state && spine.depends_on_entry[i];
        if !matches!(spine.positions[i], SpinePosition::At(_)) {
            continue;
        }
        let upstream = flow.data_producers(id).map(|p| rounds[p.0 as usize]).max().unwrap_or((0, true));
        rounds[i] = match upstream {
            (n, true) if joins_state || is_mixer(spine, id) => (n + 1, false),
            (n, false) if flow.is_weighted(id) => (n, true),
            other => other,
        };
    }
    rounds
}

/// Whether a node by itself looks like a token mixer: an attention, or a product of two activations.
fn is_mixer(spine: &Spine, id: NodeId) -> bool {
    let flow = &spine.flow;
    let node = spine.graph().node(id);
    let contracts = ops::is_contraction(node)
        && node.reads().filter(|v| !flow.weights.is_weight_like(spine.graph(), *v)).count() >= 2;
    ops::is_attention(node) || contracts
}

#[cfg(test)]
mod tests {
    use super::covering_sums;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sums_cover_each_position(spans in prop::collection::vec((0usize..12, 0usize..12, 0u64..9), 0..8)) {
            let spans: Vec<_> = spans.into_iter().map(|(a, b, weight)| (a.min(b)..a.max(b), weight)).collect();
            for (position, sum) in covering_sums(10, spans.iter().cloned()).into_iter().enumerate() {
                let covering = spans.iter().filter(|(span, _)| span.contains(&position));
                prop_assert_eq!(sum, covering.map(|(_, weight)| weight).sum::<u64>());
            }
        }
    }
}
