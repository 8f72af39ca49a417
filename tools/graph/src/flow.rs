//! Classifies nodes as heavy (they depend, directly or indirectly, on matrix weights or states) or light (masks,
//! positions, rotary tables, lookups), and finds the value through which the hidden state enters. Does not know blocks.

use crate::ops;
use crate::{Graph, NodeId, Origin, StatePair, ValueId, WeightUse};
use hpp_schema::DType;
use petgraph::algo::dominators::simple_fast;
use petgraph::graph::DiGraph;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// The dataflow of a model, without shape reads and weights.
pub(crate) struct Flow<'a> {
    pub graph: &'a Graph,
    pub weights: &'a WeightUse,
    /// Past inputs, with the index of their pair.
    pub pasts: BTreeMap<ValueId, usize>,
    /// Nodes that compute with a matrix weight.
    pub weighted: Vec<bool>,
    /// Nodes that are weighted or read a state, and all nodes that depend on them.
    pub heavy: Vec<bool>,
}

impl<'a> Flow<'a> {
    pub fn new(graph: &'a Graph, weights: &'a WeightUse, states: &[StatePair]) -> Self {
        let pasts = states.iter().enumerate().map(|(i, s)| (s.past, i)).collect();
        let count = graph.nodes.len();
        let mut flow = Flow { graph, weights, pasts, weighted: vec![false; count], heavy: vec![false; count] };
        flow.weighted =
            graph.node_ids().map(|id| !weights.is_weight_only(id) && flow.computes_with_matrix(id)).collect();
        let seeds: Vec<NodeId> = graph.node_ids().filter(|id| flow.is_seed(*id)).collect();
        flow.heavy = flow.downstream(&seeds);
        flow
    }

    /// Values whose contents a node reads, without weights.
    pub fn data_reads(&self, id: NodeId) -> impl Iterator<Item = ValueId> + '_ {
        let node = self.graph.node(id);
        let reads = (!ops::reads_shape_only(node)).then(|| node.reads());
        reads.into_iter().flatten().filter(|v| !self.weights.is_weight_like(self.graph, *v))
    }

    /// Producers of the values whose contents a node reads.
    pub fn data_producers(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        self.data_reads(id).filter_map(|v| self.graph.producer(v))
    }

    /// Nodes that read the contents of a value.
    pub fn data_consumers(&self, value: ValueId) -> impl Iterator<Item = NodeId> + '_ {
        self.graph.value(value).consumers.iter().copied().filter(|c| !ops::reads_shape_only(self.graph.node(*c)))
    }

    fn is_seed(&self, id: NodeId) -> bool {
        self.is_weighted(id) || self.data_reads(id).any(|v| self.pasts.contains_key(&v))
    }

    /// Whether a node computes with a matrix weight.
    pub fn is_weighted(&self, id: NodeId) -> bool {
        self.weighted[id.0 as usize]
    }

    /// Whether a node reads a matrix weight for more than a lookup, an elementwise operation or data movement.
    fn computes_with_matrix(&self, id: NodeId) -> bool {
        let node = self.graph.node(id);
        let passive = ops::is_lookup(node)
            || ops::is_elementwise_or_reduction(node)
            || ops::is_movement(node)
            || ops::reads_shape_only(node);
        !passive && !ops::has_body(node) && node.reads().any(|v| self.weights.is_matrix(self.graph, v))
            || self.has_heavy_body(id)
    }

    /// Whether a node reads a matrix weight as a lookup table.
    pub fn looks_up_table(&self, id: NodeId) -> bool {
        ops::is_lookup(self.graph.node(id))
            && self.graph.node(id).reads().any(|v| self.weights.is_matrix(self.graph, v))
    }

    /// Whether a node has a body that captures a matrix weight and computes with it. Assumed of a body that is repeated and of a large body. The
    /// small bodies of an `If` usually choose between constants.
    fn has_heavy_body(&self, id: NodeId) -> bool {
        let node = self.graph.node(id);
        let bodies = node.attributes.values().filter_map(|a| match a {
            crate::Attribute::Body(body) => Some(body),
            _ => None,
        });
        let most_nodes = bodies.map(|b| b.nodes).max();
        let computes = most_nodes.is_some_and(|nodes| nodes > 16 || ops::repeats_body(node));
        computes && node.captures.iter().any(|v| self.weights.is_matrix(self.graph, *v))
    }

    /// These nodes and all nodes that depend on the contents of their outputs.
    pub fn downstream(&self, from: &[NodeId]) -> Vec<bool> {
        let mut reached = vec![false; self.graph.nodes.len()];
        for id in from {
            reached[id.0 as usize] = true;
        }
        for id in self.graph.node_ids().filter(|id| !self.weights.is_weight_only(*id)) {
            if !reached[id.0 as usize] {
                reached[id.0 as usize] = self.data_producers(id).any(|p| reached[p.0 as usize]);
            }
        }
        reached
    }

    /// The node and all nodes whose contents it depends on.
    pub fn upstream(&self, of: NodeId) -> Vec<bool> {
        let mut reached = vec![false; self.graph.nodes.len()];
        reached[of.0 as usize] = true;
        for id in self.graph.node_ids().rev().filter(|id| *id <= of) {
            if reached[id.0 as usize] {
                self.data_producers(id).for_each(|p| reached[p.0 as usize] = true);
            }
        }
        reached
    }

    /// The node that depends on most of the model: the producer of an output, or, where an exporter left the end of the model unconnected, a node
    /// without readers. The producer of a state is chosen only if no other candidate has as many heavy ancestors.
    pub fn sink(&self, states: &[StatePair]) -> Option<NodeId> {
        let presents: BTreeSet<ValueId> = states.iter().filter_map(|s| s.present).collect();
        let computed = self.graph.node_ids().filter(|n| !self.weights.is_weight_only(*n));
        let is_main =
            |n: NodeId| self.graph.node(n).writes().any(|v| self.graph.outputs.contains(&v) && !presents.contains(&v));
        let (main, others): (Vec<NodeId>, Vec<NodeId>) =
            computed.filter(|n| is_main(*n) || self.has_no_reader(*n)).partition(|n| is_main(*n));
        // If one candidate depends on another, it comes later and has more ancestors, so looking at the last 16 is enough.
        let last_16 = |mut nodes: Vec<NodeId>| nodes.split_off(nodes.len().saturating_sub(16));
        let heavy_ancestors = |n: &NodeId| {
            let up = self.upstream(*n);
            up.iter().zip(&self.heavy).filter(|(up, heavy)| **up && **heavy).count()
        };
        last_16(others).into_iter().rev().chain(last_16(main).into_iter().rev()).max_by_key(heavy_ancestors)
    }

    fn has_no_reader(&self, id: NodeId) -> bool {
        self.graph.node(id).writes().all(|v| self.data_consumers(v).next().is_none())
    }
}

/// Immediate post-dominators: for each node, the next node that every path to the sink passes.
pub(crate) struct PostDominators {
    next: Vec<Option<NodeId>>,
    depth: Vec<usize>,
}

impl PostDominators {
    /// Computes post-dominators over all nodes but weight-only ones, and over all edges but those in `skip`.
    pub fn new(flow: &Flow, sink: NodeId, skip: &BTreeSet<(NodeId, NodeId)>) -> Self {
        let count = flow.graph.nodes.len();
        let mut reversed: DiGraph<(), ()> = DiGraph::with_capacity(count, count * 2);
        let index: Vec<_> = (0..count).map(|_| reversed.add_node(())).collect();
        for id in flow.graph.node_ids().filter(|id| !flow.weights.is_weight_only(*id)) {
            for producer in flow.data_producers(id).filter(|p| !skip.contains(&(*p, id))) {
                reversed.add_edge(index[id.0 as usize], index[producer.0 as usize], ());
            }
        }
        let dominators = simple_fast(&reversed, index[sink.0 as usize]);
        let next: Vec<Option<NodeId>> =
            index.iter().map(|i| dominators.immediate_dominator(*i).map(|d| NodeId(d.index() as u32))).collect();
        let mut this = PostDominators { next, depth: vec![0; count] };
        this.depth[sink.0 as usize] = 1;
        // A node's post-dominator comes later in execution order, so a backward sweep sees it first.
        for id in (0..count).rev() {
            if let Some(next) = this.next[id] {
                this.depth[id] = this.depth[next.0 as usize] + 1;
            }
        }
        this
    }

    pub fn reaches(&self, id: NodeId) -> bool {
        self.depth[id.0 as usize] > 0
    }

    pub fn depth(&self, id: NodeId) -> usize {
        self.depth[id.0 as usize]
    }

    /// The first node that all paths from all of these nodes pass.
    pub fn first_common(&self, nodes: impl IntoIterator<Item = NodeId>) -> Option<NodeId> {
        nodes.into_iter().filter(|n| self.reaches(*n)).reduce(|mut a, mut b| {
            while a != b {
                if self.depth(a) >= self.depth(b) {
                    a = self.next[a.0 as usize].expect("deeper than another node, so not the sink");
                } else {
                    b = self.next[b.0 as usize].expect("deeper than another node, so not the sink");
                }
            }
            a
        })
    }

    /// The node and its post-dominators, in order.
    pub fn chain(&self, from: NodeId) -> Vec<NodeId> {
        std::iter::successors(Some(from), |n| self.next[n.0 as usize]).collect()
    }
}

/// The value through which the hidden state enters the layers: embeddings, an image, `inputs_embeds`.
///
/// Candidates are light values whose paths join early. (A mask feeds every layer, so its paths join only in the last.)
/// The entry is the candidate with the most weighted nodes downstream; of several (the norm before the first layer is
/// light too), the earliest.
pub(crate) fn find_entry(flow: &Flow, to_sink: &PostDominators) -> Option<ValueId> {
    const MAX_CANDIDATES: usize = 256;
    let feeds_heavy = |v: ValueId| flow.data_consumers(v).any(|c| flow.heavy[c.0 as usize] && to_sink.reaches(c));
    let light: Vec<ValueId> = flow.graph.value_ids().filter(|v| is_light(flow, *v) && feeds_heavy(*v)).collect();
    let (numbers, others): (Vec<ValueId>, Vec<ValueId>) = light.into_iter().partition(|v| may_be_real(flow, *v));
    let candidates = if numbers.is_empty() { others } else { numbers };
    let meeting = |v: ValueId| Some((to_sink.first_common(flow.data_consumers(v))?, v));
    let mut by_depth: Vec<(NodeId, ValueId)> = candidates.into_iter().filter_map(meeting).collect();
    by_depth.sort_by_key(|(meet, v)| (Reverse(to_sink.depth(*meet)), flow.graph.producer(*v), *v));
    by_depth.truncate(MAX_CANDIDATES);
    let meets: BTreeSet<NodeId> = by_depth.iter().map(|(meet, _)| *meet).collect();
    let remaining: BTreeMap<NodeId, usize> = meets.into_iter().map(|n| (n, count_downstream(flow, &[n]).0)).collect();
    let max_remaining = remaining.values().max()?;
    let early = by_depth.iter().filter(|(meet, _)| remaining[meet] * 3 >= *max_remaining).map(|(_, v)| *v);
    let work_after = |v: ValueId| count_downstream(flow, &flow.data_consumers(v).collect::<Vec<_>>());
    let found = early.min_by_key(|v| (Reverse(work_after(*v)), flow.graph.producer(*v), *v))?;
    Some(common_source(flow, found, &feeds_heavy))
}

/// The last value on which all light values depend that come from the same embeddings as `entry` and feed heavy nodes. Where residual and norm read
/// the embedding through separate casts, it is the embedding.
fn common_source(flow: &Flow, entry: ValueId, feeds_heavy: &impl Fn(ValueId) -> bool) -> ValueId {
    let sources = real_sources(flow, entry);
    let below = |v: ValueId| flow.downstream(&flow.data_consumers(v).collect::<Vec<_>>());
    let is_from = |v: ValueId, below: &[bool]| flow.graph.producer(v).is_some_and(|p| below[p.0 as usize]);
    let mut kin = vec![false; flow.graph.nodes.len()];
    for source in &sources {
        kin.iter_mut().zip(below(*source)).for_each(|(kin, below)| *kin |= below);
    }
    let light = flow.graph.value_ids().filter(|v| is_light(flow, *v) && may_be_real(flow, *v) && feeds_heavy(*v));
    let feeders: Vec<ValueId> = light.filter(|v| sources.contains(v) || is_from(*v, &kin)).collect();
    let carries_all = |source: &ValueId| {
        let below = below(*source);
        feeders.iter().all(|f| f == source || is_from(*f, &below))
    };
    sources.into_iter().rev().find(carries_all).unwrap_or(entry)
}

/// A light value and the float values that it is computed from, earliest first, back to graph inputs and lookups.
fn real_sources(flow: &Flow, value: ValueId) -> Vec<ValueId> {
    let mut seen = BTreeSet::from([value]);
    let mut todo = vec![value];
    while let Some(value) = todo.pop() {
        let Some(producer) = flow.graph.producer(value) else { continue };
        if !flow.looks_up_table(producer) {
            todo.extend(flow.data_reads(producer).filter(|v| may_be_real(flow, *v) && seen.insert(*v)));
        }
    }
    let mut sources: Vec<ValueId> = seen.into_iter().collect();
    sources.sort_by_key(|v| (flow.graph.producer(*v), *v));
    sources
}

/// Counts the weighted and the heavy nodes among these nodes and the nodes that depend on them.
fn count_downstream(flow: &Flow, nodes: &[NodeId]) -> (usize, usize) {
    let below = flow.downstream(nodes);
    let heavy = flow.graph.node_ids().filter(|n| below[n.0 as usize] && flow.heavy[n.0 as usize]);
    heavy.fold((0, 0), |(weighted, all), n| (weighted + usize::from(flow.weighted[n.0 as usize]), all + 1))
}

fn is_light(flow: &Flow, value: ValueId) -> bool {
    match flow.graph.value(value).origin {
        Origin::Weight(_) => false,
        Origin::Input => !flow.pasts.contains_key(&value),
        Origin::Node { node, .. } => !flow.weights.is_weight_only(node) && !flow.heavy[node.0 as usize],
    }
}

fn may_be_real(flow: &Flow, value: ValueId) -> bool {
    flow.graph.value(value).dtype.is_none_or(|t| t.is_float() || matches!(t, DType::Uint8 | DType::Int8))
}
