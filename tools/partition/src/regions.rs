//! Groups interchangeable blocks, so that a search can count them.
//!
//! A region is a range of neighbours. A class is a set of blocks in a region with equal times and sizes. If a model has too many
//! kinds of blocks, similar ones share a class. The program then uses the least of each of their numbers, so its bound stays a
//! lower bound.

use crate::{Block, Choice, Problem};
use std::collections::BTreeMap;
use std::ops::Range;

/// Most regions; with more, those in the middle are merged into one.
const MOST_REGIONS: usize = 14;
/// Most classes in the merged region.
const MOST_CLASSES: usize = 4;
/// Classes with at most this relative difference are merged.
const SIMILAR: f64 = 0.05;
/// Blocks may differ in shared weights below this part of a block (for example, rotary tables) and still be equal.
const SMALL: f64 = 1.0 / 16.0;

/// A range of neighbours.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Region {
    pub blocks: Range<usize>,
    /// Blocks of each class, by position.
    pub classes: Vec<Vec<usize>>,
}

/// Divides the blocks into regions. Blocks in one class have the same allowed choices.
pub(crate) fn regions(problem: &Problem, allowed: &[Vec<Choice>]) -> Vec<Region> {
    let runs = equal_runs(problem, allowed);
    if runs.len() <= MOST_REGIONS {
        let region = |run: Range<usize>| Region { classes: vec![run.clone().collect()], blocks: run };
        return runs.into_iter().map(region).collect();
    }
    // The blocks at the ends of a model (embedding, head) differ from its middle and stay separate.
    let (head, tail) = (irregular(problem, runs.iter()), irregular(problem, runs.iter().rev()));
    let middle = runs[head].start..runs[runs.len() - 1 - tail].end;
    let single = |run: &Range<usize>| Region { classes: vec![run.clone().collect()], blocks: run.clone() };
    let mut regions: Vec<Region> = runs[..head].iter().map(single).collect();
    regions.push(Region { classes: classes(problem, allowed, middle.clone()), blocks: middle });
    regions.extend(runs[runs.len() - tail..].iter().map(single));
    regions
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

fn equal_runs(problem: &Problem, allowed: &[Vec<Choice>]) -> Vec<Range<usize>> {
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
fn are_equal(problem: &Problem, allowed: &[Vec<Choice>], a: usize, b: usize) -> bool {
    let sizes = |i: usize| {
        let Block { kv_bytes, kv_tensors, kv_grows, kv_filled, workspace_bytes, .. } = problem.blocks[i];
        (
            problem.weight_bytes(i),
            problem.streamed_bytes(i),
            kv_bytes,
            kv_tensors,
            (kv_grows, kv_filled),
            workspace_bytes,
        )
    };
    // The inputs of the first block are not a boundary.
    let boundary = |i: usize| {
        let Block { boundary_bytes, boundary_tensors, .. } = problem.blocks[i];
        (i > 0).then_some((boundary_bytes, boundary_tensors))
    };
    let same_boundary = a == 0 || boundary(a) == boundary(b);
    let gpus = || problem.gpus.iter().all(|gpu| gpu.blocks[a] == gpu.blocks[b]);
    let same_costs = || problem.cpu[a] == problem.cpu[b] && gpus();
    let same_constants = || large_shared(problem, CONSTANTS, a) == large_shared(problem, CONSTANTS, b);
    let same_shared = || shared(problem, WEIGHTS, a) == shared(problem, WEIGHTS, b) && same_constants();
    sizes(a) == sizes(b) && same_boundary && allowed[a] == allowed[b] && same_costs() && same_shared()
}

/// The weights or the constants of a block, as (key, bytes).
pub(crate) type KeysOf = fn(&Block) -> &[(u32, u64)];

const WEIGHTS: KeysOf = |block| &block.weights;
const CONSTANTS: KeysOf = |block| block.streamed.constants();

/// Keys of a block that other blocks have too, with bytes.
pub(crate) fn shared(problem: &Problem, of: KeysOf, block: usize) -> BTreeMap<u32, u64> {
    let others = |key: u32| {
        let mut others = problem.blocks.iter().enumerate().filter(|(other, _)| *other != block);
        others.any(|(_, other)| of(other).iter().any(|(its, _)| *its == key))
    };
    of(&problem.blocks[block]).iter().copied().filter(|(key, _)| others(*key)).collect()
}

/// The shared keys that are not small.
pub(crate) fn large_shared(problem: &Problem, of: KeysOf, block: usize) -> BTreeMap<u32, u64> {
    let least = SMALL * problem.weight_bytes(block) as f64;
    shared(problem, of, block).into_iter().filter(|(_, bytes)| *bytes as f64 >= least).collect()
}

fn classes(problem: &Problem, allowed: &[Vec<Choice>], blocks: Range<usize>) -> Vec<Vec<usize>> {
    let mut classes: Vec<Vec<usize>> = Vec::new();
    for i in blocks {
        match classes.iter_mut().find(|class| are_equal(problem, allowed, class[0], i)) {
            Some(class) => class.push(i),
            None => classes.push(vec![i]),
        }
    }
    while let Some((a, b, distance)) = closest(problem, allowed, &classes) {
        if classes.len() <= MOST_CLASSES && distance > SIMILAR {
            break;
        }
        let merged = classes.remove(b);
        classes[a].extend(merged);
        classes[a].sort_unstable();
    }
    classes
}

/// The two classes with the same allowed choices that are most similar in bytes and host time, and their relative difference.
fn closest(problem: &Problem, allowed: &[Vec<Choice>], classes: &[Vec<usize>]) -> Option<(usize, usize, f64)> {
    let parts = |x: f64, y: f64| if x == y { 0.0 } else { (x - y).abs() / x.max(y) };
    let distance = |a: usize, b: usize| {
        let bytes = |i: usize| (problem.weight_bytes(i) + problem.blocks[i].kv_bytes) as f64;
        let ms = parts(problem.cpu[a].decode_ms, problem.cpu[b].decode_ms);
        let both = parts(bytes(a), bytes(b)) + ms;
        if both.is_nan() { f64::INFINITY } else { both }
    };
    let pairs = (0..classes.len()).flat_map(|a| (a + 1..classes.len()).map(move |b| (a, b)));
    let first = |class: usize| classes[class][0];
    let may = pairs.filter(|(a, b)| {
        let same_shared = large_shared(problem, WEIGHTS, first(*a)) == large_shared(problem, WEIGHTS, first(*b));
        same_shared && allowed[first(*a)] == allowed[first(*b)]
    });
    let by = |(a, b): &(usize, usize)| distance(first(*a), first(*b));
    may.min_by(|x, y| by(x).total_cmp(&by(y))).map(|(a, b)| (a, b, by(&(a, b))))
}
