//! `--objective throughput`: the number of sequences that share passes, and the place of their states.

use crate::cli::{KvHomeArg, SplitArgs};
use crate::error::SplitError;
use crate::partitioning::{DecidedBy, over_budget};
use crate::request::{PlanningRequest, STATES_ON_DISK, WhyOnDisk, max_host_bytes};
use hpp_partition::{
    Budget, KvHome, Mechanisms, Options, OverBudget, Problem, RowBatching, Solution, plan_throughput, tokens_per_second,
};
use hpp_schema::ByteSize;

/// A place of states, and the plan for the best number of sequences with it.
struct Candidate {
    /// The problem for one sequence.
    single: Problem,
    options: Options,
    planned: Result<(Problem, Solution), OverBudget>,
}

/// Makes the request one for the number of sequences whose plan generates most tokens per second, and for the best place of their
/// states: with the layers, in host memory, or for layers on the host on disk.
pub fn choose_sequences(request: &mut PlanningRequest, args: &SplitArgs) -> Result<(), SplitError> {
    let (best, fits_in_memory) = Candidate::best(places_of_states(request, request.options, args));
    let (problem, _) = best.planned.map_err(over_budget(request, DecidedBy::Planner))?;
    if let Some(ram) = free_memory(request, args).filter(|ram| *ram < max_host_bytes(&problem)) {
        request.recorded_budgets.ram = Some(ByteSize(ram));
    }
    if args.kv == KvHomeArg::Auto && problem.budget.host_kv_on_disk && !fits_in_memory {
        request.limits.kv_on_disk = Some(WhyOnDisk::TooLittleMemory);
    }
    (request.problem, request.single, request.options) = (problem, Some(best.single), best.options);
    Ok(())
}

/// Milliseconds per token of the best number of sequences and place of their states without streaming to GPUs; infinite if nothing fits.
pub fn estimated_ms_per_token(request: &PlanningRequest, args: &SplitArgs) -> f64 {
    let options = Options { mechanisms: Mechanisms::ResidentCpuDisk, ..request.options };
    1e3 / Candidate::best(places_of_states(request, options, args)).0.rate()
}

/// The problem for one sequence with its states in each place where they may lie, and how to solve it.
fn places_of_states(request: &PlanningRequest, options: Options, args: &SplitArgs) -> Vec<(Problem, Options)> {
    let mut single = request.problem.clone();
    single.budget.ram = single.budget.ram.or(free_memory(request, args));
    let mut places = vec![(single.clone(), options)];
    if args.kv == KvHomeArg::Auto {
        places.extend(on_host(&single, options, args));
        places.extend(on_disk(&single).map(|problem| (problem, options)));
    }
    places
}

/// The memory of this machine that is free, where no limit was given, bytes.
fn free_memory(request: &PlanningRequest, args: &SplitArgs) -> Option<u64> {
    request.local.ram().filter(|_| args.ram.is_none())
}

/// The problem with all states in host memory; `None` where they are there anyway, or on disk, which holds those of layers on the host only.
fn on_host(single: &Problem, options: Options, args: &SplitArgs) -> Option<(Problem, Options)> {
    let mechanisms = match options.mechanisms {
        Mechanisms::All if !args.planning.requests_streaming() => Mechanisms::ResidentCpuDisk,
        mechanisms => mechanisms,
    };
    let budget = Budget { kv: KvHome::Host, ..single.budget.clone() };
    (!single.gpus.is_empty() && !single.budget.host_kv_on_disk)
        .then(|| (Problem { budget, ..single.clone() }, Options { mechanisms, ..options }))
}

/// The problem with the states of layers on the host on disk; `None` where that is impossible, or they are there anyway.
fn on_disk(single: &Problem) -> Option<Problem> {
    let is_possible = STATES_ON_DISK && single.disk_bytes_per_ms.is_some() && !single.budget.host_kv_on_disk;
    let budget = Budget { host_kv_on_disk: true, ..single.budget.clone() };
    // Layers with states on disk run one sequence after the other.
    is_possible.then(|| Problem { budget, row_batching: RowBatching::Never, ..single.clone() })
}

impl Candidate {
    /// The first of the fastest candidates, and whether anything fits with the states in the first of `places`.
    fn best(places: Vec<(Problem, Options)>) -> (Candidate, bool) {
        let mut candidates = places.into_iter().map(|(single, options)| {
            let planned = plan_throughput(&single, &options);
            Candidate { single, options, planned }
        });
        let first = candidates.next().expect("states lie somewhere");
        let fits_in_first = first.planned.is_ok();
        (candidates.fold(first, |best, other| if other.rate() > best.rate() { other } else { best }), fits_in_first)
    }

    /// Tokens per second; 0 if nothing fits.
    fn rate(&self) -> f64 {
        let rate = |(problem, solution): &(Problem, Solution)| {
            tokens_per_second(problem, solution.prefill_ms, solution.decode_ms)
        };
        self.planned.as_ref().map_or(0.0, rate)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use hpp_partition::{
        BlockRole, BlockSpec, Contention, Cost, FilledState, Objective, Planner, Streamed, Work, Workload,
    };

    const MB: u64 = 1_000_000;

    /// Four layers of 100 MB on the host, read from a disk of 100 MB/s where memory is too small. A sequence may have 60 MB of state in each
    /// layer, and uses 24 kB of it.
    fn from_disk(ram: u64) -> Problem {
        let block = |i: u32| BlockSpec {
            score_bytes: 0,
            label: format!("layers.{i}"),
            kind: BlockRole::Layer(i),
            weights: vec![(i, 100 * MB)],
            streamed: Streamed::whole(100 * MB),
            experts: None,
            kept_on_host: false,
            assigned: None,
            needs_gpu: false,
            kv_bytes: 60 * MB,
            kv_tensors: 2,
            kv_grows: None,
            kv_filled: Some(FilledState { fixed: 0, token: 1000, capacity: 60_000 }),
            workspace_bytes: MB,
            folded_bytes: 0,
            widened_bytes: 0,
            session_bytes: 0,
            boundary_bytes: 8,
            boundary_tensors: 1,
            decode: Work { flops: 1, bytes: 100 * MB },
            prefill: Work { flops: 1, bytes: 100 * MB },
        };
        Problem {
            blocks: (0..4).map(block).collect(),
            cpu: vec![Cost { decode_ms: 10.0, short_pass_ms: vec![], prefill_ms: vec![20.0] }; 4],
            gpus: vec![],
            cpu_launch_ms: 0.0,
            pass_overhead_ms: 0.0,
            disk_bytes_per_ms: Some(1e5),
            disk_contention: Contention::NONE,
            decompression: None,
            budget: Budget { ram: Some(ram), ..Budget::default() },
            load: Workload { batch: 1, sequences: 1, prompt_tokens: 16, new_tokens: 16, passes: vec![16] },
            row_batching: RowBatching::Never,
            expert_hits: vec![],
            cuts: vec![],
        }
    }

    #[test]
    fn states_on_disk_make_room_for_more_sequences_where_weights_are_read() {
        let options = Options {
            planner: Planner::Exact,
            objective: Objective::Mixed,
            mechanisms: Mechanisms::ResidentCpuDisk,
            slots: None,
        };
        let best = |ram: u64| {
            let single = from_disk(ram);
            let disk = on_disk(&single).expect("this system can keep states on disk");
            Candidate::best(vec![(single, options), (disk, options)]).0
        };
        // Memory holds the states of one sequence, or the window for those of any number.
        let small = best(500 * MB);
        let (problem, _) = small.planned.unwrap();
        assert!(small.single.budget.host_kv_on_disk && problem.load.sequences >= 8, "{}", problem.load.sequences);
        let large = best(100_000 * MB);
        assert!(!large.single.budget.host_kv_on_disk && large.planned.is_ok());
    }
}
