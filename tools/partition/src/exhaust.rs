//! Branch and bound over blocks in order: every placement is priced or shown to be no better than the best one.
//!
//! A partial placement is given up when it cannot fit, or when what its blocks must do already, and the least the rest can,
//! takes as long as the best placement. Deterministic: it stops after a number of steps, not after a time.

use crate::bound::Work;
use crate::judge::{Judge, SAME};
use crate::memory::{may_read_disk, state_on_host};
use crate::schedule::merges;
use crate::{Block, Choice, KvHome, Phase, Problem, Where};

/// Tries everything that could beat the judge's best. True when nothing was left untried within `most` steps.
pub(crate) fn exhaust(judge: &mut Judge, allowed: &[Vec<Choice>], most: usize) -> bool {
    let suffix = suffix(judge, allowed);
    let start = Partial::new(judge.problem);
    let mut search = Search { judge, allowed, suffix, left: most, choices: Vec::new() };
    search.extend(&start);
    search.left > 0
}

/// The least the blocks from here on can do: each phase by itself, and both together as they weigh.
#[derive(Clone, Copy, Default)]
struct Least {
    phases: [f64; 2],
    together: f64,
}

fn suffix(judge: &Judge, allowed: &[Vec<Choice>]) -> Vec<Least> {
    let (problem, weights) = (judge.problem, judge.wish.weights);
    let phases: Vec<Phase> = judge.wish.phases().collect();
    let mut suffix = vec![Least::default(); allowed.len() + 1];
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

/// What the blocks placed so far do and hold.
#[derive(Clone)]
struct Partial {
    work: [Work; 2],
    handover: f64,
    gpus: Vec<Held>,
    host_weights: u64,
    host_kv: u64,
    host_workspace: u64,
    host_largest: u64,
}

#[derive(Clone, Default)]
struct Held {
    weights: u64,
    kv: [u64; 2],
    /// State with room of its own beside that.
    own_kv: u64,
    workspace: u64,
    largest_streamed: u64,
}

struct Search<'j, 'p> {
    judge: &'j mut Judge<'p>,
    allowed: &'j [Vec<Choice>],
    suffix: Vec<Least>,
    left: usize,
    choices: Vec<Choice>,
}

impl Search<'_, '_> {
    fn extend(&mut self, partial: &Partial) {
        let depth = self.choices.len();
        if depth == self.allowed.len() {
            self.judge.price(&self.choices);
            return;
        }
        let mut next: Vec<(f64, Choice, Partial)> = Vec::new();
        for choice in &self.allowed[depth] {
            let mut with = partial.clone();
            with.add(self.judge.problem, &self.choices, *choice, &self.judge.wish.weights);
            if with.fits(self.judge) {
                next.push((self.least(&with, depth + 1), *choice, with));
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
        self.judge.best().first().is_none_or(|best| least < best.price.objective * (1.0 - SAME))
    }

    /// No placement that begins so takes less, weighted milliseconds.
    fn least(&self, partial: &Partial, depth: usize) -> f64 {
        let (wish, rest) = (&self.judge.wish, self.suffix[depth]);
        let (mut apart, mut together) = (0.0, rest.together);
        for phase in wish.phases() {
            let (weight, work) = (wish.weights[phase as usize], &partial.work[phase as usize]);
            let chain = work.chain + rest.phases[phase as usize];
            apart += weight * Work { chain, ..work.clone() }.least(&self.judge.problem.gpus);
            together += weight * work.chain;
        }
        apart.max(together) + wish.weights[Phase::Prefill as usize] * partial.handover
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
            gpus: vec![Held::default(); problem.budget.vram.len()],
            host_weights: 0,
            host_kv: 0,
            host_workspace: 0,
            host_largest: 0,
        }
    }

    /// The next block, placed so.
    fn add(&mut self, problem: &Problem, before: &[Choice], choice: Choice, weights: &[f64; 2]) {
        for phase in Phase::BOTH.into_iter().filter(|phase| weights[*phase as usize] > 0.0) {
            let previous = before.last().map(|choice| choice.of(phase));
            add_work(&mut self.work[phase as usize], problem, before.len(), previous, choice, phase);
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
                // A desk of its own, or one that blocks take turns at.
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

    fn fits(&self, judge: &Judge) -> bool {
        let (budget, slots) = (&judge.problem.budget, &judge.wish.slots);
        let on_gpu = |(gpu, held): (usize, &Held)| {
            let ring = held.largest_streamed.saturating_mul(slots[gpu].into());
            let total = held.weights + held.kv[0].max(held.kv[1]) + held.own_kv + held.workspace + ring;
            total == 0 || total.saturating_add(budget.margin) <= budget.vram[gpu]
        };
        let weights = match may_read_disk(judge.problem, judge.wish.mechanisms) {
            true => self.host_largest,
            false => self.host_weights,
        };
        let host = budget.packing.packed(weights) + self.host_kv + self.host_workspace;
        self.gpus.iter().enumerate().all(on_gpu) && budget.host().is_none_or(|ram| host <= ram)
    }
}

/// Bytes of what the next block holds that no earlier block of this kind brought along.
fn new_bytes(
    problem: &Problem,
    before: &[Choice],
    of: fn(&Block) -> &[(u32, u64)],
    is_so: impl Fn(Choice) -> bool,
) -> u64 {
    let known = |key: u32| {
        let earlier = problem.blocks.iter().zip(before).filter(|(_, choice)| is_so(**choice));
        earlier.flat_map(|(block, _)| of(block)).any(|(other, _)| *other == key)
    };
    let weights = of(&problem.blocks[before.len()]);
    let first = |at: usize| !weights[..at].iter().any(|(key, _)| *key == weights[at].0);
    (0..weights.len()).filter(|at| first(*at) && !known(weights[*at].0)).map(|at| weights[at].1).sum()
}

/// The work a block adds to a phase, behind the block at `previous`.
fn add_work(work: &mut Work, problem: &Problem, block: usize, previous: Option<Where>, choice: Choice, phase: Phase) {
    let (place, passes) = (choice.of(phase), problem.passes(phase));
    let mut ms = problem.block_ms_in_all(block, place, phase);
    if !previous.is_some_and(|previous| merges(problem, block, previous, place)) {
        ms += passes as f64 * problem.launch_ms(place);
    }
    work.chain += ms;
    if place == Where::Cpu {
        work.host += ms;
    }
    for way in problem.visits(block, choice, phase) {
        work.chain += problem.way_ms(way);
        if let Some(gpu) = way.to {
            work.links[gpu] += problem.upload_ms(gpu, way.tensors);
        }
    }
    if let Where::Streamed(gpu) = place {
        work.links[gpu] += passes as f64 * problem.stream_ms(block, gpu);
    }
    if let Some(previous) = previous.filter(|previous| previous.gpu() != place.gpu()) {
        for pass in 0..passes {
            let tensors = problem.boundary(block, phase, pass);
            work.chain += previous.gpu().map_or(0.0, |gpu| problem.download_ms(gpu, tensors));
            if let Some(gpu) = place.gpu() {
                work.chain += problem.upload_ms(gpu, tensors);
                work.links[gpu] += problem.upload_ms(gpu, tensors);
            }
        }
    }
}
