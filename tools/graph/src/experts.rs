//! Mixtures of experts whose experts can be read one by one, and the division of a block before its mixture. There are two forms: the operators
//! `QMoE` and, for floating-point weights, `MoE`, whose weights hold one slice for each expert; and experts that each run under a condition (an
//! `If`).

mod conditional;
mod divisible;
mod early_router;
mod scores;
mod whole;
mod written_out;

pub use divisible::{DivisibleMixture, divisible_mixtures};
pub use early_router::{EarlyRouter, Prediction};
pub use whole::{WholeMixture, whole_mixtures};
pub use written_out::{WrittenExpert, WrittenOut, written_out};

use crate::segmentation::{Block, BlockKind, Segmentation};
use crate::{Attribute, ClassId, Graph, Node, NodeId, ValueId};
use conditional::Conditional;
use divisible::leaves_out_unweighted;
use hpp_schema::SelectedBy;
pub(crate) use scores::Selection;
use std::collections::BTreeSet;

/// The input with the router's logits; the hidden states come before it and weights after it.
const ROUTER: usize = 1;
/// The optional input with the factors for the selected experts' results. It does not select experts.
const AGGREGATION: usize = 14;

/// An attribute of an operator that has some of the experts of a divided mixture: the number of experts that a token is expected to select among
/// them. Only graphs have it, not models; costs are computed with it.
pub const EXPECTED_EXPERTS: &str = "hpp.expected_experts";

/// Slices with fewer bytes (biases) are not worth a read of their own: their weights stay in memory like all weights that every pass needs.
/// hpp-backend has the same limit.
const MIN_SLICE: u64 = 16 << 10;

/// A mixture of experts: one operator, or an `If` for each expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mixture {
    /// The nodes that must not run before the selection is known: the operator, or the nodes that read the scores.
    pub nodes: Vec<NodeId>,
    /// What the experts are selected from: the router's logits, one for each token and expert; or the scores or the numbers of the experts that
    /// tokens select.
    pub router: ValueId,
    /// How many experts there are.
    pub count: u64,
    /// How many of them each token selects.
    pub active: u64,
    /// How the values of `router` select experts.
    pub selected_by: SelectedBy,
    /// The experts' weights of at least 16 KiB per expert. If `is_apart`, all weights of the first expert come first, then as many of the second,
    /// and so on. Otherwise each weight holds all experts along its first dimension.
    pub weights: Vec<ValueId>,
    /// Whether each expert has its own weights.
    pub is_apart: bool,
}

impl Mixture {
    /// The first mixture of a block whose experts can be read one by one. Its weights are constants, and a node in this block or another one
    /// computes the router's logits. `None` if the block has no such mixture.
    pub fn of(graph: &Graph, block: &Block) -> Option<Mixture> {
        let operator = operator(graph, block).into_iter().chain(block.nodes.iter().copied());
        operator.filter_map(|id| mixture(graph, id)).next().or_else(|| of_conditional(graph, block))
    }

    /// The number of experts that a token is expected to select, rounded: of a mixture with all experts of a layer, as many as it always selects.
    pub fn expected(&self, graph: &Graph) -> u64 {
        let operator = self.nodes.first().map(|id| graph.node(*id));
        let stated = operator.and_then(|node| node.attributes.get(EXPECTED_EXPERTS));
        match stated {
            Some(Attribute::Float(expected)) => (expected.round() as u64).clamp(1, self.active),
            _ => self.active,
        }
    }

    /// Whether another block computes the router's logits, so that this block needs no division.
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
        share(self.active, self.count, tokens)
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
    /// Counts the experts of the first mixture of a block. `None` if the block has neither a mixture operator nor experts under a condition.
    pub fn of(graph: &Graph, block: &Block) -> Option<ExpertCounts> {
        let Some(operator) = operator(graph, block) else {
            let mixture = of_conditional(graph, block)?;
            let Mixture { count, active, .. } = mixture;
            return Some(ExpertCounts { count, active, bytes: mixture.bytes(graph) });
        };
        let node = graph.node(operator);
        let (count, active) = (count(graph, node)?, u64::try_from(node.int("k").unwrap_or(1)).ok()?);
        let weights: BTreeSet<ValueId> = node.inputs.iter().skip(ROUTER + 1).copied().flatten().collect();
        let sliced = weights.iter().filter(|id| first_size(graph, **id) == Some(count));
        let bytes = sliced.filter_map(|id| graph.weight(*id)).map(|weight| weight.bytes).sum();
        Some(ExpertCounts { count, active, bytes })
    }
}

/// Whether a block computes a mixture, even one whose number of experts is unknown.
pub fn has_mixture(graph: &Graph, block: &Block) -> bool {
    operator(graph, block).is_some() || of_conditional(graph, block).is_some()
}

/// The first operator of a block that computes a mixture; of a mixture that is divided, the operator with the experts that are not on a GPU.
fn operator(graph: &Graph, block: &Block) -> Option<NodeId> {
    let is_mixture = |id: &&NodeId| matches!(graph.node(**id).op_type.as_str(), "QMoE" | "MoE");
    let of_others = block.nodes.iter().find(|id| leaves_out_unweighted(graph.node(**id)));
    of_others.or_else(|| block.nodes.iter().find(is_mixture)).copied()
}

/// `1 - (1 - active / count)^tokens`.
pub(crate) fn share(active: u64, count: u64, tokens: u64) -> f64 {
    let unvisited = 1.0 - active as f64 / count as f64;
    1.0 - unvisited.powf(tokens as f64)
}

/// What decides whether `node`, an expert under a condition, runs. `None` for other nodes.
pub(crate) fn selection_of(graph: &Graph, node: &Node) -> Option<Selection> {
    conditional::column(graph, node).map(|column| column.selection)
}

/// The mixture of a block whose experts are computed under a condition.
fn of_conditional(graph: &Graph, block: &Block) -> Option<Mixture> {
    let Conditional { selection, experts } = Conditional::of(graph, &block.nodes)?;
    let Selection { value: router, by: selected_by } = selection;
    let (count, active) = (experts.len() as u64, selection.active(graph)?);
    let weights: Vec<Vec<ValueId>> = experts.iter().map(|id| conditional::weights(graph, *id)).collect();
    let is_alike = weights.iter().all(|of_one| !of_one.is_empty() && of_one.len() == weights[0].len());
    let weights = weights.concat();
    // A weight that another node reads too must be in memory whichever experts are selected, so it rules out reading experts one by one.
    let is_apart = weights.iter().all(|id| graph.value(*id).consumers.len() == 1);
    let is_possible = is_alike && is_apart && (1..count).contains(&active) && graph.producer(router).is_some();
    let nodes: Vec<NodeId> =
        graph.value(router).consumers.iter().copied().filter(|id| block.nodes.contains(id)).collect();
    let is_possible = is_possible && !nodes.is_empty();
    is_possible.then_some(Mixture { nodes, router, count, active, selected_by, weights, is_apart })
}

/// The weights of at least [`MIN_SLICE`] bytes among these values, in order, each once.
fn large_weights(graph: &Graph, values: impl Iterator<Item = ValueId>) -> Vec<ValueId> {
    let is_large = |id: &ValueId| graph.weight(*id).is_some_and(|weight| weight.bytes >= MIN_SLICE);
    values.filter(is_large).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The nodes of a block's mixture that must not run before the selection of experts is known.
fn first_nodes(graph: &Graph, block: &Block) -> Option<Vec<NodeId>> {
    match operator(graph, block) {
        Some(operator) => Some(vec![operator]),
        None => of_conditional(graph, block).map(|mixture| mixture.nodes),
    }
}

fn mixture(graph: &Graph, id: NodeId) -> Option<Mixture> {
    let node = graph.node(id);
    let selected_by = match node.op_type.as_str() {
        "QMoE" if leaves_out_unweighted(node) => SelectedBy::Weights,
        "QMoE" => SelectedBy::Logits,
        "MoE" => SelectedBy::Probabilities,
        _ => return None,
    };
    // With the sparse mixer, the operator selects experts by another rule.
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
    let nodes = vec![id];
    is_possible.then_some(Mixture { nodes, router, count, active, selected_by, weights, is_apart: false })
}

/// The number of experts: the first dimension of the first weight.
fn count(graph: &Graph, node: &Node) -> Option<u64> {
    let first = node.inputs.get(ROUTER + 1).copied().flatten()?;
    graph.weight(first).and_then(|_| first_size(graph, first))
}

fn first_size(graph: &Graph, id: ValueId) -> Option<u64> {
    graph.value(id).shape.as_ref()?.first()?.as_fixed()
}

impl Segmentation {
    /// Divides those of the first `layers` layers that have a mixture, each before its mixture. Returns the new segmentation and the number of
    /// layers divided. The second half of `layers.3` is called `layers.3.experts` and has the same kind.
    pub fn with_experts_apart(&self, graph: &Graph, layers: u32) -> (Segmentation, usize) {
        let layer = |(index, block): (usize, &Block)| match block.kind {
            BlockKind::Layer(layer) if layer < layers => Some((index, first_nodes(graph, block)?)),
            _ => None,
        };
        let mixtures: Vec<_> = self.blocks.iter().enumerate().filter_map(layer).collect();
        let mut divided = self.divided_at_experts(graph, &mixtures);
        crate::class::classify(graph, &mut divided);
        (divided, mixtures.len())
    }

    /// Divides each of these blocks in two. The second half is the mixture and all nodes of the block that depend on it; the first half is the
    /// rest. A state belongs to the second half only if the node that reads it does. Classes are not computed again.
    pub fn divided_at_experts(&self, graph: &Graph, mixtures: &[(usize, Vec<NodeId>)]) -> Segmentation {
        let mut divided = self.clone();
        let mut block_of = self.block_of.clone();
        // From the last block to the first, so that the indices of earlier blocks stay valid.
        let mut sorted: Vec<_> = mixtures.to_vec();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        for (block, first) in sorted {
            let behind = self.behind(graph, block, &first);
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
                shard: None,
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

    /// These nodes of a block, and all nodes of the block that depend on them.
    fn behind(&self, graph: &Graph, block: usize, first: &[NodeId]) -> BTreeSet<NodeId> {
        let mut behind: BTreeSet<NodeId> = first.iter().copied().collect();
        for id in &self.blocks[block].nodes {
            if graph.producers_of(*id).iter().any(|producer| behind.contains(producer)) {
                behind.insert(*id);
            }
        }
        behind
    }
}
