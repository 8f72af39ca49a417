//! Assigns nodes to blocks, finds globals (nodes that several blocks need and recompute), and builds the
//! [`Segmentation`].

use crate::blocks::Cuts;
use crate::ops;
use crate::segmentation::{Block, BlockKind, BlockState, Boundary, ClassId, Segmentation};
use crate::spine::{Spine, SpinePosition};
use crate::weights::weight_bytes;
use crate::{Graph, NodeId, StateChange, StatePair, WeightUse};

/// The blocks that need a node, derived from its readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NeededBy {
    None,
    One(usize),
    /// Several blocks; the index is the earliest.
    Several(usize),
}

impl NeededBy {
    fn and(self, other: NeededBy) -> NeededBy {
        match (self, other) {
            (NeededBy::None, x) | (x, NeededBy::None) => x,
            (NeededBy::One(a), NeededBy::One(b)) if a == b => self,
            (NeededBy::One(a) | NeededBy::Several(a), NeededBy::One(b) | NeededBy::Several(b)) => {
                NeededBy::Several(a.min(b))
            }
        }
    }
}

/// The block of each node; `None` for globals and weight-only nodes.
///
/// A node on the spine belongs to the block at its position. A node that reads only a shape belongs to the block that
/// produces the value. Any other node belongs to the only block that needs it. A node that several blocks need is a
/// global, unless it must run only once: then it belongs to the first of these blocks.
pub(crate) fn assign(graph: &Graph, weights: &WeightUse, spine: Option<&Spine>, cuts: &Cuts) -> Vec<Option<usize>> {
    let position = |id: NodeId| match spine {
        Some(spine) => spine.positions[id.0 as usize],
        None if weights.is_weight_only(id) => SpinePosition::WeightOnly,
        None => SpinePosition::At(0),
    };
    let block_at = |id: NodeId| match position(id) {
        SpinePosition::Entry => Some(0),
        SpinePosition::At(at) => Some(cuts.block(at)),
        SpinePosition::Unpositioned | SpinePosition::WeightOnly => None,
    };
    let last = cuts.kinds.len() - 1;
    let mut need = vec![NeededBy::None; graph.nodes.len()];
    let mut block_of = vec![None; graph.nodes.len()];
    for id in graph.node_ids().rev().filter(|id| position(*id) != SpinePosition::WeightOnly) {
        let i = id.0 as usize;
        let shape_of = || shape_source(graph, id).and_then(block_at);
        if let Some(block) = block_at(id).or_else(shape_of) {
            need[i] = NeededBy::One(block);
            block_of[i] = Some(block);
            continue;
        }
        let readers = graph.consumers_of(id).into_iter().map(|c| need[c.0 as usize]);
        let returned = graph.node(id).writes().any(|v| graph.outputs.contains(&v));
        let needed = readers.fold(if returned { NeededBy::One(last) } else { NeededBy::None }, NeededBy::and);
        block_of[i] = match needed {
            NeededBy::None => None,
            NeededBy::One(block) => Some(block),
            NeededBy::Several(first) => (!ops::is_recomputable(graph.node(id))).then_some(first),
        };
        need[i] = needed;
    }
    // A node without readers belongs to the last block that produces one of its inputs.
    for id in graph
        .node_ids()
        .filter(|id| position(*id) != SpinePosition::WeightOnly && need[id.0 as usize] == NeededBy::None)
    {
        let producers = graph.producers_of(id);
        block_of[id.0 as usize] = Some(producers.into_iter().filter_map(|p| block_of[p.0 as usize]).max().unwrap_or(0));
    }
    block_of
}

/// The producer of the value whose shape this node reads.
fn shape_source(graph: &Graph, id: NodeId) -> Option<NodeId> {
    let node = graph.node(id);
    ops::reads_shape_only(node).then(|| graph.producer(node.inputs.first().copied().flatten()?)).flatten()
}

/// Builds the segmentation from the assignment.
pub(crate) fn build(
    graph: &Graph,
    weights: WeightUse,
    states: Vec<StatePair>,
    cuts: Cuts,
    block_of: Vec<Option<usize>>,
) -> Segmentation {
    let globals =
        graph.node_ids().filter(|id| block_of[id.0 as usize].is_none() && !weights.is_weight_only(*id)).collect();
    let mut blocks: Vec<Block> = cuts.kinds.iter().map(|kind| empty_block(*kind)).collect();
    for id in graph.node_ids() {
        if let Some(block) = block_of[id.0 as usize] {
            blocks[block].nodes.push(id);
        }
    }
    for block in &mut blocks {
        block.weights = weights.used_by_all(block.nodes.iter().copied());
    }
    let boundaries = boundaries(graph, &weights, &block_of, blocks.len());
    let mut notes = cuts.notes;
    let states = place_states(graph, states, &block_of, &mut blocks, &mut notes);
    note_imbalance(graph, &blocks, &mut notes);
    Segmentation { blocks, globals, boundaries, states, undecided: notes, weights, block_of }
}

fn empty_block(kind: BlockKind) -> Block {
    let label = match kind {
        BlockKind::Embedding => "embedding".to_owned(),
        BlockKind::Layer(n) => format!("layers.{n}"),
        BlockKind::Head => "head".to_owned(),
        BlockKind::Stem => "stem".to_owned(),
        BlockKind::Body(n) => format!("blocks.{n}"),
    };
    Block {
        label,
        kind,
        nodes: vec![],
        states: vec![],
        weights: vec![],
        class: ClassId(0),
        is_experts: false,
        shard: None,
    }
}

/// Values that one block produces and a later block reads for their contents.
pub(crate) fn boundaries(
    graph: &Graph,
    weights: &WeightUse,
    block_of: &[Option<usize>],
    blocks: usize,
) -> Vec<Boundary> {
    let mut boundaries = vec![Boundary::default(); blocks.saturating_sub(1)];
    for value in graph.value_ids() {
        let Some(producer) = graph.producer(value).filter(|p| !weights.is_weight_only(*p)) else { continue };
        let Some(from) = block_of[producer.0 as usize].filter(|_| !ops::reads_shape_only(graph.node(producer))) else {
            continue;
        };
        let consumers = graph.value(value).consumers.iter().filter(|c| !ops::reads_shape_only(graph.node(**c)));
        let to = consumers.filter_map(|c| block_of[c.0 as usize]).max().unwrap_or(from);
        for boundary in &mut boundaries[from.min(to)..to] {
            boundary.values.push(value);
        }
    }
    for boundary in &mut boundaries {
        boundary.values.sort_by_key(|v| (graph.producer(*v), *v));
    }
    boundaries
}

pub(crate) fn place_states(
    graph: &Graph,
    states: Vec<StatePair>,
    block_of: &[Option<usize>],
    blocks: &mut [Block],
    notes: &mut Vec<String>,
) -> Vec<BlockState> {
    let mut placed = vec![];
    for (index, pair) in states.into_iter().enumerate() {
        let block = block_of[pair.reader.0 as usize].unwrap_or(0);
        let writer = pair.present.and_then(|v| graph.producer(v)).and_then(|p| block_of[p.0 as usize]);
        if writer.is_some_and(|w| w != block) && pair.change != StateChange::ReadOnly {
            let name = &graph.value(pair.past).name;
            notes.push(format!("state {name:?} is read in {} but written in another block", blocks[block].label));
        }
        let layer = match blocks[block].kind {
            BlockKind::Layer(n) => Some(n),
            _ => None,
        };
        blocks[block].states.push(index);
        placed.push(BlockState { pair, block, layer });
    }
    placed
}

/// Adds a message if one of several layers holds more than half of all weights: usually it hides structure that was not
/// found.
fn note_imbalance(graph: &Graph, blocks: &[Block], notes: &mut Vec<String>) {
    let repeated = |b: &&Block| matches!(b.kind, BlockKind::Layer(_) | BlockKind::Body(_));
    let bytes: Vec<u64> = blocks.iter().map(|b| weight_bytes(graph, &b.weights)).collect();
    let total: u64 = bytes.iter().sum();
    let heavy = blocks.iter().zip(bytes).filter(|(b, bytes)| repeated(b) && *bytes > total / 2);
    for (block, _) in heavy.filter(|_| blocks.iter().filter(repeated).count() > 2) {
        notes.push(format!("{} holds more than half of all weights: its inside has no clear boundary", block.label));
    }
}
