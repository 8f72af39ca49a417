//! Selects the blocks to measure: one of each class alone, and a run of consecutive layers as one partition. The difference of the
//! two separates the time of a block from the launch cost of a partition.

use hpp_graph::{BlockKind, Segmentation};
use std::ops::Range;

/// Number of blocks in a run. It is larger if the weights of this many blocks fit into a cache.
const USUAL_RUN: usize = 4;

/// Limits on the weights of a run, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunBytes {
    /// A run has at most this many bytes.
    pub most: u64,
    /// A run grows until it has this many bytes: several times the caches, because a run that fits into a cache is faster than the same blocks in a
    /// pass of the whole model.
    pub enough: u64,
}

/// A block to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockTarget {
    pub class: u32,
    pub block: usize,
    /// Blocks in one partition, beginning with this one; 1 where only the block alone is measured.
    pub run_length: usize,
}

/// What the selection needs to know of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockFacts {
    pub class: u32,
    /// Whether it is a layer.
    pub repeats: bool,
    pub weight_bytes: u64,
}

/// The facts of every block, in order.
pub fn facts(segmentation: &Segmentation, weight_bytes: impl Fn(usize) -> u64) -> Vec<BlockFacts> {
    let fact = |(index, block): (usize, &hpp_graph::Block)| BlockFacts {
        class: block.class.0,
        repeats: matches!(block.kind, BlockKind::Layer(_) | BlockKind::Body(_)),
        weight_bytes: weight_bytes(index),
    };
    segmentation.blocks.iter().enumerate().map(fact).collect()
}

/// Selects one block of each class, or every block. A run has equal blocks. If no class has two neighbours (because layers of two kinds alternate),
/// runs have different blocks.
pub fn targets(blocks: &[BlockFacts], each_block: bool, bytes: RunBytes) -> Vec<BlockTarget> {
    let mut targets: Vec<BlockTarget> = Vec::new();
    for (at, block) in blocks.iter().enumerate() {
        let known = targets.iter().any(|target| target.class == block.class);
        if !known || each_block {
            let run = if known { at..at + 1 } else { equal_run(blocks, block.class, bytes) };
            let block_at = if each_block { at } else { run.start };
            // With `--all-blocks` the run belongs to its first block.
            let run_length = if each_block { 1 } else { run.len() };
            targets.push(BlockTarget { class: block.class, block: block_at, run_length });
        }
    }
    if each_block {
        for class in targets.iter().map(|target| target.class).collect::<std::collections::BTreeSet<_>>() {
            let run = equal_run(blocks, class, bytes);
            targets[run.start].run_length = run.len();
        }
    }
    if targets.iter().all(|target| target.run_length == 1) {
        for target in &mut targets {
            target.run_length = fitting(blocks, target.block, |_| true, bytes).len();
        }
    }
    targets
}

/// The longest run of neighbours of a class within the limits; of several, the first.
fn equal_run(blocks: &[BlockFacts], class: u32, bytes: RunBytes) -> Range<usize> {
    let runs = (0..blocks.len())
        .filter(|at| blocks[*at].class == class)
        .map(|at| fitting(blocks, at, |other| other.class == class, bytes));
    runs.reduce(|best, run| if run.len() > best.len() { run } else { best }).unwrap_or(0..0)
}

/// Consecutive layers from `start` on for which `alike` holds, within the limits.
fn fitting(blocks: &[BlockFacts], start: usize, alike: impl Fn(&BlockFacts) -> bool, limits: RunBytes) -> Range<usize> {
    let mut end = start + 1;
    let mut bytes = blocks[start].weight_bytes;
    while blocks[start].repeats && (end - start < USUAL_RUN || bytes < limits.enough) {
        let Some(next) = blocks.get(end).filter(|next| next.repeats && alike(next)) else { break };
        bytes = bytes.saturating_add(next.weight_bytes);
        if bytes > limits.most {
            break;
        }
        end += 1;
    }
    start..end
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `e` an embedding, `h` a head, other letters layers, equal letters equal classes.
    fn blocks(text: &str) -> Vec<BlockFacts> {
        let mut seen: Vec<char> = Vec::new();
        let mut fact = |c: char| {
            let class = seen.iter().position(|other| *other == c).unwrap_or_else(|| {
                seen.push(c);
                seen.len() - 1
            });
            BlockFacts { class: class as u32, repeats: c != 'e' && c != 'h', weight_bytes: 10 }
        };
        text.chars().map(&mut fact).collect()
    }

    /// `block x run_length` of each target.
    fn chosen(text: &str, each_block: bool, most: u64) -> String {
        with(text, each_block, RunBytes { most, enough: 0 })
    }

    fn with(text: &str, each_block: bool, bytes: RunBytes) -> String {
        let targets = targets(&blocks(text), each_block, bytes);
        targets.iter().map(|t| format!("{}x{}", t.block, t.run_length)).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn one_of_each_class_and_four_layers_together() {
        assert_eq!(chosen("eaabbbbbbh", false, 1000), "0x1 1x2 3x4 9x1");
        assert_eq!(chosen("eabbbh", false, 1000), "0x1 1x1 2x3 5x1");
        assert_eq!(chosen("ebabbh", false, 1000), "0x1 3x2 2x1 5x1", "the longest run, not the first");
    }

    #[test]
    fn bytes_limit_the_run() {
        assert_eq!(chosen("ebbbbh", false, 29), "0x1 1x2 5x1");
        assert_eq!(chosen("ebbbbh", false, 1), "0x1 1x1 5x1");
    }

    #[test]
    fn a_run_is_larger_than_the_caches() {
        let enough = |enough| with("ebbbbbbbbh", false, RunBytes { most: 1000, enough });
        assert_eq!(enough(55), "0x1 1x6 9x1");
        assert_eq!(enough(1 << 40), "0x1 1x8 9x1", "all layers");
        assert_eq!(with("ebbbbbbbbh", false, RunBytes { most: 50, enough: 1 << 40 }), "0x1 1x5 9x1");
    }

    #[test]
    fn alternating_layers_are_measured_together() {
        assert_eq!(chosen("eabababh", false, 1000), "0x1 1x4 2x4 7x1");
        assert_eq!(chosen("eabch", false, 1000), "0x1 1x3 2x2 3x1 4x1");
        assert_eq!(chosen("eah", false, 1000), "0x1 1x1 2x1");
    }

    #[test]
    fn each_block_by_itself() {
        assert_eq!(chosen("eabbbh", true, 1000), "0x1 1x1 2x3 3x1 4x1 5x1");
        assert_eq!(chosen("e", true, 1000), "0x1");
        assert_eq!(chosen("", false, 1000), "");
    }
}
