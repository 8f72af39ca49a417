//! Lays the heavy part of a model out along its hidden state: the entry, the nodes all paths pass, a position for
//! everything, and how many values are live at each. Decides no blocks.

use crate::flow::{Flow, ToSink, find_entry};
use crate::order::sweep;
use crate::{Graph, NodeId, Origin, StatePair, ValueId, ops};
use std::collections::BTreeSet;

/// Where a node stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// Makes the value through which the hidden state enters, or looks up something else by token.
    Entry,
    /// At this position: any cut after it has the node on its left. Positions are execution order along the spine.
    At(usize),
    /// Depends on no layer: masks, positions, rotary caches, shapes.
    Light,
    /// Computes on weights alone.
    WeightOnly,
}

/// A model laid out along its hidden state.
pub(crate) struct Spine<'a> {
    pub flow: Flow<'a>,
    pub place: Vec<Place>,
    /// On a data path from the entry to the main output.
    pub on_path: Vec<bool>,
    /// Data-downstream of the entry.
    pub below_entry: Vec<bool>,
    /// Nodes that every path from the entry to the main output passes, in order.
    pub chain: Vec<NodeId>,
    /// Values that cross a cut just before each position.
    pub live: Vec<u64>,
    /// Bytes that cross, as far as sizes are known; symbols count as a nominal size.
    pub live_bytes: Vec<u64>,
}

impl<'a> Spine<'a> {
    /// Lays a model out; `None` when it has no output that anything computes.
    pub fn new(flow: Flow<'a>, states: &[StatePair]) -> Option<Self> {
        let sink = flow.sink(states)?;
        let to_sink = ToSink::new(&flow, sink, &BTreeSet::new());
        let entry = find_entry(&flow, &to_sink)?;
        let mut spine = Self::along(flow, states, entry, &to_sink);
        let long = long_edges(&spine);
        if !long.is_empty() {
            let to_sink = ToSink::new(&spine.flow, sink, &long);
            let chain = to_sink.meet(spine.flow.data_consumers(entry)).map(|n| to_sink.chain(n)).unwrap_or_default();
            spine.chain = chain.into_iter().filter(|n| spine.on_path[n.0 as usize]).collect();
        }
        Some(spine)
    }

    fn along(flow: Flow<'a>, states: &[StatePair], entry: ValueId, to_sink: &ToSink) -> Self {
        let graph = flow.graph;
        let entry_nodes = entry_nodes(&flow, entry);
        let lookups = token_lookups(&flow, entry, &entry_nodes);
        let consumers: Vec<NodeId> = flow.data_consumers(entry).filter(|c| !entry_nodes[c.0 as usize]).collect();
        let below_entry = flow.downstream(&consumers);
        let from_lookups = flow.downstream(&lookups);
        let carried: Vec<bool> =
            (0..graph.nodes.len()).map(|i| flow.heavy[i] || below_entry[i] || from_lookups[i]).collect();
        let on_path: Vec<bool> = graph.node_ids().map(|n| below_entry[n.0 as usize] && to_sink.reaches(n)).collect();
        let chain = to_sink.meet(consumers.iter().copied()).map(|n| to_sink.chain(n)).unwrap_or_default();
        let mut place: Vec<Place> = graph
            .node_ids()
            .map(|n| match n.0 as usize {
                _ if flow.weights.is_weight_only(n) => Place::WeightOnly,
                i if entry_nodes[i] || lookups.contains(&n) => Place::Entry,
                i if on_path[i] => Place::At(i),
                _ => Place::Light,
            })
            .collect();
        place_before_consumers(&flow, to_sink, &carried, &mut place);
        place_after_producers(&flow, states, &carried, &mut place);
        let mut spine = Spine { flow, place, on_path, below_entry, chain, live: vec![], live_bytes: vec![] };
        spine.count_live(entry);
        spine
    }

    pub fn graph(&self) -> &'a Graph {
        self.flow.graph
    }

    pub fn position(&self, id: NodeId) -> Option<usize> {
        match self.place[id.0 as usize] {
            Place::At(position) => Some(position),
            _ => None,
        }
    }

    /// How far along a value begins to exist, when it is one that has to be carried: not light, not a weight.
    fn born(&self, value: ValueId, entry: ValueId) -> Option<usize> {
        match self.graph().value(value).origin {
            Origin::Input => (value == entry).then_some(0),
            Origin::Weight(_) => None,
            Origin::Node { node, .. } => match self.place[node.0 as usize] {
                Place::Entry => Some(0),
                Place::At(position) => Some(position + 1),
                Place::Light | Place::WeightOnly => None,
            },
        }
    }

    fn count_live(&mut self, entry: ValueId) {
        let spans: Vec<_> = self
            .graph()
            .value_ids()
            .filter_map(|v| {
                let last = self.flow.data_consumers(v).filter_map(|c| self.position(c)).max()?;
                let born = self.born(v, entry)?;
                (born <= last).then_some((v, born..last + 1))
            })
            .collect();
        let positions = self.graph().nodes.len() + 1;
        self.live = sweep(positions, spans.iter().map(|(_, span)| (span.clone(), 1)));
        self.live_bytes =
            sweep(positions, spans.iter().map(|(v, span)| (span.clone(), nominal_bytes(self.graph(), *v))));
    }
}

/// Bytes of a value with every symbol at one nominal size.
fn nominal_bytes(graph: &Graph, value: ValueId) -> u64 {
    const NOMINAL: u64 = 16;
    let value = graph.value(value);
    let elements =
        value.shape.iter().flatten().map(|d| d.as_fixed().unwrap_or(NOMINAL)).fold(1u64, u64::saturating_mul);
    value.dtype.and_then(|t| t.bytes_for(elements)).unwrap_or(elements).min(1 << 40)
}

/// Light nodes that make the entry and serve nothing else: the lookup, its scaling, position embeddings, a norm.
fn entry_nodes(flow: &Flow, entry: ValueId) -> Vec<bool> {
    let mut inside = vec![false; flow.graph.nodes.len()];
    let Some(maker) = flow.graph.producer(entry) else { return inside };
    inside[maker.0 as usize] = true;
    let upstream = flow.upstream(maker);
    for id in flow.graph.node_ids().rev().filter(|id| *id < maker && upstream[id.0 as usize]) {
        let node = flow.graph.node(id);
        let returned = node.writes().any(|v| flow.graph.outputs.contains(&v));
        let mut consumers = node.writes().flat_map(|v| flow.data_consumers(v));
        inside[id.0 as usize] = !flow.heavy[id.0 as usize] && !returned && consumers.all(|c| inside[c.0 as usize]);
    }
    inside
}

/// Other lookups in matrix weights by what the entry is looked up by (per-layer embeddings): their tables are as large
/// as the embedding's, so they stay with it.
fn token_lookups(flow: &Flow, entry: ValueId, entry_nodes: &[bool]) -> Vec<NodeId> {
    let Some(maker) = flow.graph.producer(entry) else { return vec![] };
    let upstream = flow.upstream(maker);
    let mut keys: BTreeSet<ValueId> = BTreeSet::new();
    for id in flow.graph.node_ids().filter(|id| upstream[id.0 as usize] && flow.looks_up_table(*id)) {
        keys.extend(flow.data_reads(id).filter(|v| {
            matches!(flow.graph.value(*v).dtype, None | Some(hpp_schema::DType::Int64 | hpp_schema::DType::Int32))
        }));
    }
    let light = |id: &NodeId| !flow.heavy[id.0 as usize] && !entry_nodes[id.0 as usize];
    let by_token = |id: &NodeId| flow.data_reads(*id).any(|v| keys.contains(&v));
    flow.graph.node_ids().filter(|id| light(id) && flow.looks_up_table(*id) && by_token(id)).collect()
}

/// Carried nodes beside the spine that feed it (cross-attention projections) stand where they are first needed.
fn place_before_consumers(flow: &Flow, to_sink: &ToSink, carried: &[bool], place: &mut [Place]) {
    for id in flow.graph.node_ids().rev() {
        let i = id.0 as usize;
        if !carried[i] || place[i] != Place::Light || !to_sink.reaches(id) {
            continue;
        }
        let consumers = flow.graph.node(id).writes().flat_map(|v| flow.data_consumers(v));
        let first = consumers.map(|c| place[c.0 as usize]).filter(|p| matches!(p, Place::At(_))).min();
        place[i] = first.unwrap_or(Place::Light);
    }
}

/// Carried nodes that only make side outputs (a cast `present`) stand where the last thing they need is made.
fn place_after_producers(flow: &Flow, states: &[StatePair], carried: &[bool], place: &mut [Place]) {
    for id in flow.graph.node_ids() {
        let i = id.0 as usize;
        if !carried[i] || place[i] != Place::Light {
            continue;
        }
        let last = flow.data_producers(id).map(|p| place[p.0 as usize]).filter(|p| matches!(p, Place::At(_))).max();
        let beside_state = || {
            let pasts = flow.data_reads(id).filter_map(|v| flow.pasts.get(&v));
            let readers = pasts.flat_map(|s| flow.data_consumers(states[*s].past));
            readers.map(|r| place[r.0 as usize]).filter(|p| matches!(p, Place::At(_))).min()
        };
        place[i] = last.or_else(beside_state).unwrap_or(Place::At(0));
    }
}

/// Edges that skip over three or more rounds of mixing and weighting (shared key/value caches, value residuals,
/// per-layer inputs): carried past layers, they must not hide the nodes through which everything else passes.
fn long_edges(spine: &Spine) -> BTreeSet<(NodeId, NodeId)> {
    const LONG: usize = 3;
    let rounds = rounds(spine);
    let mut long = BTreeSet::new();
    for id in spine.graph().node_ids().filter(|id| spine.on_path[id.0 as usize]) {
        for producer in spine.flow.data_producers(id).filter(|p| spine.on_path[p.0 as usize]) {
            if rounds[id.0 as usize].0.saturating_sub(rounds[producer.0 as usize].0) >= LONG {
                long.insert((producer, id));
            }
        }
    }
    long
}

/// How many rounds of "weights, then a mixer" lie behind each node, and whether weights came since the last mixer.
pub(crate) fn rounds(spine: &Spine) -> Vec<(usize, bool)> {
    let flow = &spine.flow;
    let mut rounds = vec![(0, true); spine.graph().nodes.len()];
    for id in spine.graph().node_ids() {
        let i = id.0 as usize;
        if !matches!(spine.place[i], Place::At(_)) {
            continue;
        }
        let behind = flow.data_producers(id).map(|p| rounds[p.0 as usize]).max().unwrap_or((0, true));
        rounds[i] = match behind {
            (n, true) if is_mixer(spine, id) => (n + 1, false),
            (n, false) if flow.is_weighted(id) => (n, true),
            other => other,
        };
    }
    rounds
}

/// Mixes tokens as far as one node shows: an attention, a product of two activations, a reader of state.
fn is_mixer(spine: &Spine, id: NodeId) -> bool {
    let flow = &spine.flow;
    let node = spine.graph().node(id);
    let contracts = ops::is_contraction(node)
        && node.reads().filter(|v| !flow.weights.is_weight_like(spine.graph(), *v)).count() >= 2;
    ops::is_attention(node) || contracts || flow.data_reads(id).any(|v| flow.pasts.contains_key(&v))
}
