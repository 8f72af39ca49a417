//! The order of the parts: where shards exchange summands, one part of a layer ends and the next begins.

use super::analyse::Analysed;
use super::error::{RowsError, RowsReason};
use super::{RowNode, Shard};
use crate::segmentation::{Block, Segmentation};
use crate::{ClassId, Graph, NodeId};
use std::collections::BTreeMap;

/// The blocks of the rewritten graph, and where its nodes are.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    pub blocks: Vec<NewBlock>,
    /// For each block of the original: the index of its first block, and how many parts it has if it is divided.
    ranges: Vec<OldBlock>,
    /// For each divided node: its block, and how many sums within the block lie before it.
    levels: BTreeMap<NodeId, Level>,
    shards: usize,
}

/// A block of the rewritten graph.
#[derive(Clone, Debug)]
pub(super) struct NewBlock {
    /// Index of the original.
    pub of: usize,
    /// `None` if it is not divided.
    pub shard: Option<Shard>,
}

#[derive(Clone, Copy, Debug)]
struct OldBlock {
    first: usize,
    /// 0 if it is not divided.
    parts: usize,
    /// Consecutive divided blocks have the same number.
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
    /// The parts of these blocks.
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

    /// The block of a divided node's copy or of a sum, for whole nodes that of the original; `None` if nothing needs the node.
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
            // Only shard 0 goes on.
            0 => (shard == 0).then_some(Place::Block(next.first)),
            _ => Some(Place::Block(next.first + shard)),
        }
    }

    /// The block that a block of the original has become, if it is not divided.
    pub fn whole(&self, block: usize) -> usize {
        self.ranges[block].first
    }

    /// The run of consecutive divided layers in which a node is.
    pub fn run(&self, id: NodeId) -> Option<usize> {
        self.ranges[self.levels.get(&id)?.block].run
    }

    /// Blocks without nodes, weights and states, in order. Divided ones have new labels.
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

    /// `layers.3.attention.0` and `layers.3.mlp.0` if only the first of two parts has states, else `layers.3.part1.0`.
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

/// Where a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the block that its block has become, or in none.
    AsBefore,
    /// In this block of the rewritten graph.
    Block(usize),
}

/// How many sums lie before each divided node, on the longest path within its block.
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
