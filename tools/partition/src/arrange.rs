//! Arranges counts (how many blocks make each choice) into placements, in several patterns.
//!
//! Blocks that are not streamed form runs, so that a pass has few crossings. Streamed blocks are spread among them in bursts, so that
//! their copies overlap with the computation of the others.

use crate::evaluate::Goal;
use crate::program::Counts;
use crate::regions::Region;
use crate::{Choice, Phase, Where};
use std::collections::{BTreeSet, HashSet};

/// Allowed placements with these counts, no two the same. Classes of a region are arranged each by itself, and all
/// together: then runs are unbroken and the classes' own counts are not kept.
pub(crate) fn arrangements(
    goal: &Goal,
    regions: &[Region],
    counts: &Counts,
    allowed: &[Vec<Choice>],
) -> Vec<Vec<Choice>> {
    let may = |choices: &[Choice]| choices.iter().zip(allowed).all(|(choice, allowed)| allowed.contains(choice));
    let mut all: Vec<Vec<Choice>> = Vec::new();
    let mut seen = HashSet::new();
    let mixed = regions.iter().any(|region| region.classes.len() > 1);
    for pattern in patterns(goal) {
        for together in [false, true].into_iter().filter(|together| mixed || !together) {
            let mut choices = vec![Choice::both(Where::Cpu); allowed.len()];
            for (region, counts) in regions.iter().zip(counts) {
                pattern.fill(region, counts, together, &mut choices);
            }
            if may(&choices) && seen.insert(codes(&choices)) {
                all.push(choices);
            }
        }
    }
    all
}

fn codes(choices: &[Choice]) -> Vec<u16> {
    choices.iter().flat_map(|choice| [choice.prefill.code(), choice.decode.code()]).collect()
}

/// All counts in which one block makes another choice.
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

/// A way to order the blocks of a class.
#[derive(Clone, Copy, Debug)]
struct Pattern {
    /// The phase whose streamed blocks are spread.
    phase: Phase,
    /// Host blocks before GPU blocks, or after them.
    host_first: bool,
    /// Consecutive streamed blocks.
    burst: usize,
    /// Blocks that they are spread among.
    among: SpreadAmong,
    /// Halves of a burst's share of the others that precede it: 0, 1 or 2.
    before: usize,
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
    let most = goal.slots.iter().max().map_or(1, |slots| *slots as usize).max(1);
    let mut patterns = Vec::new();
    for phase in goal.phases() {
        for host_first in [true, false] {
            for among in [SpreadAmong::All, SpreadAmong::Host, SpreadAmong::Gpus, SpreadAmong::SameGpu] {
                for before in [2, 1, 0] {
                    patterns.extend((1..=most).map(|burst| Pattern { phase, host_first, burst, among, before }));
                }
            }
        }
    }
    patterns
}

impl Pattern {
    fn fill(self, region: &Region, counts: &[Vec<(Choice, usize)>], together: bool, choices: &mut [Choice]) {
        if together {
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
        let is_streamed = |choice: Choice| matches!(choice.of(self.phase), Where::Streamed(_));
        let of = |wanted: &dyn Fn(Choice) -> bool| -> Vec<Choice> {
            let mut all: Vec<Choice> = Vec::new();
            for (choice, count) in counts.iter().filter(|(choice, _)| wanted(*choice)) {
                all.extend(std::iter::repeat_n(*choice, *count));
            }
            all.sort_by_key(|choice| (choice.of(self.phase), *choice));
            all
        };
        let on_host = |choice: Choice| choice.of(self.phase) == Where::Cpu;
        let streamed = of(&is_streamed);
        let host = of(&on_host);
        let gpus = of(&|choice| !is_streamed(choice) && !on_host(choice));
        let (mut host, mut gpus) = match self.among {
            SpreadAmong::All => {
                let all = if self.host_first { [host, gpus].concat() } else { [gpus, host].concat() };
                return self.spread(&all, &streamed);
            }
            SpreadAmong::Host if !host.is_empty() => (self.spread(&host, &streamed), gpus),
            SpreadAmong::Gpus if !gpus.is_empty() => (host, self.spread(&gpus, &streamed)),
            SpreadAmong::SameGpu => {
                let gpu = |choice: &Choice| choice.of(self.phase).gpu();
                let numbers: BTreeSet<_> = gpus.iter().chain(&streamed).map(gpu).collect();
                let own = |all: &[Choice], number| -> Vec<Choice> {
                    all.iter().copied().filter(|choice| gpu(choice) == number).collect()
                };
                let each = |number| self.spread(&own(&gpus, number), &own(&streamed, number));
                (host, numbers.into_iter().flat_map(each).collect())
            }
            _ => (host, [gpus, streamed].concat()),
        };
        if !self.host_first {
            std::mem::swap(&mut host, &mut gpus);
        }
        [host, gpus].concat()
    }

    /// Spreads bursts of `streamed` evenly among the others.
    fn spread(self, others: &[Choice], streamed: &[Choice]) -> Vec<Choice> {
        let bursts: Vec<&[Choice]> = streamed.chunks(self.burst).collect();
        let mut all = Vec::new();
        let mut placed = 0;
        for (number, burst) in bursts.iter().enumerate() {
            let until = others.len() * (2 * number + self.before) / (2 * bursts.len());
            all.extend_from_slice(&others[placed..until]);
            all.extend_from_slice(burst);
            placed = until;
        }
        all.extend_from_slice(&others[placed..]);
        all
    }
}
