//! Exhaustive search by branch and bound: evaluates every placement that could be better than the best one.
//!
//! Blocks are placed in order. A partial placement is pruned if it exceeds a memory budget, or if the lower bound of its blocks
//! plus the lower bound of the remaining blocks is not below the best objective. The limit is a number of steps, not a time, so
//! the search is deterministic.

use crate::bound::PhaseWork;
use crate::evaluate::{Evaluator, TIME_TOLERANCE};
use crate::memory::{may_read_disk, state_on_host, window_of};
use crate::{BlockPlacement, BlockSpec, KvHome, Phase, Placement, Problem};

/// Searches for placements that are better than the evaluator's best and take less than `known_ms`, weighted milliseconds. Takes its steps from
/// `steps_left`; returns whether they were enough for a complete search.
pub(crate) fn exhaust(
    evaluator: &mut Evaluator,
    allowed: &[Vec<BlockPlacement>],
    steps_left: &mut usize,
    known_ms: f64,
) -> bool {
    let (rest_bounds, rest_weights) = (rest_bounds(evaluator, allowed), rest_weights(evaluator.problem));
    let start = PartialPlacement::new(evaluator.problem);
    let mut search = Search { evaluator, allowed, rest_bounds, rest_weights, steps_left, known_ms, placements: vec![] };
    search.extend(&start);
    *search.steps_left > 0
}

/// Lower bounds of the compute time of the remaining blocks that counts as [`PhaseWork::sequence`].
#[derive(Clone, Copy, Default)]
struct RestBound {
    /// The bound of each phase, milliseconds, with the fastest place of each block in that phase.
    phases: [f64; 2],
    /// The bound of the weighted sum of both phases, weighted milliseconds, with the best placement of each block.
    weighted: f64,
}

/// The bounds of the blocks from each position to the end.
fn rest_bounds(evaluator: &Evaluator, allowed: &[Vec<BlockPlacement>]) -> Vec<RestBound> {
    let (problem, weights) = (evaluator.problem, evaluator.goal.weights);
    let mut bounds = vec![RestBound::default(); allowed.len() + 1];
    for block in (0..allowed.len()).rev() {
        // What GPUs compute may overlap with everything else in passes of several sequences.
        let ms = |placement: &BlockPlacement, phase: Phase| match placement.in_phase(phase) {
            place if problem.has_pipelines() && place.gpu().is_some() => 0.0,
            place => problem.phase_ms(block, place, phase),
        };
        let mut bound = bounds[block + 1];
        for phase in evaluator.goal.phases() {
            let fastest = allowed[block].iter().map(|placement| ms(placement, phase)).fold(f64::INFINITY, f64::min);
            bound.phases[phase as usize] += fastest;
        }
        let weighted = |placement: &BlockPlacement| -> f64 {
            evaluator.goal.phases().map(|phase| weights[phase as usize] * ms(placement, phase)).sum()
        };
        bound.weighted += allowed[block].iter().map(weighted).fold(f64::INFINITY, f64::min);
        bounds[block] = bound;
    }
    bounds
}

/// For each position: bytes of the weights that only one block of the model reads, of the blocks from there to the end, without
/// tables of which a pass reads some rows.
fn rest_weights(problem: &Problem) -> Vec<u64> {
    let has = |block: usize, key: u32| problem.blocks[block].weights.iter().any(|(other, _)| *other == key);
    let is_own = |block: usize, key: u32| (0..problem.blocks.len()).all(|other| other == block || !has(other, key));
    let mut sums = vec![0; problem.blocks.len() + 1];
    for block in (0..problem.blocks.len()).rev() {
        let own = problem.blocks[block].weights.iter().filter(|(key, _)| is_own(block, *key)).map(|(_, bytes)| bytes);
        sums[block] = sums[block + 1] + if problem.is_lookup_table(block) { 0 } else { own.sum::<u64>() };
    }
    sums
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
    /// Weights that the host reads whole in a pass of each phase, bytes.
    host_reads: [u64; 2],
}

/// Memory use of a GPU, bytes.
#[derive(Clone, Default)]
struct GpuUse {
    weights: u64,
    /// State that the GPU keeps, or that has a staging buffer of its own.
    own_kv: u64,
    /// The largest state that is copied to a shared staging buffer.
    shared_kv: u64,
    workspace: u64,
    largest_streamed: u64,
}

impl GpuUse {
    /// Bytes with a ring of this many slots.
    fn total(&self, slots: u32) -> u64 {
        let ring = self.largest_streamed.saturating_mul(slots.into());
        self.weights + self.shared_kv + self.own_kv + self.workspace + ring
    }
}

struct Search<'j, 'p> {
    evaluator: &'j mut Evaluator<'p>,
    allowed: &'j [Vec<BlockPlacement>],
    /// By position of the first remaining block.
    rest_bounds: Vec<RestBound>,
    /// By position of the first remaining block, bytes.
    rest_weights: Vec<u64>,
    steps_left: &'j mut usize,
    /// The time of a placement that is known, weighted milliseconds.
    known_ms: f64,
    /// Placements of the blocks placed so far.
    placements: Vec<BlockPlacement>,
}

impl Search<'_, '_> {
    /// Places the next block in every allowed way, most promising first, and evaluates complete placements.
    fn extend(&mut self, partial: &PartialPlacement) {
        let depth = self.placements.len();
        if depth == self.allowed.len() {
            self.evaluator.evaluate(&self.placements);
            return;
        }
        let mut next: Vec<(f64, BlockPlacement, PartialPlacement)> = Vec::new();
        for placement in &self.allowed[depth] {
            let mut extended = partial.clone();
            extended.add(self.evaluator.problem, &self.placements, *placement, &self.evaluator.goal.weights);
            if extended.fits(self.evaluator) {
                next.push((self.lower_bound(&extended, depth + 1), *placement, extended));
            }
        }
        next.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (lower_bound, placement, extended) in next {
            if *self.steps_left == 0 || !self.can_improve(lower_bound) {
                return;
            }
            *self.steps_left -= 1;
            self.placements.push(placement);
            self.extend(&extended);
            self.placements.pop();
        }
    }

    /// Whether a placement with this lower bound can be better than the best one.
    fn can_improve(&self, lower_bound: f64) -> bool {
        let least = self.evaluator.best().first().map_or(self.known_ms, |best| best.score.objective.min(self.known_ms));
        lower_bound < least * (1.0 - TIME_TOLERANCE)
    }

    /// Lower bound of every placement that starts with `partial`, weighted milliseconds.
    fn lower_bound(&self, partial: &PartialPlacement, depth: usize) -> f64 {
        let (goal, rest) = (&self.evaluator.goal, self.rest_bounds[depth]);
        // Two bounds: each phase on its own, and both phases with the same block placements.
        let (mut by_phase, mut weighted) = (0.0, rest.weighted);
        for phase in goal.phases() {
            let (weight, work) = (goal.weights[phase as usize], &partial.work[phase as usize]);
            let sequence = work.sequence + rest.phases[phase as usize];
            let work_ms = PhaseWork { sequence, ..work.clone() }.lower_bound(&self.evaluator.problem.gpus);
            by_phase += weight * work_ms.max(partial.disk_ms(self.evaluator, self.rest_weights[depth], phase));
            weighted += weight * work.sequence;
        }
        by_phase.max(weighted) + goal.weights[Phase::Prefill as usize] * partial.handover_ms
    }
}

impl PartialPlacement {
    fn new(problem: &Problem) -> Self {
        let work = |phase: Phase| PhaseWork {
            sequence: problem.pass_overhead_ms * problem.passes(phase) as f64,
            links: vec![0.0; problem.gpus.len()],
            gpus: vec![0.0; problem.gpus.len()],
            ..PhaseWork::default()
        };
        PartialPlacement {
            work: Phase::BOTH.map(work),
            handover_ms: 0.0,
            gpus: vec![GpuUse::default(); problem.budget.vram.len()],
            host_weights: 0,
            host_kv: 0,
            host_workspace: 0,
            host_largest: 0,
            host_reads: [0; 2],
        }
    }

    /// Adds the next block with this block placement.
    fn add(&mut self, problem: &Problem, before: &[BlockPlacement], placement: BlockPlacement, weights: &[f64; 2]) {
        for phase in Phase::BOTH.into_iter().filter(|phase| weights[*phase as usize] > 0.0) {
            let previous = before.last().map(|placement| placement.in_phase(phase));
            self.work[phase as usize].add(&PhaseWork::of_block(problem, before.len(), previous, placement, phase));
        }
        let block = before.len();
        self.handover_ms += problem.handover_ms(block, placement);
        self.add_memory(problem, before, placement);
    }

    fn add_memory(&mut self, problem: &Problem, before: &[BlockPlacement], placement: BlockPlacement) {
        let (number, block) = (before.len(), &problem.blocks[before.len()]);
        for gpu in placement.resident() {
            self.gpus[gpu].weights += new_bytes(problem, before, |b| &b.weights, |c| c.is_resident_on(gpu));
        }
        let staged = problem.staged_state(number);
        for phase in Phase::BOTH {
            let Some(gpu) = placement.in_phase(phase).gpu() else { continue };
            let used = &mut self.gpus[gpu];
            match problem.budget.kv {
                KvHome::Device if phase == Phase::Decode => used.own_kv += block.kv_bytes,
                KvHome::Device if placement.decode.gpu() == Some(gpu) => {}
                // The block has its own buffer, or shares one with other blocks.
                KvHome::Device => used.own_kv += staged,
                KvHome::Host if problem.has_own_state_buffer(number, placement, phase) => used.own_kv += staged,
                KvHome::Host => used.shared_kv = used.shared_kv.max(staged),
            }
            used.workspace = used.workspace.max(block.workspace_bytes);
        }
        for gpu in (0..self.gpus.len()).filter(|gpu| placement.is_streamed_to(*gpu)) {
            let used = &mut self.gpus[gpu];
            used.largest_streamed = used.largest_streamed.max(problem.blocks[number].streamed.slot_bytes());
            used.weights += new_bytes(problem, before, |b| b.streamed.constants(), |c| c.is_streamed_to(gpu));
        }
        if placement.holds_weights_on_host() {
            self.host_weights += new_bytes(problem, before, |b| &b.weights, BlockPlacement::holds_weights_on_host);
            let read_whole = if problem.is_lookup_table(number) { 0 } else { problem.weight_bytes(number) };
            self.host_largest = self.host_largest.max(read_whole);
        }
        for phase in Phase::BOTH.into_iter().filter(|_| !problem.is_lookup_table(number)) {
            let is_read = |c: BlockPlacement| !matches!(c.in_phase(phase), Placement::Resident(_));
            if is_read(placement) {
                self.host_reads[phase as usize] += new_bytes(problem, before, |b| &b.weights, is_read);
            }
        }
        if state_on_host(problem, placement) {
            self.host_kv = match problem.budget.host_kv_on_disk {
                true => self.host_kv.max(window_of(problem, number)),
                false => self.host_kv + block.kv_bytes,
            };
        }
        self.host_workspace = self.host_workspace.max(block.host_workspace(placement));
    }

    /// Lower bound of the time of reads from disk in a phase, milliseconds. The host reads its blocks so far and those
    /// of the `rest` bytes that GPUs have no room for; what of these exceeds host memory comes from disk. The integer program has the same bound.
    fn disk_ms(&self, evaluator: &Evaluator, rest: u64, phase: Phase) -> f64 {
        let problem = evaluator.problem;
        let (Some(rate), Some(ram)) = (problem.disk_bytes_per_ms, problem.budget.host()) else { return 0.0 };
        let has_experts = problem.blocks.iter().any(|block| block.experts.is_some());
        if has_experts || !may_read_disk(problem, evaluator.goal.mechanisms) {
            return 0.0;
        }
        let free = |(gpu, used): (usize, &GpuUse)| {
            let vram = problem.budget.vram[gpu].saturating_sub(problem.budget.margin);
            vram.saturating_sub(used.total(evaluator.goal.slots[gpu]))
        };
        let on_gpus = self.gpus.iter().enumerate().map(free).fold(0, u64::saturating_add);
        let reads = self.host_reads[phase as usize].saturating_add(rest.saturating_sub(on_gpus));
        let room = ram.saturating_sub(self.host_kv).saturating_sub(self.host_workspace);
        let missing = problem.budget.packing.packed(reads).saturating_sub(room);
        let read = missing as f64 * (1.0 - problem.budget.packing.unread_share());
        read / rate * problem.passes(phase) as f64
    }

    fn fits(&self, evaluator: &Evaluator) -> bool {
        let (budget, slots) = (&evaluator.problem.budget, &evaluator.goal.slots);
        let gpu_fits = |(gpu, used): (usize, &GpuUse)| {
            let total = used.total(slots[gpu]);
            total == 0 || total.saturating_add(budget.margin) <= budget.vram[gpu]
        };
        let [all, largest] = [self.host_weights, self.host_largest].map(|bytes| budget.packing.packed(bytes));
        let weights = match may_read_disk(evaluator.problem, evaluator.goal.mechanisms) {
            true => all.min(largest + budget.read_ahead),
            false => all,
        };
        let host = weights + self.host_kv + self.host_workspace;
        self.gpus.iter().enumerate().all(gpu_fits) && budget.host().is_none_or(|ram| host <= ram)
    }
}

/// Bytes of the next block's weights, without those that an earlier selected block has too.
fn new_bytes(
    problem: &Problem,
    before: &[BlockPlacement],
    keys_of: fn(&BlockSpec) -> &[(u32, u64)],
    selects: impl Fn(BlockPlacement) -> bool,
) -> u64 {
    let known = |key: u32| {
        let earlier = problem.blocks.iter().zip(before).filter(|(_, placement)| selects(**placement));
        earlier.flat_map(|(block, _)| keys_of(block)).any(|(other, _)| *other == key)
    };
    let weights = keys_of(&problem.blocks[before.len()]);
    let is_first = |at: usize| !weights[..at].iter().any(|(key, _)| *key == weights[at].0);
    (0..weights.len()).filter(|at| is_first(*at) && !known(weights[*at].0)).map(|at| weights[at].1).sum()
}
