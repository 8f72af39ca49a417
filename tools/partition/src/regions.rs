//! Blocks that are interchangeable, so that a program may count them instead of telling them apart.
//!
//! A region is a stretch of neighbours, a class the blocks of a region that cost and hold the same. Where a model has more
//! kinds of blocks than a program can take, similar ones share a class, which then has the least of each number: bounds
//! stay bounds.

use crate::{Block, Choice, Problem};
use std::collections::BTreeMap;
use std::ops::Range;

/// Most regions that are told apart; more become one in the middle.
const MOST_REGIONS: usize = 14;
/// Most classes of blocks in the middle.
const MOST_CLASSES: usize = 4;
/// Classes closer than this, as a part of their numbers, are one.
const SIMILAR: f64 = 0.05;
/// A shared weight smaller than this part of a block (a table of rotary angles, say) does not tell blocks apart.
const SMALL: f64 = 1.0 / 16.0;

/// A stretch of neighbours.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Region {
    pub blocks: Range<usize>,
    /// Blocks of each class, by position.
    pub classes: Vec<Vec<usize>>,
}

/// Cuts the blocks into regions. Blocks in one class have the same choices.
pub(crate) fn regions(problem: &Problem, allowed: &[Vec<Choice>]) -> Vec<Region> {
    let runs = equal_runs(problem, allowed);
    if runs.len() <= MOST_REGIONS {
        let region = |run: Range<usize>| Region { classes: vec![run.clone().collect()], blocks: run };
        return runs.into_iter().map(region).collect();
    }
    // The ends of a model are unlike its middle, and few: they stay by themselves.
    let (head, tail) = (irregular(problem, runs.iter()), irregular(problem, runs.iter().rev()));
    let middle = runs[head].start..runs[runs.len() - 1 - tail].end;
    let single = |run: &Range<usize>| Region { classes: vec![run.clone().collect()], blocks: run.clone() };
    let mut regions: Vec<Region> = runs[..head].iter().map(single).collect();
    regions.push(Region { classes: classes(problem, allowed, middle.clone()), blocks: middle });
    regions.extend(runs[runs.len() - tail..].iter().map(single));
    regions
}

/// Runs at an end unlike the usual in bytes or in what they share: embeddings, heads, first dense layers; at most four.
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
            Some(run) if alike(problem, allowed, run.start, i) && !problem.cuts.contains(&i) => run.end = i + 1,
            _ => runs.push(i..i + 1),
        }
    }
    runs
}

/// Whether two blocks may trade places without a difference.
fn alike(problem: &Problem, allowed: &[Vec<Choice>], a: usize, b: usize) -> bool {
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
    // What enters the first block of a model is not a boundary.
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

/// What a block holds of one kind: keys and bytes.
pub(crate) type Held = fn(&Block) -> &[(u32, u64)];

const WEIGHTS: Held = |block| &block.weights;
const CONSTANTS: Held = |block| block.streamed.constants();

/// What a block holds and another block too, and its bytes.
pub(crate) fn shared(problem: &Problem, of: Held, block: usize) -> BTreeMap<u32, u64> {
    let others = |key: u32| {
        let mut others = problem.blocks.iter().enumerate().filter(|(other, _)| *other != block);
        others.any(|(_, other)| of(other).iter().any(|(its, _)| *its == key))
    };
    of(&problem.blocks[block]).iter().copied().filter(|(key, _)| others(*key)).collect()
}

/// Those of a size that matters.
pub(crate) fn large_shared(problem: &Problem, of: Held, block: usize) -> BTreeMap<u32, u64> {
    let least = SMALL * problem.weight_bytes(block) as f64;
    shared(problem, of, block).into_iter().filter(|(_, bytes)| *bytes as f64 >= least).collect()
}

fn classes(problem: &Problem, allowed: &[Vec<Choice>], blocks: Range<usize>) -> Vec<Vec<usize>> {
    let mut classes: Vec<Vec<usize>> = Vec::new();
    for i in blocks {
        match classes.iter_mut().find(|class| alike(problem, allowed, class[0], i)) {
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

/// The two classes with the same choices whose blocks are nearest in bytes and in time on the host, and how far apart they
/// are, as parts of themselves.
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
