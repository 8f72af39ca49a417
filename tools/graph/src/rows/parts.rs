//! The order of the parts of divided layers. A part of a layer ends where shards exchange summands; then the next part begins.

use super::analyse::Analysed;
use super::error::{RowsError, RowsReason};
use super::{RowNode, Shard};
use crate::segmentation::{Block, Segmentation};
use crate::{ClassId, Graph, NodeId};
use std::collections::BTreeMap;

/// The blocks of the rewritten graph, and the block of each of its nodes.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    pub blocks: Vec<NewBlock>,
    /// For each original block: the index of its first new block, and its number of parts if it is divided.
    ranges: Vec<OldBlock>,
    /// For each divided node: its original block, and the number of sums before it within that block.
    levels: BTreeMap<NodeId, Level>,
    shards: usize,
}

/// A block of the rewritten graph.
#[derive(Clone, Debug)]
pub(super) struct NewBlock {
    /// Index of the original block.
    pub of: usize,
    /// `None` if the block is not divided.
    pub shard: Option<Shard>,
}

#[derive(Clone, Copy, Debug)]
struct OldBlock {
    first: usize,
    /// Number of parts; 0 if the block is not divided.
    parts: usize,
    /// Number of the run. Consecutive divided blocks are one run and have the same number.
    run: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Level {
    block: usize,
    level: usize,
    /// Whether the node's first output is a summand.
    is_partial: bool,
}

impl Parts {
    /// Divides these blocks into parts.
    pub fn of(
        graph: &Graph,
        segmentation: &Segmentation,
        divided: &[usize],
        analysed: &Analysed,
    ) -> Result<Self, RowsError> {
        let levels = levels(graph, segmentation, analysed);
        let mut parts = Parts { blocks: vec![], ranges: vec![], levels, shards: analysed.shards };
        for block in 0..segmentation.blocks.len() {
            let is_divided = divided.contains(&block);
            let count = if is_divided { parts.count(segmentation, block)? } else { 0 };
            parts.push(block, count);
        }
        Ok(parts)
    }

    /// How many parts a divided block has.
    fn count(&self, segmentation: &Segmentation, block: usize) -> Result<usize, RowsError> {
        let own = self.levels.values().filter(|level| level.block == block && level.is_partial);
        let count = own.map(|level| level.level + 1).max();
        let reason = match count {
            Some(count) if block + 1 < segmentation.blocks.len() => return Ok(count),
            Some(_) => RowsReason::NoBlockAfter,
            None => RowsReason::Nothing,
        };
        Err(RowsError { block: segmentation.blocks[block].label.clone(), node: String::new(), reason })
    }

    fn push(&mut self, of: usize, parts: usize) {
        let run_before = self.ranges.last().and_then(|before| before.run);
        let run = (parts > 0).then(|| run_before.unwrap_or(of));
        self.ranges.push(OldBlock { first: self.blocks.len(), parts, run });
        if parts == 0 {
            self.blocks.push(NewBlock { of, shard: None });
        }
        for part in 0..parts {
            let shards = (0..self.shards).map(|index| Shard { part, index, count: self.shards });
            self.blocks.extend(shards.map(|shard| NewBlock { of, shard: Some(shard) }));
        }
    }

    /// The place of a node of the rewritten graph: for a copy or a sum, its new block. `None` if nothing needs the node.
    pub fn place(&self, node: RowNode) -> Option<Place> {
        let (id, shard, behind) = match node {
            RowNode::Whole(id) => return (!self.levels.contains_key(&id)).then_some(Place::AsBefore),
            RowNode::Copy(id, shard) => (id, shard, 0),
            RowNode::Sum(id, shard) => (id, shard, 1),
        };
        let Level { block, level, .. } = *self.levels.get(&id)?;
        let (OldBlock { first, parts, .. }, level) = (self.ranges[block], level + behind);
        if level < parts {
            return Some(Place::Block(first + level * self.shards + shard));
        }
        let next = *self.ranges.get(block + 1)?;
        match next.parts {
            // After divided layers, only shard 0 continues.
            0 => (shard == 0).then_some(Place::Block(next.first)),
            _ => Some(Place::Block(next.first + shard)),
        }
    }

    /// The new index of a block that is not divided.
    pub fn whole(&self, block: usize) -> usize {
        self.ranges[block].first
    }

    /// The run of consecutive divided layers that a node is in.
    pub fn run(&self, id: NodeId) -> Option<usize> {
        self.ranges[self.levels.get(&id)?.block].run
    }

    /// All new blocks in order, without nodes, weights and states. Divided blocks have new labels.
    pub fn empty_blocks(&self, old: &Segmentation) -> Vec<Block> {
        let empty = |block: &NewBlock| Block {
            label: self.label(old, block),
            nodes: vec![],
            states: vec![],
            weights: vec![],
            class: ClassId(0),
            shard: block.shard,
            ..old.blocks[block.of].clone()
        };
        self.blocks.iter().map(empty).collect()
    }

    /// The label of a new block: `layers.3.attention.0` and `layers.3.mlp.0` if the layer has two parts and only the first has states, else
    /// `layers.3.part1.0`.
    fn label(&self, old: &Segmentation, block: &NewBlock) -> String {
        let label = &old.blocks[block.of].label;
        let Some(Shard { part, index, .. }) = block.shard else { return label.clone() };
        let readers = old.blocks[block.of].states.iter().map(|state| old.states[*state].pair.reader);
        let mut state_levels = readers.filter_map(|id| self.levels.get(&id)).map(|level| level.level).peekable();
        let is_usual = self.ranges[block.of].parts == 2 && state_levels.peek().is_some();
        match is_usual && state_levels.all(|level| level == 0) {
            true => format!("{label}.{}.{index}", if part == 0 { "attention" } else { "mlp" }),
            false => format!("{label}.part{part}.{index}"),
        }
    }
}

/// Where a node of the rewritten graph is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the new block of its original block; in no block if it had none.
    AsBefore,
    /// In this block of the rewritten graph.
    Block(usize),
}

/// For each divided node, how many sums lie before it on the longest path within its block.
fn levels(graph: &Graph, segmentation: &Segmentation, analysed: &Analysed) -> BTreeMap<NodeId, Level> {
    let mut levels: BTreeMap<NodeId, Level> = BTreeMap::new();
    for (id, division) in &analysed.nodes {
        let Some(block) = segmentation.block_of(*id) else { continue };
        let before = graph.producers_of(*id).into_iter().filter_map(|producer| levels.get(&producer));
        let own = before.filter(|level| level.block == block);
        let level = own.map(|before| before.level + usize::from(before.is_partial)).max().unwrap_or(0);
        levels.insert(*id, Level { block, level, is_partial: division.is_partial });
    }
    levels
}
