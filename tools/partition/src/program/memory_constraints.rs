//! Memory constraints: the memory that the chosen block counts use on each device is within its budget. The time bound for reading from
//! disk uses the same expressions. In units of [`IntegerProgram::memory_unit`].

use super::IntegerProgram;
use super::linear::LinearExpr;
use crate::memory::{may_read_disk, state_on_host, window_of};
use crate::regions::{KeysOf, large_shared, shared};
use crate::{BlockPlacement, KvHome, Phase, Placement};
use std::collections::BTreeMap;

/// Adds the memory limits of all devices to the program.
pub(super) fn add_memory_constraints(program: &mut IntegerProgram) {
    for gpu in 0..program.problem.budget.vram.len() {
        add_gpu_limit(program, gpu);
    }
    if let Some(ram) = program.problem.budget.host() {
        let host = host_demand(program);
        program.limit(&host, ram);
    }
}

/// Adds the memory limit of one GPU.
pub(super) fn add_gpu_limit(program: &mut IntegerProgram, gpu: usize) {
    let problem = program.problem;
    let uses_gpu =
        move |placement: BlockPlacement| Phase::BOTH.iter().any(|phase| placement.in_phase(*phase).gpu() == Some(gpu));
    let is_streamed = move |placement: BlockPlacement| placement.is_streamed_to(gpu);
    let mut fixed = program.weights(|placement| placement.is_resident_on(gpu));
    let workspace = program.max_over_selected(uses_gpu, |i| problem.blocks[i].workspace_bytes);
    fixed.add(&workspace, 1.0);
    let constants = program.distinct_bytes(|block| block.streamed.constants(), |_| true, is_streamed);
    fixed.add(&constants, 1.0);
    let slot = program.max_over_selected(is_streamed, |i| problem.blocks[i].streamed.slot_bytes());
    fixed.add(&slot, program.goal.slots[gpu].into());
    let limit = problem.budget.vram[gpu].saturating_sub(problem.budget.margin);
    match problem.budget.kv {
        KvHome::Device => {
            let decodes = move |placement: BlockPlacement| placement.decode.gpu() == Some(gpu);
            let computes_prompts_only =
                move |placement: BlockPlacement| placement.prefill.gpu() == Some(gpu) && !decodes(placement);
            let kept = program.state(decodes);
            let staged = program.sum_over(computes_prompts_only, |i| problem.staged_state(i));
            // The first limit follows from the second. Without it the solver gave up on 4 of 200 large problems with an internal error, with
            // it on 1.
            let with_kept = fixed.plus(&kept, 1.0);
            program.limit(&with_kept, limit);
            program.limit(&with_kept.plus(&staged, 1.0), limit);
        }
        // Blocks that compute on the host in one phase have their own state buffers, if the state is updated in place. The others share
        // a buffer for the largest state, and if there are several, another one.
        KvHome::Host => {
            let staged = |i: usize| problem.staged_state(i);
            let has_growing_state = |i: usize| problem.blocks[i].kv_grows.is_some();
            let uses_gpu_and_host =
                move |placement: BlockPlacement| uses_gpu(placement) && placement.computes_on_host();
            let uses_gpu_only = move |placement: BlockPlacement| uses_gpu(placement) && !placement.computes_on_host();
            let largest_gpu_only_state = program.max_over_selected(uses_gpu_only, staged);
            let own_buffers = program.sum_over(uses_gpu_and_host, |i| if has_growing_state(i) { 0 } else { staged(i) });
            fixed.add(&own_buffers, 1.0);
            let largest_growing_state =
                program.max_over_selected(uses_gpu_and_host, |i| if has_growing_state(i) { staged(i) } else { 0 });
            let second = second_staging_buffer(program, gpu, &largest_gpu_only_state);
            program.limit(&fixed.clone().plus(&largest_gpu_only_state, 1.0).plus(&second, 1.0), limit);
            program.limit(&fixed.plus(&largest_growing_state, 1.0), limit);
        }
    }
}

/// Size of the second staging buffer for states on the host: at least `largest` if, in some phase, the GPU computes several blocks with a
/// state that the host computes in no phase; else 0.
fn second_staging_buffer(program: &mut IntegerProgram, gpu: usize, largest: &LinearExpr) -> LinearExpr {
    let problem = program.problem;
    let most =
        (0..problem.blocks.len()).map(|i| problem.staged_state(i)).max().unwrap_or(0) as f64 / program.memory_unit;
    let blocks = problem.blocks.len() as f64;
    let has_second = program.model.integer(1);
    for phase in Phase::BOTH {
        let stages = move |placement: BlockPlacement| {
            placement.in_phase(phase).gpu() == Some(gpu) && !placement.computes_on_host()
        };
        let mut staged = LinearExpr::default();
        for (region, class) in program.classes() {
            if program.min_of_class(region, class, |i| program.problem.blocks[i].kv_bytes as f64) > 0.0 {
                staged.add(&program.count(region, class, stages), 1.0);
            }
        }
        let others = staged.plus(&LinearExpr::constant(1.0), -1.0);
        program.model.at_least(&LinearExpr::default().plus(&has_second, blocks), &others);
    }
    let second = program.model.nonnegative(0.0);
    let at_least = largest.clone().plus(&has_second, most).plus(&LinearExpr::constant(most), -1.0);
    program.model.at_least(&second, &at_least);
    second
}

/// Demand on host memory.
pub(super) fn host_demand(program: &mut IntegerProgram) -> LinearExpr {
    let problem = program.problem;
    let read_whole = |i: usize| if problem.is_lookup_table(i) { 0 } else { problem.weight_bytes(i) };
    let weights = match may_read_disk(problem, program.goal.mechanisms) {
        true => program.max_over_selected(BlockPlacement::holds_weights_on_host, read_whole),
        false => program.weights(BlockPlacement::holds_weights_on_host),
    };
    state_and_workspace(program).plus(&weights, problem.budget.packing.growth_factor())
}

/// Demand on host memory other than weights.
pub(super) fn state_and_workspace(program: &mut IntegerProgram) -> LinearExpr {
    let problem = program.problem;
    let workspace = host_workspace(program);
    let is_on_host = |placement: BlockPlacement| state_on_host(problem, placement);
    let state = match problem.budget.host_kv_on_disk {
        true => program.max_over_selected(is_on_host, |i| window_of(problem, i)),
        false => program.state(is_on_host),
    };
    let sessions = program.sum_over(BlockPlacement::computes_on_host, |i| problem.blocks[i].session_bytes);
    workspace.plus(&state, 1.0).plus(&sessions, 1.0)
}

/// The largest activations of the blocks in host memory. Blocks that the host only decodes need less than blocks that it computes for
/// the prompt, which need attention scores too.
fn host_workspace(program: &mut IntegerProgram) -> LinearExpr {
    let problem = program.problem;
    let is_for_prompt = |placement: BlockPlacement| placement.prefill == Placement::Cpu;
    let decodes_only = |placement: BlockPlacement| placement.computes_on_host() && !is_for_prompt(placement);
    let max = program.model.nonnegative(0.0);
    program.bound_over_selected(&max, is_for_prompt, |i| {
        problem.blocks[i].pass_workspace().saturating_add(problem.blocks[i].score_bytes)
    });
    program.bound_over_selected(&max, decodes_only, |i| problem.blocks[i].pass_workspace());
    max
}

impl IntegerProgram<'_> {
    /// Limits memory use to `bytes`, with a small tolerance: the solver rounds, and a placement that fits exactly must stay feasible.
    /// The evaluator counts exactly.
    fn limit(&mut self, used: &LinearExpr, bytes: u64) {
        self.model.at_most(used, bytes as f64 / self.memory_unit * (1.0 + 1e-9) + 1e-6);
    }

    /// State of the blocks with a selected block placement.
    fn state(&self, selects: impl Fn(BlockPlacement) -> bool) -> LinearExpr {
        self.sum_over(selects, |i| self.problem.blocks[i].kv_bytes)
    }

    /// Bytes of the blocks with a selected block placement. Every block of a class counts with the smallest number of its
    /// class.
    fn sum_over(&self, selects: impl Fn(BlockPlacement) -> bool, bytes: impl Fn(usize) -> u64) -> LinearExpr {
        let mut sum = LinearExpr::default();
        for (region, class) in self.classes() {
            let least = self.min_of_class(region, class, |i| bytes(i) as f64);
            sum.add(&self.count(region, class, &selects), least / self.memory_unit);
        }
        sum
    }

    /// Weights of the blocks with a selected block placement, each weight once.
    fn weights(&mut self, selects: impl Fn(BlockPlacement) -> bool) -> LinearExpr {
        self.distinct_bytes(|block| &block.weights, |_| true, selects)
    }

    /// Bytes of the blocks with a selected block placement, each key once; only of classes whose blocks `includes` selects.
    pub(super) fn distinct_bytes(
        &mut self,
        keys_of: KeysOf,
        includes: impl Fn(usize) -> bool,
        selects: impl Fn(BlockPlacement) -> bool,
    ) -> LinearExpr {
        let problem = self.problem;
        let mut total = LinearExpr::default();
        // By key: the bytes, and a variable that is at least 1 if a block that reads the weight is selected.
        let mut shared_weights: BTreeMap<u32, (u64, LinearExpr)> = BTreeMap::new();
        for (region, class) in self.classes() {
            let count = self.count(region, class, &selects);
            let members = &self.regions[region].classes[class];
            if count.is_zero() || !members.iter().all(|i| includes(*i)) {
                continue;
            }
            let unshared = |i: usize| {
                let all: u64 = keys_of(&problem.blocks[i]).iter().map(|(_, bytes)| bytes).sum();
                all - shared(problem, keys_of, i).values().sum::<u64>()
            };
            total.add(&count, self.min_of_class(region, class, |i| unshared(i) as f64) / self.memory_unit);
            // A weight that all blocks of the class share counts as soon as one of them is on the device.
            let mut shared_by_all = shared(problem, keys_of, members[0]);
            for member in &members[1..] {
                let of_member = shared(problem, keys_of, *member);
                shared_by_all.retain(|key, _| of_member.contains_key(key));
            }
            let large = large_shared(problem, keys_of, members[0]);
            for (key, bytes) in shared_by_all {
                let selected = self.any_selected(&count, members.len(), large.contains_key(&key));
                let (_, on_device) = shared_weights.entry(key).or_insert_with(|| (bytes, self.model.nonnegative(0.0)));
                self.model.at_least(on_device, &selected);
            }
        }
        for (bytes, on_device) in shared_weights.into_values() {
            total.add(&on_device, bytes as f64 / self.memory_unit);
        }
        total
    }

    /// Indicator that a count of at most `members` is positive; without `exactly`, its linear relaxation `count / members`.
    fn any_selected(&mut self, count: &LinearExpr, members: usize, exactly: bool) -> LinearExpr {
        if members == 1 {
            return count.clone();
        }
        if !exactly {
            return LinearExpr::default().plus(count, 1.0 / members as f64);
        }
        let indicator = self.model.integer(1);
        self.model.at_least(&LinearExpr::default().plus(&indicator, members as f64), count);
        indicator
    }

    /// Upper bound of a number of the blocks with a selected block placement. Invariant: at least the number of every selected class.
    fn max_over_selected(
        &mut self,
        selects: impl Fn(BlockPlacement) -> bool,
        number: impl Fn(usize) -> u64,
    ) -> LinearExpr {
        if (0..self.problem.blocks.len()).all(|i| number(i) == 0) {
            return LinearExpr::default();
        }
        let max = self.model.nonnegative(0.0);
        self.bound_over_selected(&max, selects, number);
        max
    }

    /// Makes `max` at least a number of the blocks with a selected block placement.
    fn bound_over_selected(
        &mut self,
        max: &LinearExpr,
        selects: impl Fn(BlockPlacement) -> bool,
        number: impl Fn(usize) -> u64,
    ) {
        for (region, class) in self.classes() {
            let size = self.min_of_class(region, class, |i| number(i) as f64) / self.memory_unit;
            let count = self.count(region, class, &selects);
            if size == 0.0 || count.is_zero() {
                continue;
            }
            let selected = self.any_selected(&count, self.regions[region].classes[class].len(), true);
            self.model.at_least(max, &LinearExpr::default().plus(&selected, size));
        }
    }
}
