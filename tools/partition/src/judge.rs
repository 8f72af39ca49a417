//! The judge: prices placements by simulation, refuses what does not fit, and remembers the best it has seen.

use crate::memory::usage;
use crate::moving::Visit;
use crate::schedule::{crossings, handover, places};
use crate::simulate::{chain_ms, disk_ms};
use crate::{Choice, Mechanisms, Phase, Problem, Where};
use std::cmp::Ordering;
use std::collections::HashMap;

/// Two times this close, as a part of them, are equal.
pub(crate) const SAME: f64 = 1e-9;

/// What a placement takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Price {
    /// Weighted milliseconds.
    pub objective: f64,
    /// Changes of device in both phases that count.
    pub crossings: usize,
}

/// A priced placement.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Candidate {
    pub price: Price,
    pub choices: Vec<Choice>,
    pub slots: Vec<u32>,
}

impl Candidate {
    /// Faster first; equally fast: fewer crossings, then order.
    pub fn order(&self, other: &Candidate) -> Ordering {
        let (a, b) = (&self.price, &other.price);
        let by_time = match (a.objective - b.objective).abs() <= SAME * a.objective.abs().max(b.objective.abs()) {
            true => Ordering::Equal,
            false => a.objective.total_cmp(&b.objective),
        };
        by_time.then(a.crossings.cmp(&b.crossings)).then_with(|| self.choices.cmp(&other.choices))
    }

    pub fn beats(&self, other: &Candidate) -> bool {
        self.order(other) == Ordering::Less
    }

    /// How many blocks are where, and how often a token crosses: what tells plans apart that are worth trying.
    fn shape(&self) -> (Vec<Choice>, usize, &[u32]) {
        let mut sorted = self.choices.clone();
        sorted.sort();
        (sorted, self.price.crossings, &self.slots)
    }
}

/// What is asked of a placement: how much each phase weighs, what the runtime may do, how many slots there are.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    /// Weights of prefill and decode milliseconds.
    pub weights: [f64; 2],
    pub mechanisms: Mechanisms,
    /// Slots on each GPU where something is streamed to it.
    pub slots: Vec<u32>,
}

impl Wish {
    /// Phases that weigh something.
    pub fn phases(&self) -> impl Iterator<Item = Phase> + use<> {
        let weights = self.weights;
        Phase::BOTH.into_iter().filter(move |phase| weights[*phase as usize] > 0.0)
    }
}

/// Prices placements of one problem for one wish.
pub(crate) struct Judge<'a> {
    pub problem: &'a Problem,
    pub wish: Wish,
    /// Simulated milliseconds of each phase by the codes of its places and visits.
    seen: [HashMap<Vec<u32>, f64>; 2],
    /// Best first; no two of one shape.
    best: Vec<Candidate>,
    keep: usize,
    /// Placements priced so far.
    pub priced: usize,
}

impl<'a> Judge<'a> {
    /// A judge that remembers the `keep` best.
    pub fn new(problem: &'a Problem, wish: Wish, keep: usize) -> Self {
        Judge { problem, wish, seen: Default::default(), best: Vec::new(), keep: keep.max(1), priced: 0 }
    }

    /// Prices a placement; `None` where it does not fit or never ends.
    pub fn price(&mut self, choices: &[Choice]) -> Option<Candidate> {
        self.priced += 1;
        let usage = usage(self.problem, choices, &self.wish.slots);
        usage.check(self.problem, self.wish.mechanisms).ok()?;
        let mut price = Price { objective: 0.0, crossings: 0 };
        for phase in self.wish.phases() {
            price.crossings += crossings(&places(choices, phase));
            let mut ms = self.chain(choices, phase);
            let disk = disk_ms(self.problem, usage.missing(self.problem, phase));
            ms = ms.max(disk * self.problem.passes(phase) as f64);
            if phase == Phase::Prefill {
                ms += handover(self.problem, choices).iter().map(|step| step.ms).sum::<f64>();
            }
            price.objective += self.wish.weights[phase as usize] * ms;
        }
        let candidate = Candidate { price, choices: choices.to_vec(), slots: self.slots(choices) };
        price.objective.is_finite().then(|| {
            self.remember(&candidate);
            candidate
        })
    }

    /// The best placements priced so far, best first, no two of one shape.
    pub fn best(&self) -> &[Candidate] {
        &self.best
    }

    fn chain(&mut self, choices: &[Choice], phase: Phase) -> f64 {
        let (problem, slots) = (self.problem, &self.wish.slots);
        let code = |(i, choice): (usize, &Choice)| {
            let visit = problem.visit(i, *choice, phase).map_or(0, Visit::code);
            u32::from(choice.of(phase).code()) | visit << 16
        };
        let codes = choices.iter().enumerate().map(code).collect();
        *self.seen[phase as usize].entry(codes).or_insert_with(|| chain_ms(problem, choices, slots, phase))
    }

    /// Slots of the GPUs something is streamed to.
    fn slots(&self, choices: &[Choice]) -> Vec<u32> {
        let streams = |gpu| choices.iter().any(|c| Phase::BOTH.iter().any(|p| c.of(*p) == Where::Streamed(gpu)));
        self.wish.slots.iter().enumerate().map(|(gpu, slots)| if streams(gpu) { *slots } else { 0 }).collect()
    }

    fn remember(&mut self, candidate: &Candidate) {
        let is_full = self.best.len() >= self.keep;
        if is_full && self.best.last().is_some_and(|worst| !candidate.beats(worst)) {
            return;
        }
        match self.best.iter().position(|known| known.shape() == candidate.shape()) {
            Some(same) if candidate.beats(&self.best[same]) => self.best[same] = candidate.clone(),
            Some(_) => return,
            None => self.best.push(candidate.clone()),
        }
        self.best.sort_by(Candidate::order);
        self.best.truncate(self.keep);
    }
}
