//! Sorts nodes into heavy (they, or what they read, depend on layer weights or state) and light (masks, positions,
//! rotary caches, lookups), and finds where the hidden state enters. Knows nothing of blocks.

use crate::ops;
use crate::{Graph, NodeId, Origin, StatePair, ValueId, WeightUse};
use hpp_schema::DType;
use petgraph::algo::dominators::simple_fast;
use petgraph::graph::DiGraph;
use std::collections::{BTreeMap, BTreeSet};

/// The dataflow of a model, with shape reads and weights taken out.
pub(crate) struct Flow<'a> {
    pub graph: &'a Graph,
    pub weights: &'a WeightUse,
    /// Past inputs, with the index of their pair.
    pub pasts: BTreeMap<ValueId, usize>,
    /// Nodes that compute with a matrix weight or read a state.
    pub seed: Vec<bool>,
    /// Nodes data-downstream of a seed, seeds included.
    pub heavy: Vec<bool>,
}

impl<'a> Flow<'a> {
    pub fn new(graph: &'a Graph, weights: &'a WeightUse, states: &[StatePair]) -> Self {
        let pasts = states.iter().enumerate().map(|(i, s)| (s.past, i)).collect();
        let count = graph.nodes.len();
        let mut flow = Flow { graph, weights, pasts, seed: vec![false; count], heavy: vec![false; count] };
        flow.seed = graph.node_ids().map(|id| flow.is_seed(id)).collect();
        let seeds: Vec<NodeId> = graph.node_ids().filter(|id| flow.seed[id.0 as usize]).collect();
        flow.heavy = flow.downstream(&seeds);
        flow
    }

    /// What a node reads for its contents: no weights, no shapes.
    pub fn data_reads(&self, id: NodeId) -> impl Iterator<Item = ValueId> + '_ {
        let node = self.graph.node(id);
        let reads = (!ops::reads_shape_only(node)).then(|| node.reads());
        reads.into_iter().flatten().filter(|v| !self.weights.is_weight_like(self.graph, *v))
    }

    /// Producers of what a node reads for its contents.
    pub fn data_producers(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        self.data_reads(id).filter_map(|v| self.graph.producer(v))
    }

    /// Nodes that read a value for its contents.
    pub fn data_consumers(&self, value: ValueId) -> impl Iterator<Item = NodeId> + '_ {
        self.graph.value(value).consumers.iter().copied().filter(|c| !ops::reads_shape_only(self.graph.node(*c)))
    }

    fn is_seed(&self, id: NodeId) -> bool {
        if self.weights.is_weight_only(id) {
            return false;
        }
        self.data_reads(id).any(|v| self.pasts.contains_key(&v)) || self.is_weighted(id)
    }

    /// Computes with a matrix weight: not a lookup, not elementwise, not a move.
    pub fn is_weighted(&self, id: NodeId) -> bool {
        let node = self.graph.node(id);
        let passive =
            ops::is_lookup(node) || ops::is_elementwise(node) || ops::is_movement(node) || ops::reads_shape_only(node);
        !passive && !ops::has_body(node) && node.reads().any(|v| self.weights.is_matrix(self.graph, v))
            || self.has_heavy_body(id)
    }

    /// A body that holds weights and works on data is a block of its own; one that chooses between constants is not.
    fn has_heavy_body(&self, id: NodeId) -> bool {
        let node = self.graph.node(id);
        let bodies = node.attributes.values().filter_map(|a| match a {
            crate::Attribute::Body(body) => Some(body),
            _ => None,
        });
        let large = bodies.map(|b| b.nodes).max().unwrap_or(0) > 16;
        large && node.captures.iter().any(|v| self.weights.is_matrix(self.graph, *v))
    }

    /// These nodes and everything data-downstream of them.
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

    /// Everything data-upstream of a node, itself included.
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

    /// The producer of the output that most of the model works for: states aside, the one with most heavy ancestors.
    pub fn sink(&self, states: &[StatePair]) -> Option<NodeId> {
        let presents: BTreeSet<ValueId> = states.iter().filter_map(|s| s.present).collect();
        let main: Vec<ValueId> = self.graph.outputs.iter().copied().filter(|v| !presents.contains(v)).collect();
        let outputs = if main.is_empty() { &self.graph.outputs } else { &main };
        let mut producers: Vec<NodeId> = outputs.iter().filter_map(|v| self.graph.producer(*v)).collect();
        let mut seen = BTreeSet::new();
        producers.retain(|p| seen.insert(*p) && !self.weights.is_weight_only(*p));
        let weigh = |p: &NodeId| {
            let up = self.upstream(*p);
            up.iter().zip(&self.heavy).filter(|(up, heavy)| **up && **heavy).count()
        };
        // An output computed from another main output has more ancestors; look from the last ones only.
        producers.sort_unstable();
        let late = producers.split_off(producers.len().saturating_sub(16));
        late.into_iter().rev().max_by_key(weigh)
    }
}

/// Post-dominators: for each node, the next node that every data path to the sink passes.
pub(crate) struct ToSink {
    next: Vec<Option<NodeId>>,
    depth: Vec<usize>,
}

impl ToSink {
    /// Computes them over nodes that are not weight-only, leaving out some edges.
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
        let mut this = ToSink { next, depth: vec![0; count] };
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

    /// The first node that all paths from all of these pass.
    pub fn meet(&self, nodes: impl IntoIterator<Item = NodeId>) -> Option<NodeId> {
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

    /// A node and everything every path from it to the sink passes, in order.
    pub fn chain(&self, from: NodeId) -> Vec<NodeId> {
        std::iter::successors(Some(from), |n| self.next[n.0 as usize]).collect()
    }
}

/// The value through which the hidden state enters: embeddings, an image, `inputs_embeds`.
pub(crate) fn find_entry(flow: &Flow, to_sink: &ToSink) -> Option<ValueId> {
    let feeds_heavy = |v: ValueId| flow.data_consumers(v).any(|c| flow.heavy[c.0 as usize] && to_sink.reaches(c));
    let depth = |v: ValueId| to_sink.meet(flow.data_consumers(v)).map_or(0, |n| to_sink.depth(n));
    let light: Vec<ValueId> = flow.graph.value_ids().filter(|v| is_light(flow, *v) && feeds_heavy(*v)).collect();
    let (numbers, others): (Vec<ValueId>, Vec<ValueId>) = light.into_iter().partition(|v| may_be_real(flow, *v));
    let candidates = if numbers.is_empty() { others } else { numbers };
    let deepest = candidates.iter().copied().min_by_key(|v| (std::cmp::Reverse(depth(*v)), *v))?;
    // The norm before the first layer is light too, and hangs deeper than the residual it was made from.
    let upstream = flow.graph.producer(deepest).map(|p| flow.upstream(p));
    let is_ancestor = |v: ValueId| match (&upstream, flow.graph.producer(v)) {
        (Some(up), Some(producer)) => up[producer.0 as usize],
        (Some(up), None) => flow.data_consumers(v).any(|c| up[c.0 as usize]),
        (None, _) => false,
    };
    let ancestors = candidates.iter().copied().filter(|v| is_ancestor(*v) && depth(*v) * 2 >= depth(deepest));
    Some(ancestors.min_by_key(|v| flow.graph.producer(*v)).unwrap_or(deepest))
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
