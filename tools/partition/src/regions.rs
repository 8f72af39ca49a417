//! Groups interchangeable blocks, so that a search can count them.
//!
//! A region is a range of neighbours. A class is a set of blocks in a region with equal times and sizes. If a model has too many
//! different blocks, similar ones share a class. The program then uses the minimum of each of their numbers, so its bound stays a
//! lower bound.

use crate::{BlockPlacement, BlockSpec, Problem};
use std::collections::BTreeMap;
use std::ops::Range;

/// Maximum number of regions; with more, those in the middle are merged into one.
const MAX_REGIONS: usize = 14;
/// Maximum number of classes in the merged region.
const MAX_CLASSES: usize = 4;
/// Classes with at most this relative difference are merged.
const MERGE_DIFFERENCE: f64 = 0.05;
/// Blocks may differ in shared weights below this share of a block (for example, rotary tables) and still be equal.
const SMALL_SHARE: f64 = 1.0 / 16.0;

/// A range of neighbours.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Region {
    pub blocks: Range<usize>,
    /// Blocks of each class, by position.
    pub classes: Vec<Vec<usize>>,
}

/// Divides the blocks into regions. Blocks in one class have the same allowed block placements.
pub(crate) fn regions(problem: &Problem, allowed: &[Vec<BlockPlacement>]) -> Vec<Region> {
    let runs = equal_runs(problem, allowed);
    if runs.len() <= MAX_REGIONS {
        return runs.iter().map(one_class).collect();
    }
    // The blocks at the ends of a model (embedding, head) differ from its middle and stay separate.
    let (head, tail) = (irregular(problem, runs.iter()), irregular(problem, runs.iter().rev()));
    let middle = runs[head].start..runs[runs.len() - 1 - tail].end;
    let mut regions: Vec<Region> = runs[..head].iter().map(one_class).collect();
    regions.push(Region { classes: classes(problem, allowed, middle.clone()), blocks: middle });
    regions.extend(runs[runs.len() - tail..].iter().map(one_class));
    regions
}

/// A region of equal blocks.
fn one_class(run: &Range<usize>) -> Region {
    Region { blocks: run.clone(), classes: vec![run.clone().collect()] }
}

/// Number of runs at an end, at most four, that differ from the median block in size or shared weights: embeddings, heads, first dense
/// layers.
fn irregular<'a>(problem: &Problem, runs: impl Iterator<Item = &'a Range<usize>>) -> usize {
    let mut sizes: Vec<(u64, usize)> = (0..problem.blocks.len()).map(|i| (problem.weight_bytes(i), i)).collect();
    sizes.sort_unstable();
    let (usual, block) = sizes[sizes.len() / 2];
    let is_irregular = |run: &&Range<usize>| {
        let bytes = problem.weight_bytes(run.start);
        let shares_others = large_shared(problem, WEIGHTS, run.start) != large_shared(problem, WEIGHTS, block);
        bytes > usual + usual / 4 || bytes < usual - usual / 4 || shares_others
    };
    runs.take(4).take_while(is_irregular).count()
}

/// Runs of equal neighbours; a cut ends a run.
fn equal_runs(problem: &Problem, allowed: &[Vec<BlockPlacement>]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for i in 0..problem.blocks.len() {
        match runs.last_mut() {
            Some(run) if are_equal(problem, allowed, run.start, i) && !problem.cuts.contains(&i) => run.end = i + 1,
            _ => runs.push(i..i + 1),
        }
    }
    runs
}

/// Whether two blocks are interchangeable.
fn are_equal(problem: &Problem, allowed: &[Vec<BlockPlacement>], a: usize, b: usize) -> bool {
    let sizes = |i: usize| {
        let block = &problem.blocks[i];
        let BlockSpec { kv_bytes, kv_tensors, kv_grows, kv_filled, .. } = *block;
        let created = (block.folded_bytes, block.widened_bytes, block.session_bytes);
        let workspace = (block.workspace_bytes, block.score_bytes, created);
        let state = (kv_bytes, kv_tensors, kv_grows, kv_filled);
        (problem.weight_bytes(i), problem.streamed_bytes(i), block.streamed.slot_bytes(), state, workspace)
    };
    // Inputs of the model are not a boundary, so the first block's are not compared.
    let boundary = |i: usize| {
        let BlockSpec { boundary_bytes, boundary_tensors, .. } = problem.blocks[i];
        (i > 0).then_some((boundary_bytes, boundary_tensors))
    };
    let same_boundary = a == 0 || boundary(a) == boundary(b);
    sizes(a) == sizes(b)
        && same_boundary
        && allowed[a] == allowed[b]
        && problem.cpu[a] == problem.cpu[b]
        && problem.gpus.iter().all(|gpu| gpu.blocks[a] == gpu.blocks[b])
        && shared(problem, WEIGHTS, a) == shared(problem, WEIGHTS, b)
        && large_shared(problem, CONSTANTS, a) == large_shared(problem, CONSTANTS, b)
}

/// The weights or the constants of a block, as (key, bytes).
pub(crate) type KeysOf = fn(&BlockSpec) -> &[(u32, u64)];

const WEIGHTS: KeysOf = |block| &block.weights;
const CONSTANTS: KeysOf = |block| block.streamed.constants();

/// Keys of a block that other blocks have too, with bytes.
pub(crate) fn shared(problem: &Problem, keys_of: KeysOf, block: usize) -> BTreeMap<u32, u64> {
    let is_shared = |key: u32| {
        let mut others = problem.blocks.iter().enumerate().filter(|(other, _)| *other != block);
        others.any(|(_, other)| keys_of(other).iter().any(|(other_key, _)| *other_key == key))
    };
    keys_of(&problem.blocks[block]).iter().copied().filter(|(key, _)| is_shared(*key)).collect()
}

/// The shared keys that are not small.
pub(crate) fn large_shared(problem: &Problem, keys_of: KeysOf, block: usize) -> BTreeMap<u32, u64> {
    let min_bytes = SMALL_SHARE * problem.weight_bytes(block) as f64;
    shared(problem, keys_of, block).into_iter().filter(|(_, bytes)| *bytes as f64 >= min_bytes).collect()
}

/// The classes of a range of blocks.
fn classes(problem: &Problem, allowed: &[Vec<BlockPlacement>], blocks: Range<usize>) -> Vec<Vec<usize>> {
    let mut classes: Vec<Vec<usize>> = Vec::new();
    for i in blocks {
        match classes.iter_mut().find(|class| are_equal(problem, allowed, class[0], i)) {
            Some(class) => class.push(i),
            None => classes.push(vec![i]),
        }
    }
    while let Some((a, b, distance)) = closest(problem, allowed, &classes) {
        if classes.len() <= MAX_CLASSES && distance > MERGE_DIFFERENCE {
            break;
        }
        let merged = classes.remove(b);
        classes[a].extend(merged);
        classes[a].sort_unstable();
    }
    classes
}

/// The two classes with the same allowed block placements that are most similar in bytes and host time, and their relative difference.
fn closest(problem: &Problem, allowed: &[Vec<BlockPlacement>], classes: &[Vec<usize>]) -> Option<(usize, usize, f64)> {
    let relative = |x: f64, y: f64| if x == y { 0.0 } else { (x - y).abs() / x.max(y) };
    let bytes = |i: usize| (problem.weight_bytes(i) + problem.blocks[i].kv_bytes) as f64;
    let mut closest: Option<(usize, usize, f64)> = None;
    for a in 0..classes.len() {
        for b in a + 1..classes.len() {
            let (x, y) = (classes[a][0], classes[b][0]);
            let same_shared = large_shared(problem, WEIGHTS, x) == large_shared(problem, WEIGHTS, y);
            if !same_shared || allowed[x] != allowed[y] {
                continue;
            }
            let sum = relative(bytes(x), bytes(y)) + relative(problem.cpu[x].decode_ms, problem.cpu[y].decode_ms);
            let distance = if sum.is_nan() { f64::INFINITY } else { sum };
            if closest.is_none_or(|(_, _, known)| distance < known) {
                closest = Some((a, b, distance));
            }
        }
    }
    closest
}
