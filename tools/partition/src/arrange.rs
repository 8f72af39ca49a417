//! Turns counts (how many blocks of each class make each choice) into placements, in several patterns.
//!
//! Blocks that are not streamed form runs, so that a pass has few crossings. Streamed blocks are spread among them in bursts, so that
//! their copies overlap with the computation of the others.

use crate::evaluate::Goal;
use crate::program::Counts;
use crate::regions::Region;
use crate::{Choice, Phase, Where};
use std::collections::{BTreeSet, HashSet};

/// Distinct allowed placements with these counts. Tries each class of a region separately, and all classes of a region merged;
/// merging gives unbroken runs but ignores the counts per class.
pub(crate) fn arrangements(
    goal: &Goal,
    regions: &[Region],
    counts: &Counts,
    allowed: &[Vec<Choice>],
) -> Vec<Vec<Choice>> {
    let is_allowed = |choices: &[Choice]| choices.iter().zip(allowed).all(|(choice, allowed)| allowed.contains(choice));
    let mut all: Vec<Vec<Choice>> = Vec::new();
    let mut seen = HashSet::new();
    let has_mixed_region = regions.iter().any(|region| region.classes.len() > 1);
    let class_handling: &[Classes] =
        if has_mixed_region { &[Classes::Separate, Classes::Merged] } else { &[Classes::Separate] };
    for pattern in patterns(goal) {
        for classes in class_handling {
            let mut choices = vec![Choice::both(Where::Cpu); allowed.len()];
            for (region, counts) in regions.iter().zip(counts) {
                pattern.fill(region, counts, *classes, &mut choices);
            }
            if is_allowed(&choices) && seen.insert(dedup_key(&choices)) {
                all.push(choices);
            }
        }
    }
    all
}

fn dedup_key(choices: &[Choice]) -> Vec<u16> {
    choices.iter().flat_map(|choice| [choice.prefill.code(), choice.decode.code()]).collect()
}

/// All counts that differ in one block's choice.
pub(crate) fn neighbours(regions: &[Region], counts: &Counts, allowed: &[Vec<Choice>]) -> Vec<Counts> {
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

fn shift(counts: &mut Vec<(Choice, usize)>, from: Choice, to: Choice) {
    counts.iter_mut().filter(|(choice, _)| *choice == from).for_each(|(_, count)| *count -= 1);
    match counts.iter_mut().find(|(choice, _)| *choice == to) {
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

/// An order of the choices of a class or region.
#[derive(Clone, Copy, Debug)]
struct Pattern {
    /// The phase whose streamed blocks are spread.
    phase: Phase,
    /// Host blocks before GPU blocks, or after them.
    host_first: bool,
    /// Consecutive streamed blocks.
    burst: usize,
    /// The blocks among which they are spread.
    among: SpreadAmong,
    /// Half-intervals of other blocks placed before each burst: 0, 1 or 2.
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
    /// Writes the region's choices into `choices`.
    fn fill(self, region: &Region, counts: &[Vec<(Choice, usize)>], classes: Classes, choices: &mut [Choice]) {
        if classes == Classes::Merged {
            let order = self.order(&counts.concat());
            region.blocks.clone().zip(order).for_each(|(block, choice)| choices[block] = choice);
            return;
        }
        for (class, counts) in region.classes.iter().zip(counts) {
            let order = self.order(counts);
            class.iter().zip(order).for_each(|(block, choice)| choices[*block] = choice);
        }
    }

    fn order(self, counts: &[(Choice, usize)]) -> Vec<Choice> {
        let mut sorted: Vec<Choice> =
            counts.iter().flat_map(|(choice, count)| std::iter::repeat_n(*choice, *count)).collect();
        sorted.sort_by_key(|choice| (choice.of(self.phase), *choice));
        let (mut streamed, mut host, mut gpus) = (Vec::new(), Vec::new(), Vec::new());
        for choice in sorted {
            match choice.of(self.phase) {
                Where::Streamed(_) => streamed.push(choice),
                Where::Cpu => host.push(choice),
                Where::Resident(_) => gpus.push(choice),
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
    fn spread_on_each_gpu(self, resident: &[Choice], streamed: &[Choice]) -> Vec<Choice> {
        let gpu_of = |choice: &Choice| choice.of(self.phase).gpu();
        let gpus: BTreeSet<_> = resident.iter().chain(streamed).map(gpu_of).collect();
        let mut order = Vec::new();
        for gpu in gpus {
            let on_gpu = |choices: &[Choice]| -> Vec<Choice> {
                choices.iter().copied().filter(|choice| gpu_of(choice) == gpu).collect()
            };
            order.extend(self.spread(&on_gpu(resident), &on_gpu(streamed)));
        }
        order
    }

    /// Spreads bursts of `streamed` evenly among the others.
    fn spread(self, others: &[Choice], streamed: &[Choice]) -> Vec<Choice> {
        let bursts: Vec<&[Choice]> = streamed.chunks(self.burst).collect();
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
