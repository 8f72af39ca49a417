//! Evaluates placements by simulation, rejects those that do not fit, and keeps the best.

use crate::memory::usage_with_cuts;
use crate::schedule::{crossings, handover, placements_in_phase};
use crate::simulate::{DiskTimes, host_ms, sequence_ms};
use crate::transfer::StateSwap;
use crate::{BlockPlacement, Mechanisms, Phase, Problem};
use std::cmp::Ordering;
use std::collections::HashMap;

/// Times with at most this relative difference are equal.
pub(crate) const TIME_TOLERANCE: f64 = 1e-9;

/// The score of a placement; less is better.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Score {
    /// Weighted milliseconds.
    pub objective: f64,
    /// Device changes in all phases with a weight.
    pub crossings: usize,
}

/// An evaluated placement.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ScoredPlacement {
    pub score: Score,
    pub placements: Vec<BlockPlacement>,
    pub slots: Vec<u32>,
}

impl ScoredPlacement {
    /// Compares by time, then by crossings, then by block placements.
    pub fn order(&self, other: &ScoredPlacement) -> Ordering {
        let (a, b) = (&self.score, &other.score);
        let by_time =
            match (a.objective - b.objective).abs() <= TIME_TOLERANCE * a.objective.abs().max(b.objective.abs()) {
                true => Ordering::Equal,
                false => a.objective.total_cmp(&b.objective),
            };
        by_time.then(a.crossings.cmp(&b.crossings)).then_with(|| self.placements.cmp(&other.placements))
    }

    pub fn beats(&self, other: &ScoredPlacement) -> bool {
        self.order(other) == Ordering::Less
    }

    /// Number of blocks with each block placement, number of crossings, slots. Local search starts from placements of different shapes.
    fn shape(&self) -> (Vec<BlockPlacement>, usize, &[u32]) {
        let mut sorted = self.placements.clone();
        sorted.sort();
        (sorted, self.score.crossings, &self.slots)
    }
}

/// What to optimize: the weight of each phase, the allowed mechanisms, the number of slots.
#[derive(Clone, Debug)]
pub(crate) struct Goal {
    /// Weights of the prefill time and of the time of a decoded token.
    pub weights: [f64; 2],
    pub mechanisms: Mechanisms,
    /// Slots of each GPU that weights are streamed to.
    pub slots: Vec<u32>,
}

impl Goal {
    /// Phases with a weight above 0.
    pub fn phases(&self) -> impl Iterator<Item = Phase> + use<> {
        let weights = self.weights;
        Phase::BOTH.into_iter().filter(move |phase| weights[*phase as usize] > 0.0)
    }
}

/// Evaluates placements of one problem for one goal.
pub(crate) struct Evaluator<'a> {
    pub problem: &'a Problem,
    pub goal: Goal,
    /// Simulated milliseconds of the partition sequence of each phase, by the codes of places and state swaps.
    sequence_cache: [HashMap<Vec<u32>, f64>; 2],
    /// The best placements, best first, no two with the same shape.
    best: Vec<ScoredPlacement>,
    keep: usize,
    /// Number of evaluations so far.
    pub evaluations: usize,
}

impl<'a> Evaluator<'a> {
    /// Keeps the best `keep` placements.
    pub fn new(problem: &'a Problem, goal: Goal, keep: usize) -> Self {
        Evaluator {
            problem,
            goal,
            sequence_cache: Default::default(),
            best: Vec::new(),
            keep: keep.max(1),
            evaluations: 0,
        }
    }

    /// Evaluates a placement; `None` if it does not fit or never finishes.
    pub fn evaluate(&mut self, placements: &[BlockPlacement]) -> Option<ScoredPlacement> {
        self.evaluations += 1;
        let usage = usage_with_cuts(self.problem, placements, &self.goal.slots);
        usage.check(self.problem, self.goal.mechanisms).ok()?;
        let mut score = Score { objective: 0.0, crossings: 0 };
        for phase in self.goal.phases() {
            score.crossings += crossings(&placements_in_phase(placements, phase));
            let (sequence_ms, passes) = (self.sequence_ms(placements, phase), self.problem.passes(phase) as f64);
            let host_ms = host_ms(self.problem, placements, phase);
            let disk = DiskTimes::of(self.problem, placements, &usage, phase);
            let mut ms = disk.beside(self.problem, sequence_ms, host_ms, passes).ms;
            if phase == Phase::Prefill {
                ms += handover(self.problem, placements).iter().map(|step| step.ms).sum::<f64>();
            }
            score.objective += self.goal.weights[phase as usize] * ms;
        }
        let candidate = ScoredPlacement { score, placements: placements.to_vec(), slots: self.slots(placements) };
        score.objective.is_finite().then(|| {
            self.keep_if_among_best(&candidate);
            candidate
        })
    }

    /// The best placements so far, best first, no two with the same shape.
    pub fn best(&self) -> &[ScoredPlacement] {
        &self.best
    }

    /// Time of the partition sequence of a phase, milliseconds, without disk and handover of state.
    fn sequence_ms(&mut self, placements: &[BlockPlacement], phase: Phase) -> f64 {
        let (problem, slots) = (self.problem, &self.goal.slots);
        let code = |(i, placement): (usize, &BlockPlacement)| {
            let swap = problem.state_swap(i, *placement, phase).map_or(0, StateSwap::code);
            u32::from(placement.in_phase(phase).code()) | swap << 16
        };
        let codes = placements.iter().enumerate().map(code).collect();
        *self.sequence_cache[phase as usize]
            .entry(codes)
            .or_insert_with(|| sequence_ms(problem, placements, slots, phase))
    }

    /// Slots of each GPU; 0 if nothing is streamed to it.
    fn slots(&self, placements: &[BlockPlacement]) -> Vec<u32> {
        let is_streamed_to = |gpu| placements.iter().any(|placement| placement.is_streamed_to(gpu));
        self.goal.slots.iter().enumerate().map(|(gpu, slots)| if is_streamed_to(gpu) { *slots } else { 0 }).collect()
    }

    fn keep_if_among_best(&mut self, candidate: &ScoredPlacement) {
        let is_full = self.best.len() >= self.keep;
        if is_full && self.best.last().is_some_and(|worst| !candidate.beats(worst)) {
            return;
        }
        match self.best.iter().position(|known| known.shape() == candidate.shape()) {
            Some(same) if candidate.beats(&self.best[same]) => self.best[same] = candidate.clone(),
            Some(_) => return,
            None => self.best.push(candidate.clone()),
        }
        self.best.sort_by(ScoredPlacement::order);
        self.best.truncate(self.keep);
    }
}
