//! Mixtures whose experts cannot be read one by one: one product with the weights of all experts, a gather from these weights, or experts one after
//! the other in a form that [`super::written_out`] does not know. A mixture is recognised by its router and by what the router chooses among. HPP
//! does not change such a mixture; it tells the user.

use super::{has_mixture, written_out};
use crate::segmentation::{Block, Segmentation};
use crate::{Graph, Node, NodeId, ValueId, WeightUse, ops, weight_bytes};
use hpp_schema::Dim;
use std::collections::{BTreeMap, BTreeSet};

/// A mixture of which all experts are read, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WholeMixture {
    /// The index of its block.
    pub block: usize,
    /// How many experts there are.
    pub count: u64,
    /// How many of them each token selects.
    pub active: u64,
    /// Bytes of the weights of all experts.
    pub bytes: u64,
}

/// Finds what looks like a mixture in blocks in which no mixture was recognised. The signs are: a `TopK` over scores; a matrix before it with a row
/// or column for each score; and weights with as many slices, or at least as many matrices of one shape, whose products are combined with the
/// selection. At most one mixture per block, the one with the most bytes.
pub fn whole_mixtures(graph: &Graph, segmentation: &Segmentation) -> Vec<WholeMixture> {
    let candidates = segmentation.blocks.iter().enumerate().filter(|(_, block)| !has_mixture(graph, block));
    let found: Vec<WholeMixture> = candidates
        .filter_map(|(index, block)| {
            let found = block.nodes.iter().filter_map(|id| Router::of(graph, *id)?.mixture(graph, segmentation, index));
            found.max_by_key(|mixture| mixture.bytes)
        })
        .collect();
    if found.is_empty() {
        return found;
    }
    // Experts that [`written_out`] finds can be put under conditions. The graph may still have them as they were exported.
    let separable: BTreeSet<NodeId> =
        written_out(graph).into_iter().flat_map(|mixture| mixture.experts).flat_map(|expert| expert.nodes).collect();
    let is_whole = |found: &WholeMixture| {
        let mut nodes = segmentation.blocks[found.block].nodes.iter();
        !nodes.any(|id| separable.contains(id))
    };
    found.into_iter().filter(is_whole).collect()
}

/// A `TopK` that selects some of a fixed number of scores for each token.
struct Router {
    node: NodeId,
    count: u64,
    active: u64,
}

impl Router {
    fn of(graph: &Graph, id: NodeId) -> Option<Router> {
        let node = graph.node(id);
        let (scores, number) = (input(node, 0)?, input(node, 1)?);
        if !ops::is_standard(node) || node.op_type != "TopK" {
            return None;
        }
        let count = graph.value(scores).shape.as_ref()?.last()?.as_fixed()?;
        let active = u64::try_from(*graph.ints(number)?.first()?).ok()?;
        (1..count).contains(&active).then_some(Router { node: id, count, active })
    }

    fn mixture(&self, graph: &Graph, segmentation: &Segmentation, index: usize) -> Option<WholeMixture> {
        let (block, weights) = (&segmentation.blocks[index], &segmentation.weights);
        let before = before(graph, block, BTreeSet::from([self.node]));
        let matrices = |id: &NodeId| large_inputs(graph, weights, *id);
        let gives_scores = |value: ValueId| dims(graph, value).any(|size| size == self.count);
        if !before.iter().flat_map(matrices).any(gives_scores) {
            return None;
        }
        let meeting = meeting(graph, block, self.node, &before);
        let read: BTreeSet<ValueId> = meeting.iter().flat_map(matrices).collect();
        let experts = self.sliced(graph, &read).or_else(|| self.apart(graph, &read))?;
        let behind: BTreeSet<ValueId> = experts.into_iter().flat_map(|id| weights.weights_behind(graph, id)).collect();
        let bytes = weight_bytes(graph, &behind.into_iter().collect::<Vec<_>>());
        Some(WholeMixture { block: index, count: self.count, active: self.active, bytes })
    }

    /// The matrices of `read` that have a slice for each expert.
    fn sliced(&self, graph: &Graph, read: &BTreeSet<ValueId>) -> Option<Vec<ValueId>> {
        let is_sliced = |id: &&ValueId| {
            let shape = graph.value(**id).shape.as_deref().unwrap_or_default();
            shape.len() > 2 && shape[0].as_fixed() == Some(self.count)
        };
        let sliced: Vec<ValueId> = read.iter().filter(is_sliced).copied().collect();
        (!sliced.is_empty()).then_some(sliced)
    }

    /// The matrices of `read` that are one per expert: at least as many of one shape as there are experts. If a shape has more, the surplus
    /// matrices belong to an expert that all tokens use, and are left out.
    fn apart(&self, graph: &Graph, read: &BTreeSet<ValueId>) -> Option<Vec<ValueId>> {
        let mut alike: BTreeMap<Vec<u64>, Vec<ValueId>> = BTreeMap::new();
        for id in read {
            alike.entry(dims(graph, *id).collect()).or_default().push(*id);
        }
        let count = usize::try_from(self.count).ok()?;
        let whole = alike.into_values().filter(|alike| alike.len() >= count);
        let experts: Vec<ValueId> =
            whole.flat_map(|alike| alike[..alike.len() - alike.len() % count].to_vec()).collect();
        (!experts.is_empty()).then_some(experts)
    }
}

/// These nodes of a block, and all nodes of the block that they depend on.
fn before(graph: &Graph, block: &Block, nodes: BTreeSet<NodeId>) -> BTreeSet<NodeId> {
    let mut found = nodes;
    // Node ids are in execution order.
    for id in block.nodes.iter().collect::<BTreeSet<_>>().into_iter().rev() {
        let node = graph.node(*id);
        let is_needed = |value: ValueId| graph.value(value).consumers.iter().any(|reader| found.contains(reader));
        if !ops::reads_shape_only(node) && node.writes().any(is_needed) {
            found.insert(*id);
        }
    }
    found
}

/// The nodes of a block whose results are combined with what a router selected: the nodes that depend on the router, and the nodes that these
/// depend on. `before_it`, the nodes that compute the router's result, are left out.
fn meeting(graph: &Graph, block: &Block, router: NodeId, before_it: &BTreeSet<NodeId>) -> BTreeSet<NodeId> {
    let mut behind = BTreeSet::from([router]);
    for id in block.nodes.iter().collect::<BTreeSet<_>>() {
        let depends = graph.producers_of(*id).iter().any(|producer| behind.contains(producer));
        if depends && !ops::reads_shape_only(graph.node(*id)) {
            behind.insert(*id);
        }
    }
    before(graph, block, behind).difference(before_it).copied().collect()
}

/// The matrices that a node reads.
fn large_inputs(graph: &Graph, weights: &WeightUse, id: NodeId) -> Vec<ValueId> {
    let is_matrix = |value: &ValueId| weights.is_matrix(graph, *value);
    graph.node(id).inputs.iter().flatten().copied().filter(is_matrix).collect()
}

fn dims(graph: &Graph, value: ValueId) -> impl Iterator<Item = u64> {
    graph.value(value).shape.iter().flatten().filter_map(Dim::as_fixed)
}

fn input(node: &Node, at: usize) -> Option<ValueId> {
    node.inputs.get(at).copied().flatten()
}
