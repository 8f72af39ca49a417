//! Counts the launches of all partitions. The planner counts those between different places only; a block that is streamed, or that changes its device
//! between the phases, is a partition of its own in both phases, so a planned solution may turn out slower than another one.

use crate::cli::SplitArgs;
use crate::partitioning::{DecidedBy, Partitioning};
use crate::request::PlanningRequest;
use hpp_partition::{
    Alternative, BlockPlacement, Mechanisms, Options, Phase, Placement, RunExplanation, Solution, evaluate,
    explain_runs, plan,
};

/// Most runs of blocks that move to another place one after the other.
const MOST_MOVES: usize = 16;

/// Cuts a planner's solution into partitions. If another solution takes less with the launches of its partitions, that one: without streaming, or
/// with single runs of blocks at other places.
pub fn from_planner(
    request: &PlanningRequest,
    args: &SplitArgs,
    solution: Solution,
    decided_by: DecidedBy,
) -> Partitioning {
    let planned = Partitioning::new(request, args.partitions, solution, decided_by);
    if !planned.solution.placements.iter().any(is_dynamic) {
        return planned;
    }
    let mut best = without_streaming(request, args, &planned).unwrap_or(planned);
    for _ in 0..MOST_MOVES {
        let Some(better) = with_a_run_moved(request, args, &best) else { break };
        best = better;
    }
    best
}

/// Whether a block is streamed or changes its device between the phases.
fn is_dynamic(placement: &BlockPlacement) -> bool {
    placement.prefill != placement.decode || matches!(placement.decode, Placement::Streamed(_))
}

/// The best placement in which every block computes on one device whose memory holds its weights, if it takes less time and the user places no block
/// otherwise.
fn without_streaming(request: &PlanningRequest, args: &SplitArgs, planned: &Partitioning) -> Option<Partitioning> {
    let options = Options { mechanisms: Mechanisms::ResidentCpuDisk, ..request.options };
    let other = plan(&request.problem, &options).ok()?;
    let mut assigned =
        request.problem.blocks.iter().map(|block| block.assigned.map(BlockPlacement::both)).zip(&other.placements);
    if assigned.any(|(assigned, placement)| assigned.is_some_and(|assigned| assigned != *placement)) {
        return None;
    }
    faster(request, args, planned, other)
}

/// The placement with that run of neighbours at another place that saves the most time; `None` if none saves any.
fn with_a_run_moved(request: &PlanningRequest, args: &SplitArgs, planned: &Partitioning) -> Option<Partitioning> {
    let cuts = |placements: &[BlockPlacement]| planned.cuts_for(request, placements);
    let solution = &planned.solution;
    let runs = explain_runs(&planned.problem(request), &request.options, solution, &cuts);
    let is_free = |run: &&RunExplanation| {
        run.blocks.clone().all(|block| request.problem.blocks[block].assigned.is_none()) && is_dynamic(&run.placement)
    };
    let alternatives = runs.iter().filter(is_free).flat_map(|run| run.elsewhere.iter().map(move |other| (run, other)));
    let is_better = |other: &Alternative| other.over_budget.is_none() && other.objective_ms < solution.objective_ms;
    let mut better: Vec<(&RunExplanation, &Alternative)> = alternatives.filter(|(_, other)| is_better(other)).collect();
    better.sort_by(|(_, a), (_, b)| a.objective_ms.total_cmp(&b.objective_ms));
    better.into_iter().find_map(|(run, other)| {
        let mut placements = solution.placements.clone();
        placements[run.blocks.clone()].fill(BlockPlacement::both(other.place));
        let streams = |gpu: usize| {
            let of = |placement: &BlockPlacement| {
                Phase::BOTH.iter().any(|phase| placement.in_phase(*phase) == Placement::Streamed(gpu))
            };
            placements.iter().any(of)
        };
        let slots = other.slots.iter().enumerate().map(|(gpu, slots)| if streams(gpu) { *slots } else { 0 }).collect();
        let moved = evaluate(&request.problem, &request.options, placements, slots);
        faster(request, args, planned, moved)
    })
}

/// Another solution cut into partitions, if it fits and takes less time than the planned one with the launches of all partitions.
fn faster(
    request: &PlanningRequest,
    args: &SplitArgs,
    planned: &Partitioning,
    other: Solution,
) -> Option<Partitioning> {
    let other = Partitioning::new(request, args.partitions, other, planned.decided_by);
    let bound_ms = planned.solution.bound_ms;
    let solution = Solution { bound_ms, proven: false, ..other.solution.clone() };
    let is_faster = other.solution.objective_ms < planned.solution.objective_ms && other.check(request).is_ok();
    is_faster.then_some(Partitioning { solution, ..other })
}
