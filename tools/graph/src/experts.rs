//! Mixtures of experts whose experts can be read one by one: the operators `QMoE` and, for floating-point weights, `MoE`, whose weights hold
//! one slice for each expert; and the division of a block before such an operator.

use crate::segmentation::{Block, BlockKind, Segmentation};
use crate::{ClassId, Graph, Node, NodeId, ValueId};
use std::collections::BTreeSet;

/// The input with the router's logits; the hidden states come before it and weights after it.
const ROUTER: usize = 1;
/// The optional input with the weights of the selected experts, which select nothing.
const AGGREGATION: usize = 14;

/// Slices with fewer bytes (biases) are not worth reads of their own: their weights belong to what every pass needs. hpp-backend has the
/// same limit.
const MIN_SLICE: u64 = 16 << 10;

/// A mixture of experts in one operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mixture {
    /// The operator.
    pub node: NodeId,
    /// The router's logits, one for each token and expert. Each token selects the experts with the largest ones.
    pub router: ValueId,
    /// How many experts there are.
    pub count: u64,
    /// How many of them each token selects.
    pub active: u64,
    /// Whether the kernel compares rounded probabilities instead of logits (`MoE`): of experts whose logits are nearly equal it may select
    /// any.
    pub by_probability: bool,
    /// Weights whose first dimension counts experts, of at least 16 KiB for each.
    pub weights: Vec<ValueId>,
}

impl Mixture {
    /// The first mixture of a block whose experts can be read one by one: the router's logits are computed before the operator, in this
    /// block or another, and the weights are constants. `None` if the block has none.
    pub fn of(graph: &Graph, block: &Block) -> Option<Mixture> {
        block.nodes.iter().find_map(|id| mixture(graph, *id))
    }

    /// Whether the router's logits enter the block, so that it needs no division.
    pub fn is_routed_before(&self, graph: &Graph, block: &Block) -> bool {
        graph.producer(self.router).is_some_and(|router| !block.nodes.contains(&router))
    }

    /// Bytes of the weights of all experts.
    pub fn bytes(&self, graph: &Graph) -> u64 {
        self.weights.iter().filter_map(|id| graph.weight(*id)).map(|weight| weight.bytes).sum()
    }

    /// Expected share of the experts that `tokens` tokens select, if every expert is as likely as any other:
    /// `1 - (1 - active / count)^tokens`.
    pub fn visited_share(&self, tokens: u64) -> f64 {
        let unvisited = 1.0 - self.active as f64 / self.count as f64;
        1.0 - unvisited.powf(tokens as f64)
    }
}

/// The experts of a block, whether they can be read one by one or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertCounts {
    /// How many experts there are.
    pub count: u64,
    /// How many of them each token selects.
    pub active: u64,
    /// Bytes of the weights of all experts.
    pub bytes: u64,
}

impl ExpertCounts {
    /// The experts of the first mixture of a block; `None` without an operator for mixtures.
    pub fn of(graph: &Graph, block: &Block) -> Option<ExpertCounts> {
        let node = graph.node(operator(graph, block)?);
        let (count, active) = (count(graph, node)?, u64::try_from(node.int("k").unwrap_or(1)).ok()?);
        let weights: BTreeSet<ValueId> = node.inputs.iter().skip(ROUTER + 1).copied().flatten().collect();
        let sliced = weights.iter().filter(|id| first_size(graph, **id) == Some(count));
        let bytes = sliced.filter_map(|id| graph.weight(*id)).map(|weight| weight.bytes).sum();
        Some(ExpertCounts { count, active, bytes })
    }
}

/// The first operator of a block that computes a mixture.
fn operator(graph: &Graph, block: &Block) -> Option<NodeId> {
    let is_mixture = |id: &&NodeId| matches!(graph.node(**id).op_type.as_str(), "QMoE" | "MoE");
    block.nodes.iter().find(is_mixture).copied()
}

fn mixture(graph: &Graph, id: NodeId) -> Option<Mixture> {
    let node = graph.node(id);
    let by_probability = match node.op_type.as_str() {
        "QMoE" => false,
        "MoE" => true,
        _ => return None,
    };
    // The sparse mixer selects experts by another rule.
    if node.domain != "com.microsoft" || node.int("use_sparse_mixer").unwrap_or(0) != 0 {
        return None;
    }
    let router = node.inputs.get(ROUTER).copied().flatten().filter(|id| graph.producer(*id).is_some())?;
    let active = u64::try_from(node.int("k").unwrap_or(1)).ok()?;
    let count = count(graph, node).filter(|count| *count > 0)?;
    let is_sliced = |id: &ValueId| {
        let is_large = graph.weight(*id).is_some_and(|weight| weight.bytes / count >= MIN_SLICE);
        is_large && first_size(graph, *id) == Some(count)
    };
    let weights = node.inputs.iter().enumerate().filter(|(at, _)| *at > ROUTER && *at != AGGREGATION);
    let mut weights: Vec<ValueId> = weights.filter_map(|(_, id)| *id).filter(is_sliced).collect();
    weights.sort_unstable();
    weights.dedup();
    let is_possible = (1..count).contains(&active) && !weights.is_empty();
    is_possible.then_some(Mixture { node: id, router, count, active, by_probability, weights })
}

/// The first size of the first weight.
fn count(graph: &Graph, node: &Node) -> Option<u64> {
    let first = node.inputs.get(ROUTER + 1).copied().flatten()?;
    graph.weight(first).and_then(|_| first_size(graph, first))
}

fn first_size(graph: &Graph, id: ValueId) -> Option<u64> {
    graph.value(id).shape.as_ref()?.first()?.as_fixed()
}

impl Segmentation {
    /// This segmentation with those of the first `layers` layers that have a mixture in one operator divided before it, and how many these
    /// are. The second half of `layers.3` is called `layers.3.experts` and is of the same kind.
    pub fn with_experts_apart(&self, graph: &Graph, layers: u32) -> (Segmentation, usize) {
        let layer = |(index, block): (usize, &Block)| match block.kind {
            BlockKind::Layer(layer) if layer < layers => Some((index, operator(graph, block)?)),
            _ => None,
        };
        let mixtures: Vec<_> = self.blocks.iter().enumerate().filter_map(layer).collect();
        let mut divided = self.divided_at_experts(graph, &mixtures);
        crate::class::classify(graph, &mut divided);
        (divided, mixtures.len())
    }

    /// This segmentation with each of these blocks divided in two: before its mixture, and the mixture with all that depends on it.
    /// The second half has no states of its own unless a node behind the mixture reads one. Classes are not computed again.
    pub fn divided_at_experts(&self, graph: &Graph, mixtures: &[(usize, NodeId)]) -> Segmentation {
        let mut divided = self.clone();
        let mut block_of = self.block_of.clone();
        // From the last to the first, so that the numbers of the blocks before stay.
        let mut sorted: Vec<_> = mixtures.to_vec();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        for (block, node) in sorted {
            let behind = self.behind(graph, block, node);
            let first = &mut divided.blocks[block];
            let (second_nodes, first_nodes) = first.nodes.iter().partition(|id| behind.contains(id));
            first.nodes = first_nodes;
            first.weights = self.weights.used_by_all(first.nodes.iter().copied());
            let second = Block {
                label: format!("{}.experts", first.label),
                kind: first.kind,
                nodes: second_nodes,
                states: vec![],
                weights: vec![],
                class: ClassId(first.class.0),
                is_experts: true,
            };
            let second = Block { weights: self.weights.used_by_all(second.nodes.iter().copied()), ..second };
            for owner in block_of.iter_mut().flatten().filter(|owner| **owner > block) {
                *owner += 1;
            }
            for id in &second.nodes {
                block_of[id.0 as usize] = Some(block + 1);
            }
            divided.blocks.insert(block + 1, second);
        }
        for state in &mut divided.states {
            state.block = block_of[state.pair.reader.0 as usize].unwrap_or(0);
        }
        for (index, block) in divided.blocks.iter_mut().enumerate() {
            let owned = divided.states.iter().enumerate().filter(|(_, state)| state.block == index);
            block.states = owned.map(|(number, _)| number).collect();
        }
        divided.boundaries = crate::assign::boundaries(graph, &divided.weights, &block_of, divided.blocks.len());
        divided.block_of = block_of;
        divided
    }

    /// The node and all nodes of its block that depend on it.
    fn behind(&self, graph: &Graph, block: usize, node: NodeId) -> BTreeSet<NodeId> {
        let mut behind = BTreeSet::from([node]);
        for id in self.blocks[block].nodes.iter().filter(|id| **id > node) {
            if graph.producers_of(*id).iter().any(|producer| behind.contains(producer)) {
                behind.insert(*id);
            }
        }
        behind
    }
}
