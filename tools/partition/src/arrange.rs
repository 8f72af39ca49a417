//! Turns counts (how many blocks of each class have each block placement) into placements, in several patterns.
//!
//! Blocks that are not streamed form runs, so that a pass has few crossings. Streamed blocks are spread among them in bursts, so that
//! their copies overlap with the computation of the others.

use crate::evaluate::Goal;
use crate::program::PlacementCounts;
use crate::regions::Region;
use crate::{BlockPlacement, Phase, Placement};
use std::collections::{BTreeSet, HashSet};

/// Distinct allowed placements with these counts. Tries each class of a region separately, and all classes of a region merged;
/// merging gives unbroken runs but ignores the counts per class.
pub(crate) fn arrangements(
    goal: &Goal,
    regions: &[Region],
    counts: &PlacementCounts,
    allowed: &[Vec<BlockPlacement>],
) -> Vec<Vec<BlockPlacement>> {
    let is_allowed = |placements: &[BlockPlacement]| {
        placements.iter().zip(allowed).all(|(placement, allowed)| allowed.contains(placement))
    };
    let mut all: Vec<Vec<BlockPlacement>> = Vec::new();
    let mut seen = HashSet::new();
    let has_mixed_region = regions.iter().any(|region| region.classes.len() > 1);
    let class_handling: &[Classes] =
        if has_mixed_region { &[Classes::Separate, Classes::Merged] } else { &[Classes::Separate] };
    for pattern in patterns(goal) {
        for classes in class_handling {
            let mut placements = vec![BlockPlacement::both(Placement::Cpu); allowed.len()];
            for (region, counts) in regions.iter().zip(counts) {
                pattern.fill(region, counts, *classes, &mut placements);
            }
            if is_allowed(&placements) && seen.insert(dedup_key(&placements)) {
                all.push(placements);
            }
        }
    }
    all
}

fn dedup_key(placements: &[BlockPlacement]) -> Vec<u16> {
    placements.iter().flat_map(|placement| [placement.prefill.code(), placement.decode.code()]).collect()
}

/// All counts that differ in one block's placement.
pub(crate) fn neighbours(
    regions: &[Region],
    counts: &PlacementCounts,
    allowed: &[Vec<BlockPlacement>],
) -> Vec<PlacementCounts> {
    let mut all = Vec::new();
    for (number, region) in regions.iter().enumerate() {
        for (class, members) in region.classes.iter().enumerate() {
            for (from, _) in &counts[number][class] {
                for to in allowed[members[0]].iter().filter(|to| *to != from) {
                    let mut other = counts.clone();
                    shift(&mut other[number][class], *from, *to);
                    all.push(other);
                }
            }
        }
    }
    all
}

fn shift(counts: &mut Vec<(BlockPlacement, usize)>, from: BlockPlacement, to: BlockPlacement) {
    counts.iter_mut().filter(|(placement, _)| *placement == from).for_each(|(_, count)| *count -= 1);
    match counts.iter_mut().find(|(placement, _)| *placement == to) {
        Some((_, count)) => *count += 1,
        None => counts.push((to, 1)),
    }
    counts.retain(|(_, count)| *count > 0);
    counts.sort();
}

/// How the classes of a region are arranged.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Classes {
    /// Each class by itself, at the positions of its blocks.
    Separate,
    /// All blocks of the region as one sequence.
    Merged,
}

/// An order of the block placements of a class or region.
#[derive(Clone, Copy, Debug)]
struct Pattern {
    /// The phase whose streamed blocks are spread.
    phase: Phase,
    /// Host blocks before GPU blocks, or after them.
    host_first: bool,
    /// Consecutive streamed blocks.
    burst: usize,
    /// The blocks among which the bursts are spread.
    among: SpreadAmong,
    /// Where a burst lies in its share of the other blocks: before them (0), in their middle (1) or after them (2).
    lead_halves: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum SpreadAmong {
    All,
    Host,
    Gpus,
    /// The blocks that are resident on the same GPU.
    SameGpu,
}

fn patterns(goal: &Goal) -> Vec<Pattern> {
    let max_slots = goal.slots.iter().max().map_or(1, |slots| *slots as usize).max(1);
    let mut patterns = Vec::new();
    for phase in goal.phases() {
        for host_first in [true, false] {
            for among in [SpreadAmong::All, SpreadAmong::Host, SpreadAmong::Gpus, SpreadAmong::SameGpu] {
                for lead_halves in [2, 1, 0] {
                    let with_burst = |burst| Pattern { phase, host_first, burst, among, lead_halves };
                    patterns.extend((1..=max_slots).map(with_burst));
                }
            }
        }
    }
    patterns
}

impl Pattern {
    /// Writes the region's block placements into `placements`.
    fn fill(
        self,
        region: &Region,
        counts: &[Vec<(BlockPlacement, usize)>],
        classes: Classes,
        placements: &mut [BlockPlacement],
    ) {
        if classes == Classes::Merged {
            let order = self.order(&counts.concat());
            region.blocks.clone().zip(order).for_each(|(block, placement)| placements[block] = placement);
            return;
        }
        for (class, counts) in region.classes.iter().zip(counts) {
            let order = self.order(counts);
            class.iter().zip(order).for_each(|(block, placement)| placements[*block] = placement);
        }
    }

    fn order(self, counts: &[(BlockPlacement, usize)]) -> Vec<BlockPlacement> {
        let mut sorted: Vec<BlockPlacement> =
            counts.iter().flat_map(|(placement, count)| std::iter::repeat_n(*placement, *count)).collect();
        sorted.sort_by_key(|placement| (placement.in_phase(self.phase), *placement));
        let (mut streamed, mut host, mut gpus) = (Vec::new(), Vec::new(), Vec::new());
        for placement in sorted {
            match placement.in_phase(self.phase) {
                Placement::Streamed(_) => streamed.push(placement),
                Placement::Cpu => host.push(placement),
                Placement::Resident(_) => gpus.push(placement),
            }
        }
        match self.among {
            SpreadAmong::All => {
                let others = if self.host_first { [host, gpus].concat() } else { [gpus, host].concat() };
                return self.spread(&others, &streamed);
            }
            SpreadAmong::Host if !host.is_empty() => host = self.spread(&host, &streamed),
            SpreadAmong::Gpus if !gpus.is_empty() => gpus = self.spread(&gpus, &streamed),
            SpreadAmong::SameGpu => gpus = self.spread_on_each_gpu(&gpus, &streamed),
            SpreadAmong::Host | SpreadAmong::Gpus => gpus.extend(streamed),
        }
        if self.host_first { [host, gpus].concat() } else { [gpus, host].concat() }
    }

    /// Spreads the streamed blocks of each GPU among the resident blocks of the same GPU.
    fn spread_on_each_gpu(self, resident: &[BlockPlacement], streamed: &[BlockPlacement]) -> Vec<BlockPlacement> {
        let gpu_of = |placement: &BlockPlacement| placement.in_phase(self.phase).gpu();
        let gpus: BTreeSet<_> = resident.iter().chain(streamed).map(gpu_of).collect();
        let mut order = Vec::new();
        for gpu in gpus {
            let on_gpu = |placements: &[BlockPlacement]| -> Vec<BlockPlacement> {
                placements.iter().copied().filter(|placement| gpu_of(placement) == gpu).collect()
            };
            order.extend(self.spread(&on_gpu(resident), &on_gpu(streamed)));
        }
        order
    }

    /// Spreads bursts of `streamed` evenly among the others.
    fn spread(self, others: &[BlockPlacement], streamed: &[BlockPlacement]) -> Vec<BlockPlacement> {
        let bursts: Vec<&[BlockPlacement]> = streamed.chunks(self.burst).collect();
        let mut order = Vec::new();
        let mut placed = 0;
        for (number, burst) in bursts.iter().enumerate() {
            let until = others.len() * (2 * number + self.lead_halves) / (2 * bursts.len());
            order.extend_from_slice(&others[placed..until]);
            order.extend_from_slice(burst);
            placed = until;
        }
        order.extend_from_slice(&others[placed..]);
        order
    }
}
