//! Exhaustive search by branch and bound: evaluates every placement that could be better than the best one.
//!
//! Blocks are placed in order. A partial placement is pruned if it exceeds a memory budget, or if the lower bound of its blocks
//! plus the lower bound of the remaining blocks is not below the best objective. The limit is a number of steps, not a time, so
//! the search is deterministic.

use crate::bound::PhaseWork;
use crate::evaluate::{Evaluator, TIME_TOLERANCE};
use crate::memory::{may_read_disk, state_on_host};
use crate::{Block, Choice, KvHome, Phase, Problem, Where};

/// Searches for better placements than the evaluator's best. Returns whether the search was complete within `max_steps` steps.
pub(crate) fn exhaust(evaluator: &mut Evaluator, allowed: &[Vec<Choice>], max_steps: usize) -> bool {
    let rest_bounds = rest_bounds(evaluator, allowed);
    let start = PartialPlacement::new(evaluator.problem);
    let mut search = Search { evaluator, allowed, rest_bounds, steps_left: max_steps, choices: Vec::new() };
    search.extend(&start);
    search.steps_left > 0
}

/// Lower bounds of the compute time of the remaining blocks.
#[derive(Clone, Copy, Default)]
struct RestBound {
    /// Of each phase, milliseconds, with the fastest place of each block in that phase.
    phases: [f64; 2],
    /// Of the weighted sum of both phases, weighted milliseconds, with the best choice of each block.
    weighted: f64,
}

/// The bounds of the blocks from each position to the end.
fn rest_bounds(evaluator: &Evaluator, allowed: &[Vec<Choice>]) -> Vec<RestBound> {
    let (problem, weights) = (evaluator.problem, evaluator.goal.weights);
    let mut bounds = vec![RestBound::default(); allowed.len() + 1];
    for block in (0..allowed.len()).rev() {
        let ms = |choice: &Choice, phase: Phase| problem.block_ms_in_all(block, choice.of(phase), phase);
        let mut bound = bounds[block + 1];
        for phase in evaluator.goal.phases() {
            let fastest = allowed[block].iter().map(|choice| ms(choice, phase)).fold(f64::INFINITY, f64::min);
            bound.phases[phase as usize] += fastest;
        }
        let weighted = |choice: &Choice| -> f64 {
            evaluator.goal.phases().map(|phase| weights[phase as usize] * ms(choice, phase)).sum()
        };
        bound.weighted += allowed[block].iter().map(weighted).fold(f64::INFINITY, f64::min);
        bounds[block] = bound;
    }
    bounds
}

/// Work and memory use of the blocks placed so far.
#[derive(Clone)]
struct PartialPlacement {
    work: [PhaseWork; 2],
    handover_ms: f64,
    gpus: Vec<GpuUse>,
    /// Memory use of the host, bytes.
    host_weights: u64,
    host_kv: u64,
    host_workspace: u64,
    /// Weights of the largest block that the host reads whole, bytes.
    host_largest: u64,
}

/// Memory use of a GPU, bytes.
#[derive(Clone, Default)]
struct GpuUse {
    weights: u64,
    kv: [u64; 2],
    /// State that has its own buffer for one phase, in addition to `kv`.
    own_kv: u64,
    workspace: u64,
    largest_streamed: u64,
}

struct Search<'j, 'p> {
    evaluator: &'j mut Evaluator<'p>,
    allowed: &'j [Vec<Choice>],
    /// By position of the first remaining block.
    rest_bounds: Vec<RestBound>,
    steps_left: usize,
    /// Choices of the blocks placed so far.
    choices: Vec<Choice>,
}

impl Search<'_, '_> {
    /// Places the next block in every allowed way, most promising first, and evaluates complete placements.
    fn extend(&mut self, partial: &PartialPlacement) {
        let depth = self.choices.len();
        if depth == self.allowed.len() {
            self.evaluator.evaluate(&self.choices);
            return;
        }
        let mut next: Vec<(f64, Choice, PartialPlacement)> = Vec::new();
        for choice in &self.allowed[depth] {
            let mut extended = partial.clone();
            extended.add(self.evaluator.problem, &self.choices, *choice, &self.evaluator.goal.weights);
            if extended.fits(self.evaluator) {
                next.push((self.lower_bound(&extended, depth + 1), *choice, extended));
            }
        }
        next.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (lower_bound, choice, extended) in next {
            if self.steps_left == 0 || !self.can_improve(lower_bound) {
                return;
            }
            self.steps_left -= 1;
            self.choices.push(choice);
            self.extend(&extended);
            self.choices.pop();
        }
    }

    /// Whether a placement with this lower bound can be better than the best one.
    fn can_improve(&self, lower_bound: f64) -> bool {
        self.evaluator.best().first().is_none_or(|best| lower_bound < best.score.objective * (1.0 - TIME_TOLERANCE))
    }

    /// Lower bound of every placement that starts with `partial`, weighted milliseconds.
    fn lower_bound(&self, partial: &PartialPlacement, depth: usize) -> f64 {
        let (goal, rest) = (&self.evaluator.goal, self.rest_bounds[depth]);
        // Two bounds: each phase on its own, and both phases with the same choices.
        let (mut by_phase, mut weighted) = (0.0, rest.weighted);
        for phase in goal.phases() {
            let (weight, work) = (goal.weights[phase as usize], &partial.work[phase as usize]);
            let sequence = work.sequence + rest.phases[phase as usize];
            by_phase += weight * PhaseWork { sequence, ..work.clone() }.lower_bound(&self.evaluator.problem.gpus);
            weighted += weight * work.sequence;
        }
        by_phase.max(weighted) + goal.weights[Phase::Prefill as usize] * partial.handover_ms
    }
}

impl PartialPlacement {
    fn new(problem: &Problem) -> Self {
        let work = |phase: Phase| PhaseWork {
            sequence: problem.pass_overhead_ms * problem.passes(phase) as f64,
            host: 0.0,
            links: vec![0.0; problem.gpus.len()],
        };
        PartialPlacement {
            work: Phase::BOTH.map(work),
            handover_ms: 0.0,
            gpus: vec![GpuUse::default(); problem.budget.vram.len()],
            host_weights: 0,
            host_kv: 0,
            host_workspace: 0,
            host_largest: 0,
        }
    }

    /// Adds the next block with this choice.
    fn add(&mut self, problem: &Problem, before: &[Choice], choice: Choice, weights: &[f64; 2]) {
        for phase in Phase::BOTH.into_iter().filter(|phase| weights[*phase as usize] > 0.0) {
            let previous = before.last().map(|choice| choice.of(phase));
            self.work[phase as usize].add(&PhaseWork::of_block(problem, before.len(), previous, choice, phase));
        }
        let block = before.len();
        self.handover_ms += problem.handover_ms(block, choice);
        self.add_memory(problem, before, choice);
    }

    fn add_memory(&mut self, problem: &Problem, before: &[Choice], choice: Choice) {
        let (number, block) = (before.len(), &problem.blocks[before.len()]);
        for gpu in choice.resident() {
            self.gpus[gpu].weights += new_bytes(problem, before, |b| &b.weights, |c| c.is_resident_on(gpu));
        }
        for phase in Phase::BOTH {
            let Some(gpu) = choice.of(phase).gpu() else { continue };
            let used = &mut self.gpus[gpu];
            match problem.budget.kv {
                KvHome::Device => used.kv[phase as usize] += block.kv_bytes,
                // The block has its own buffer, or shares one with other blocks.
                KvHome::Host if problem.has_own_state_buffer(number, choice, phase) => used.own_kv += block.kv_bytes,
                KvHome::Host => used.kv[phase as usize] = used.kv[phase as usize].max(block.kv_bytes),
            }
            used.workspace = used.workspace.max(block.workspace_bytes);
        }
        for gpu in (0..self.gpus.len()).filter(|gpu| choice.is_streamed_to(*gpu)) {
            let used = &mut self.gpus[gpu];
            used.largest_streamed = used.largest_streamed.max(problem.streamed_bytes(number));
            used.weights += new_bytes(problem, before, |b| b.streamed.constants(), |c| c.is_streamed_to(gpu));
        }
        if choice.on_host() {
            self.host_weights += new_bytes(problem, before, |b| &b.weights, Choice::on_host);
            let read_whole = if problem.reads_rows(number) { 0 } else { problem.weight_bytes(number) };
            self.host_largest = self.host_largest.max(read_whole);
        }
        if state_on_host(problem, choice) {
            self.host_kv += block.kv_bytes;
        }
        if Phase::BOTH.iter().any(|phase| choice.of(*phase) == Where::Cpu) {
            self.host_workspace = self.host_workspace.max(block.workspace_bytes);
        }
    }

    fn fits(&self, evaluator: &Evaluator) -> bool {
        let (budget, slots) = (&evaluator.problem.budget, &evaluator.goal.slots);
        let gpu_fits = |(gpu, used): (usize, &GpuUse)| {
            let ring = used.largest_streamed.saturating_mul(slots[gpu].into());
            let total = used.weights + used.kv[0].max(used.kv[1]) + used.own_kv + used.workspace + ring;
            total == 0 || total.saturating_add(budget.margin) <= budget.vram[gpu]
        };
        let weights = match may_read_disk(evaluator.problem, evaluator.goal.mechanisms) {
            true => self.host_largest,
            false => self.host_weights,
        };
        let host = budget.packing.packed(weights) + self.host_kv + self.host_workspace;
        self.gpus.iter().enumerate().all(gpu_fits) && budget.host().is_none_or(|ram| host <= ram)
    }
}

/// Bytes of the next block's weights, without those that an earlier selected block has too.
fn new_bytes(
    problem: &Problem,
    before: &[Choice],
    keys_of: fn(&Block) -> &[(u32, u64)],
    selects: impl Fn(Choice) -> bool,
) -> u64 {
    let known = |key: u32| {
        let earlier = problem.blocks.iter().zip(before).filter(|(_, choice)| selects(**choice));
        earlier.flat_map(|(block, _)| keys_of(block)).any(|(other, _)| *other == key)
    };
    let weights = keys_of(&problem.blocks[before.len()]);
    let is_first = |at: usize| !weights[..at].iter().any(|(key, _)| *key == weights[at].0);
    (0..weights.len()).filter(|at| is_first(*at) && !known(weights[*at].0)).map(|at| weights[at].1).sum()
}
