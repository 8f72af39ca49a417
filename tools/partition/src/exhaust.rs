//! Exhaustive search by branch and bound: evaluates every placement that could be better than the best one.
//!
//! Blocks are placed in order. A partial placement is pruned if it exceeds a memory budget, or if the lower bound of its blocks
//! plus the lower bound of the remaining blocks is not below the best objective. The limit is a number of steps, not a time, so
//! the search is deterministic.

use crate::bound::Work;
use crate::evaluate::{Evaluator, SAME};
use crate::memory::{may_read_disk, state_on_host};
use crate::{Block, Choice, KvHome, Phase, Problem, Where};

/// Searches for better placements than the evaluator's best. True if the search was complete within `most` steps.
pub(crate) fn exhaust(evaluator: &mut Evaluator, allowed: &[Vec<Choice>], most: usize) -> bool {
    let suffix = suffix(evaluator, allowed);
    let start = Partial::new(evaluator.problem);
    let mut search = Search { evaluator, allowed, suffix, left: most, choices: Vec::new() };
    search.extend(&start);
    search.left > 0
}

/// Lower bounds of the remaining blocks: the chain of each phase, milliseconds, and the weighted sum of both.
#[derive(Clone, Copy, Default)]
struct RestBound {
    phases: [f64; 2],
    together: f64,
}

fn suffix(evaluator: &Evaluator, allowed: &[Vec<Choice>]) -> Vec<RestBound> {
    let (problem, weights) = (evaluator.problem, evaluator.goal.weights);
    let phases: Vec<Phase> = evaluator.goal.phases().collect();
    let mut suffix = vec![RestBound::default(); allowed.len() + 1];
    for i in (0..allowed.len()).rev() {
        let ms = |choice: &Choice, phase: Phase| problem.block_ms_in_all(i, choice.of(phase), phase);
        let least = |f: &dyn Fn(&Choice) -> f64| allowed[i].iter().map(f).fold(f64::INFINITY, f64::min);
        let next = suffix[i + 1];
        let mut here = next;
        for phase in &phases {
            here.phases[*phase as usize] += least(&|choice| ms(choice, *phase));
        }
        let both = |choice: &Choice| phases.iter().map(|phase| weights[*phase as usize] * ms(choice, *phase)).sum();
        here.together += least(&both);
        suffix[i] = here;
    }
    suffix
}

/// Work and memory use of the blocks placed so far.
#[derive(Clone)]
struct Partial {
    work: [Work; 2],
    handover: f64,
    gpus: Vec<GpuUse>,
    host_weights: u64,
    host_kv: u64,
    host_workspace: u64,
    host_largest: u64,
}

/// Memory use of a GPU, bytes.
#[derive(Clone, Default)]
struct GpuUse {
    weights: u64,
    kv: [u64; 2],
    /// State with its own buffers, in addition to `kv`.
    own_kv: u64,
    workspace: u64,
    largest_streamed: u64,
}

struct Search<'j, 'p> {
    evaluator: &'j mut Evaluator<'p>,
    allowed: &'j [Vec<Choice>],
    suffix: Vec<RestBound>,
    left: usize,
    choices: Vec<Choice>,
}

impl Search<'_, '_> {
    fn extend(&mut self, partial: &Partial) {
        let depth = self.choices.len();
        if depth == self.allowed.len() {
            self.evaluator.evaluate(&self.choices);
            return;
        }
        let mut next: Vec<(f64, Choice, Partial)> = Vec::new();
        for choice in &self.allowed[depth] {
            let mut with = partial.clone();
            with.add(self.evaluator.problem, &self.choices, *choice, &self.evaluator.goal.weights);
            if with.fits(self.evaluator) {
                next.push((self.lower_bound(&with, depth + 1), *choice, with));
            }
        }
        next.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (least, choice, with) in next {
            if self.left == 0 || !self.could_win(least) {
                return;
            }
            self.left -= 1;
            self.choices.push(choice);
            self.extend(&with);
            self.choices.pop();
        }
    }

    fn could_win(&self, least: f64) -> bool {
        self.evaluator.best().first().is_none_or(|best| least < best.score.objective * (1.0 - SAME))
    }

    /// Lower bound of every placement that starts with `partial`, weighted milliseconds.
    fn lower_bound(&self, partial: &Partial, depth: usize) -> f64 {
        let (goal, rest) = (&self.evaluator.goal, self.suffix[depth]);
        let (mut apart, mut together) = (0.0, rest.together);
        for phase in goal.phases() {
            let (weight, work) = (goal.weights[phase as usize], &partial.work[phase as usize]);
            let chain = work.chain + rest.phases[phase as usize];
            apart += weight * Work { chain, ..work.clone() }.least(&self.evaluator.problem.gpus);
            together += weight * work.chain;
        }
        apart.max(together) + goal.weights[Phase::Prefill as usize] * partial.handover
    }
}

impl Partial {
    fn new(problem: &Problem) -> Self {
        let work = |phase: Phase| Work {
            chain: problem.pass_ms * problem.passes(phase) as f64,
            host: 0.0,
            links: vec![0.0; problem.gpus.len()],
        };
        Partial {
            work: Phase::BOTH.map(work),
            handover: 0.0,
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
            self.work[phase as usize].add(&Work::of_block(problem, before.len(), previous, choice, phase));
        }
        let block = before.len();
        self.handover += problem.handover_ms(block, choice);
        self.hold(problem, before, choice);
    }

    fn hold(&mut self, problem: &Problem, before: &[Choice], choice: Choice) {
        let (number, block) = (before.len(), &problem.blocks[before.len()]);
        for gpu in choice.resident() {
            self.gpus[gpu].weights +=
                new_bytes(problem, before, |b| &b.weights, |c| c.resident().any(|there| there == gpu));
        }
        for phase in Phase::BOTH {
            let Some(gpu) = choice.of(phase).gpu() else { continue };
            let held = &mut self.gpus[gpu];
            match problem.budget.kv {
                KvHome::Device => held.kv[phase as usize] += block.kv_bytes,
                // The block has its own buffer, or shares one with other blocks.
                KvHome::Host if problem.stays(number, choice, phase) => held.own_kv += block.kv_bytes,
                KvHome::Host => held.kv[phase as usize] = held.kv[phase as usize].max(block.kv_bytes),
            }
            held.workspace = held.workspace.max(block.workspace_bytes);
        }
        for gpu in (0..self.gpus.len()).filter(|gpu| choice.is_streamed_to(*gpu)) {
            let held = &mut self.gpus[gpu];
            held.largest_streamed = held.largest_streamed.max(problem.streamed_bytes(number));
            held.weights += new_bytes(problem, before, |b| b.streamed.constants(), |c| c.is_streamed_to(gpu));
        }
        if choice.on_host() {
            self.host_weights += new_bytes(problem, before, |b| &b.weights, Choice::on_host);
            let read = if problem.reads_rows(number) { 0 } else { problem.weight_bytes(number) };
            self.host_largest = self.host_largest.max(read);
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
        let on_gpu = |(gpu, held): (usize, &GpuUse)| {
            let ring = held.largest_streamed.saturating_mul(slots[gpu].into());
            let total = held.weights + held.kv[0].max(held.kv[1]) + held.own_kv + held.workspace + ring;
            total == 0 || total.saturating_add(budget.margin) <= budget.vram[gpu]
        };
        let weights = match may_read_disk(evaluator.problem, evaluator.goal.mechanisms) {
            true => self.host_largest,
            false => self.host_weights,
        };
        let host = budget.packing.packed(weights) + self.host_kv + self.host_workspace;
        self.gpus.iter().enumerate().all(on_gpu) && budget.host().is_none_or(|ram| host <= ram)
    }
}

/// Bytes of the next block whose keys no earlier selected block has.
fn new_bytes(
    problem: &Problem,
    before: &[Choice],
    of: fn(&Block) -> &[(u32, u64)],
    is_selected: impl Fn(Choice) -> bool,
) -> u64 {
    let known = |key: u32| {
        let earlier = problem.blocks.iter().zip(before).filter(|(_, choice)| is_selected(**choice));
        earlier.flat_map(|(block, _)| of(block)).any(|(other, _)| *other == key)
    };
    let weights = of(&problem.blocks[before.len()]);
    let first = |at: usize| !weights[..at].iter().any(|(key, _)| *key == weights[at].0);
    (0..weights.len()).filter(|at| first(*at) && !known(weights[*at].0)).map(|at| weights[at].1).sum()
}
