//! Memory constraints: the memory use of the counts on each device, in units of [`Program::bytes`].

use super::Program;
use super::line::Line;
use crate::memory::{may_read_disk, state_on_host};
use crate::regions::{KeysOf, large_shared, shared};
use crate::{Choice, KvHome, Phase};
use std::collections::BTreeMap;

/// Adds the limits of every memory to the program.
pub(super) fn hold(program: &mut Program) {
    for gpu in 0..program.problem.budget.vram.len() {
        on_gpu(program, gpu);
    }
    on_host(program);
}

/// Adds the limit of one GPU.
pub(super) fn on_gpu(program: &mut Program, gpu: usize) {
    let problem = program.problem;
    let mut fixed = program.weights(|choice| choice.resident().any(|there| there == gpu));
    let there = move |choice: Choice| Phase::BOTH.iter().any(|phase| choice.of(*phase).gpu() == Some(gpu));
    let workspace = program.largest(there, |i| problem.blocks[i].workspace_bytes);
    fixed.add(&workspace, 1.0);
    let streamed = move |choice: Choice| choice.is_streamed_to(gpu);
    let constants = program.distinct(|block| block.streamed.constants(), |_| true, streamed);
    fixed.add(&constants, 1.0);
    let slot = program.largest(streamed, |i| problem.streamed_bytes(i));
    fixed.add(&slot, program.goal.slots[gpu].into());
    let limit = problem.budget.vram[gpu].saturating_sub(problem.budget.margin);
    if problem.budget.kv == KvHome::Host {
        let on_host = |choice: Choice| Phase::BOTH.iter().any(|phase| choice.of(*phase).gpu().is_none());
        let own = move |choice: Choice| there(choice) && on_host(choice);
        let turns = |i: usize| problem.blocks[i].kv_grows.is_some();
        let kv = |i: usize| problem.blocks[i].kv_bytes;
        let shared = program.largest(move |choice| there(choice) && !on_host(choice), kv);
        fixed.add(&program.state_of(|i| !turns(i), own), 1.0);
        let turning = program.largest(own, |i| if turns(i) { kv(i) } else { 0 });
        program.limit(&fixed.clone().plus(&shared, 1.0), limit);
        program.limit(&fixed.plus(&turning, 1.0), limit);
        return;
    }
    for phase in Phase::BOTH {
        let state = program.state(|choice| choice.of(phase).gpu() == Some(gpu));
        program.limit(&fixed.clone().plus(&state, 1.0), limit);
    }
}

fn on_host(program: &mut Program) {
    if let Some(ram) = program.problem.budget.host() {
        let host = host(program);
        program.limit(&host, ram);
    }
}

/// Demand on host memory.
pub(super) fn host(program: &mut Program) -> Line {
    let problem = program.problem;
    let weights = match may_read_disk(problem, program.goal.mechanisms) {
        true => program.largest(Choice::on_host, |i| if problem.reads_rows(i) { 0 } else { problem.weight_bytes(i) }),
        false => program.weights(Choice::on_host),
    };
    state_and_workspace(program).plus(&weights, problem.budget.packing.growth())
}

/// Demand on host memory other than weights.
pub(super) fn state_and_workspace(program: &mut Program) -> Line {
    let problem = program.problem;
    let computes = |choice: Choice| Phase::BOTH.iter().any(|phase| choice.of(*phase).gpu().is_none());
    let workspace = program.largest(computes, |i| problem.blocks[i].workspace_bytes);
    workspace.plus(&program.state(|choice| state_on_host(problem, choice)), 1.0)
}

impl Program<'_> {
    /// Limits a sum of bytes, with a small tolerance: the solver rounds, and a placement that fits exactly must stay feasible. The
    /// evaluator counts exactly.
    fn limit(&mut self, line: &Line, bytes: u64) {
        self.lines.at_most(line, bytes as f64 / self.bytes * (1.0 + 1e-9) + 1e-6);
    }

    /// State of the blocks with a selected choice.
    fn state(&self, is_so: impl Fn(Choice) -> bool) -> Line {
        self.state_of(|_| true, is_so)
    }

    /// State of the blocks `among` them.
    fn state_of(&self, among: impl Fn(usize) -> bool, is_so: impl Fn(Choice) -> bool) -> Line {
        let mut state = Line::default();
        for (region, class) in self.classes() {
            let kv = |i: usize| if among(i) { self.problem.blocks[i].kv_bytes as f64 } else { 0.0 };
            let bytes = self.least(region, class, kv);
            state.add(&self.count(region, class, &is_so), bytes / self.bytes);
        }
        state
    }

    /// Weights of the blocks with a selected choice, each weight once.
    fn weights(&mut self, is_so: impl Fn(Choice) -> bool) -> Line {
        self.distinct(|block| &block.weights, |_| true, is_so)
    }

    /// Bytes of the blocks with a selected choice, each key once; only of classes whose blocks are all `among`.
    pub(super) fn distinct(
        &mut self,
        of: KeysOf,
        among: impl Fn(usize) -> bool,
        is_so: impl Fn(Choice) -> bool,
    ) -> Line {
        let problem = self.problem;
        let mut all = Line::default();
        let mut held: BTreeMap<u32, (u64, Line)> = BTreeMap::new();
        for (region, class) in self.classes() {
            let count = self.count(region, class, &is_so);
            if count.is_nothing() {
                continue;
            }
            let members = &self.regions[region].classes[class];
            if !members.iter().all(|i| among(*i)) {
                continue;
            }
            let all_of = |i: usize| of(&problem.blocks[i]).iter().map(|(_, bytes)| bytes).sum::<u64>();
            let own = |i: usize| all_of(i) - shared(problem, of, i).values().sum::<u64>();
            all.add(&count, self.least(region, class, |i| own(i) as f64) / self.bytes);
            // A weight that all blocks of the class share counts as soon as one of them is on the device.
            let mut by_all = shared(problem, of, members[0]);
            members[1..].iter().for_each(|i| by_all.retain(|key, _| shared(problem, of, *i).contains_key(key)));
            let large = large_shared(problem, of, members[0]);
            for (key, bytes) in by_all {
                let used = self.used(&count, members.len(), large.contains_key(&key));
                let (_, held) = held.entry(key).or_insert_with(|| (bytes, self.lines.real(0.0)));
                self.lines.at_least(held, &used);
            }
        }
        held.into_values().for_each(|(bytes, held)| all.add(&held, bytes as f64 / self.bytes));
        all
    }

    /// 1 if a count of at most `members` is above 0; if it need not be exact, a fraction.
    fn used(&mut self, count: &Line, members: usize, exactly: bool) -> Line {
        if members == 1 {
            return count.clone();
        }
        if !exactly {
            return Line::default().plus(count, 1.0 / members as f64);
        }
        let used = self.lines.whole(1);
        self.lines.at_least(&Line::default().plus(&used, members as f64), count);
        used
    }

    /// At least the largest number of the blocks with a selected choice.
    fn largest(&mut self, is_so: impl Fn(Choice) -> bool, number: impl Fn(usize) -> u64) -> Line {
        if (0..self.problem.blocks.len()).all(|i| number(i) == 0) {
            return Line::default();
        }
        let largest = self.lines.real(0.0);
        for (region, class) in self.classes() {
            let size = self.least(region, class, |i| number(i) as f64) / self.bytes;
            let count = self.count(region, class, &is_so);
            if size == 0.0 || count.is_nothing() {
                continue;
            }
            let used = self.used(&count, self.regions[region].classes[class].len(), true);
            self.lines.at_least(&largest, &Line::default().plus(&used, size));
        }
        largest
    }
}
