//! The entry points of the planner.

use crate::evaluate::{Evaluator, Goal, ScoredPlacement};
use crate::few_choices;
use crate::greedy::greedy_run;
use crate::memory::host_holds_any_placement;
use crate::refuse::{budget_error, least_on_host};
use crate::search::{FEW_BLOCKS, MANY_BLOCKS, MAX_STEPS, SLOTS, SearchResult, optimize_other_phase, search};
use crate::{
    BlockPlacement, Budget, Mechanisms, Objective, Options, OverBudget, Phase, Placement, Planner, Problem, Solution,
    fits, simulate,
};
use std::panic::resume_unwind;

/// A placement with at most this relative gap to the lower bound counts as proven optimal.
const PROOF_GAP: f64 = 1e-6;

/// How much a plan may cost to find.
#[derive(Clone, Copy, PartialEq)]
enum Effort {
    /// One search instead of six: one number of slots, and no start placements from plans for one phase.
    Rough,
    /// Everything.
    Full,
}

/// The best placement found, with a lower bound. If nothing fits, the error has the required budget.
pub fn plan(problem: &Problem, options: &Options) -> Result<Solution, OverBudget> {
    plan_from(problem, options, &[])
}

/// Plans, starting from `known` placements: the result is not worse than those of them that fit.
pub(crate) fn plan_from(problem: &Problem, options: &Options, known: &[&Solution]) -> Result<Solution, OverBudget> {
    Ok(best_from(problem, options, known, 1, Effort::Full)?.remove(0))
}

/// A placement found with one search if there are many blocks, to compare problems with each other. It may be worse than that of [`plan`].
/// Fails where [`plan`] does, and seldom where it does not.
pub(crate) fn plan_roughly(problem: &Problem, options: &Options) -> Result<Solution, OverBudget> {
    Ok(best_from(problem, options, &[], 1, Effort::Rough)?.remove(0))
}

/// The best placements, best first, at most `count`. They differ in the number of blocks at some place or in the number of crossings;
/// the first is the result of [`plan`]. If the objective has one phase only, the other phase is optimized with the remaining memory.
pub fn best(problem: &Problem, options: &Options, count: usize) -> Result<Vec<Solution>, OverBudget> {
    best_from(problem, options, &[], count.max(1), Effort::Full)
}

fn best_from(
    problem: &Problem,
    options: &Options,
    known: &[&Solution],
    count: usize,
    effort: Effort,
) -> Result<Vec<Solution>, OverBudget> {
    let SearchResult { best, bound } = match options.planner {
        Planner::Greedy => SearchResult { best: vec![greedy(problem, options)?], bound: 0.0 },
        Planner::Exact => {
            exact(problem, options, known, count, effort).ok_or_else(|| budget_error(problem, options))?
        }
    };
    let proven = best.first().is_some_and(|first| bound >= first.score.objective * (1.0 - PROOF_GAP));
    let finish = |(rank, candidate): (usize, ScoredPlacement)| {
        let solution = evaluate(problem, options, candidate.placements, candidate.slots);
        let proven = proven && rank == 0;
        let bound_ms = if proven { solution.objective_ms } else { bound.min(solution.objective_ms) };
        Solution { bound_ms, proven, ..solution }
    };
    Ok(best.into_iter().take(count).enumerate().map(finish).collect())
}

/// Simulates a given placement, without a lower bound. `slots` has one entry per GPU.
pub fn evaluate(problem: &Problem, options: &Options, placements: Vec<BlockPlacement>, slots: Vec<u32>) -> Solution {
    let decode_ms = simulate(problem, &placements, &slots, Phase::Decode).ms;
    let prefill_ms = simulate(problem, &placements, &slots, Phase::Prefill).ms;
    // A phase without weight may take infinite time.
    let weigh = |weight: f64, ms: f64| if weight > 0.0 { weight * ms } else { 0.0 };
    let [prefill, decode] = weights(problem, options.objective);
    let objective_ms = weigh(prefill, prefill_ms) + weigh(decode, decode_ms);
    Solution { placements, slots, decode_ms, prefill_ms, objective_ms, bound_ms: 0.0, proven: false }
}

/// The weights of prefill and decode in an objective.
fn weights(problem: &Problem, objective: Objective) -> [f64; 2] {
    match objective {
        Objective::Prefill => [1.0, 0.0],
        Objective::Decode => [0.0, 1.0],
        Objective::Mixed | Objective::Throughput => [1.0, problem.load.decoded_tokens() as f64],
    }
}

/// The placement of the greedy planner.
fn greedy(problem: &Problem, options: &Options) -> Result<ScoredPlacement, OverBudget> {
    let ring = options.slots.unwrap_or(SLOTS[0]);
    let placements = greedy_run(problem, ring);
    // Only the user streams blocks here.
    let slots = |gpu| if placements.iter().any(|at| at.is_streamed_to(gpu)) { ring } else { 0 };
    let slots: Vec<u32> = (0..problem.budget.vram.len()).map(slots).collect();
    fits(problem, &placements, &slots, options.mechanisms)?;
    let goal = Goal { weights: weights(problem, options.objective), mechanisms: options.mechanisms, slots };
    Evaluator::new(problem, goal, 1).evaluate(&placements).ok_or_else(|| budget_error(problem, options))
}

/// The best placements over all numbers of slots, and a lower bound; `None` if nothing fits. Constraints on host memory that change nothing are left
/// out: the integer program is solved better without them.
fn exact(
    problem: &Problem,
    options: &Options,
    known: &[&Solution],
    count: usize,
    effort: Effort,
) -> Option<SearchResult> {
    let without_ram = host_holds_any_placement(problem).then(|| {
        let budget = Budget { ram: None, ..problem.budget.clone() };
        Problem { budget, ..problem.clone() }
    });
    let problem = without_ram.as_ref().unwrap_or(problem);
    let weights = weights(problem, options.objective);
    let allowed = allowed(problem, options, weights);
    if let Some(all) = few_choices::all(problem, &allowed).filter(|_| !options.mechanisms.streams()) {
        let goal = Goal { weights, mechanisms: options.mechanisms, slots: slots_to_try(problem, options).remove(0) };
        return few_choices::best(problem, goal, &all, count);
    }
    // Few blocks are searched quickly.
    let is_rough = effort == Effort::Rough && problem.blocks.len() > FEW_BLOCKS;
    let by_phases = if is_rough { Vec::new() } else { phase_by_phase(problem, options) };
    let search_with = |slots: &Vec<u32>, best: &[ScoredPlacement], steps: &mut usize| {
        let goal = Goal { weights, mechanisms: options.mechanisms, slots: slots.clone() };
        let found = best.iter().map(|found| &found.placements);
        let known: Vec<&Vec<BlockPlacement>> =
            known.iter().map(|solution| &solution.placements).chain(found).chain(&by_phases).collect();
        // If only the best is requested, a number of slots with a lower bound above it is skipped.
        let known_ms = best.iter().map(|found| found.score.objective).filter(|_| count == 1);
        search(problem, goal, &allowed, &known, count, known_ms.fold(f64::INFINITY, f64::min), steps)
    };
    let mut steps = MAX_STEPS;
    let mut to_try = slots_to_try(problem, options);
    let mut all = first_fit(&mut to_try, |slots| search_with(slots, &[], &mut steps)).or_else(|| {
        let goal =
            Goal { weights, mechanisms: options.mechanisms, slots: slots_to_try(problem, options).into_iter().min()? };
        let placements = least_on_host(problem, options, &goal.slots);
        let found = Evaluator::new(problem, goal, 1).evaluate(&placements)?;
        Some(SearchResult { best: vec![found], bound: 0.0 })
    })?;
    if is_rough {
        to_try.clear();
    }
    if problem.blocks.len() <= FEW_BLOCKS {
        for slots in to_try {
            let found = search_with(&slots, &all.best, &mut steps);
            all.extend(found);
        }
    } else {
        // The searches of many blocks take seconds each and do not share steps.
        let (best, search_with) = (all.best.clone(), &search_with);
        let best = &best;
        let found: Vec<Option<SearchResult>> = std::thread::scope(|scope| {
            let search = |slots| scope.spawn(move || search_with(slots, best, &mut 0));
            let threads: Vec<_> = to_try.iter().map(search).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
        });
        found.into_iter().for_each(|found| all.extend(found));
    }
    all.best.sort_by(ScoredPlacement::order);
    all.best.dedup_by(|a, b| a.placements == b.placements && a.slots == b.slots);
    all.best.truncate(count);
    let finish = |candidate| optimize_other_phase(problem, options, weights, candidate);
    all.best = all.best.into_iter().map(finish).collect();
    Some(all)
}

/// Searches with one number of slots after another until a placement is found; removes the tried numbers from `to_try`. If nothing fits with some
/// slots, nothing fits with more and most probably nothing with fewer, so the smallest number is tried next. The bound is 0 if a search before found
/// nothing and did not prove that nothing fits.
fn first_fit(
    to_try: &mut Vec<Vec<u32>>,
    mut search: impl FnMut(&Vec<u32>) -> Option<SearchResult>,
) -> Option<SearchResult> {
    let mut is_bounded = true;
    while !to_try.is_empty() {
        let slots = to_try.remove(0);
        if let Some(SearchResult { best, bound }) = search(&slots) {
            if !best.is_empty() {
                return Some(SearchResult { best, bound: if is_bounded { bound } else { 0.0 } });
            }
            is_bounded = false;
        }
        to_try.retain(|other| *other < slots);
        to_try.sort();
    }
    None
}

/// Start placements for an objective with both phases: optimized for decoding, then for the prompt with the remaining memory; once with
/// all memory, once with memory for a slot ring reserved for the prompt. Empty for few blocks, which are searched exhaustively.
fn phase_by_phase(problem: &Problem, options: &Options) -> Vec<Vec<BlockPlacement>> {
    let has_both_phases = matches!(options.objective, Objective::Mixed | Objective::Throughput);
    let applies = has_both_phases && options.mechanisms.streams();
    if !applies || problem.blocks.len() <= FEW_BLOCKS || problem.budget.vram.is_empty() {
        return Vec::new();
    }
    let weights = [0.0, 1.0];
    let slots = slots_to_try(problem, options).remove(0);
    let mut sizes: Vec<u64> = (0..problem.blocks.len()).map(|block| problem.streamed_bytes(block)).collect();
    sizes.sort_unstable();
    let ring = u64::from(slots.iter().copied().max().unwrap_or(0)) * sizes[sizes.len() / 2];
    let optimize = |reserved: u64| {
        let mut reduced = problem.clone();
        reduced.budget.vram.iter_mut().for_each(|vram| *vram = vram.saturating_sub(reserved));
        let options = Options { objective: Objective::Decode, slots: slots.first().copied(), ..*options };
        let goal = Goal { weights, mechanisms: options.mechanisms, slots: slots.clone() };
        let found = search(&reduced, goal, &allowed(&reduced, &options, weights), &[], 1, f64::INFINITY, &mut 0)?;
        let best = found.best.into_iter().next()?;
        Some(optimize_other_phase(problem, &options, weights, best).placements)
    };
    // Both searches are independent and run in parallel.
    std::thread::scope(|scope| {
        let with_reserve = scope.spawn(|| optimize(ring));
        let with_all = optimize(0);
        with_all.into_iter().chain(with_reserve.join().ok().flatten()).collect()
    })
}

/// The allowed placements of each block. If one phase has no weight, a block's place in that phase is its place in the other phase, which
/// needs the least memory. It may also be the host, if that changes how state is swapped (which also divides pipelines of several
/// sequences). If the host decodes the block and host memory is limited, it may also be a GPU for the prompt, so that attention scores of
/// the prompt take no host memory. With several sequences the host may decode any block: then a GPU that computes the prompt holds the state of one
/// sequence instead of all.
fn allowed(problem: &Problem, options: &Options, weights: [f64; 2]) -> Vec<Vec<BlockPlacement>> {
    let both_phases_count = weights.iter().all(|weight| *weight > 0.0);
    let weighted_phase = Phase::BOTH[usize::from(weights[0] == 0.0)];
    let allowed_for_block = |block: usize| {
        let all = problem.placements(block, options.mechanisms);
        if all.is_empty() {
            return vec![BlockPlacement::both(Placement::Cpu)];
        }
        if both_phases_count {
            return all;
        }
        let changes_swap = |placement: &BlockPlacement| {
            let usual =
                problem.state_swap(block, BlockPlacement::both(placement.in_phase(weighted_phase)), weighted_phase);
            placement.in_phase(weighted_phase.other()) == Placement::Cpu
                && (usual.is_some() || problem.has_pipelines())
                && problem.state_swap(block, *placement, weighted_phase) != usual
        };
        let saves_scores = |placement: &BlockPlacement| {
            weighted_phase == Phase::Decode
                && placement.decode == Placement::Cpu
                && problem.budget.ram.is_some()
                && problem.blocks[block].score_bytes > 0
        };
        let saves_state = |placement: &BlockPlacement| {
            weighted_phase == Phase::Prefill && placement.decode == Placement::Cpu && problem.load.sequences > 1
        };
        let is_allowed = |placement: &BlockPlacement| {
            placement.prefill == placement.decode
                || changes_swap(placement)
                || saves_scores(placement)
                || saves_state(placement)
        };
        all.into_iter().filter(is_allowed).collect()
    };
    (0..problem.blocks.len()).map(allowed_for_block).collect()
}

/// The smallest number of slots that the planner tries; 0 if it streams nothing.
pub(crate) fn fewest_slots(problem: &Problem, options: &Options) -> u32 {
    slots_to_try(problem, options).into_iter().flatten().min().unwrap_or(0)
}

/// The numbers of slots to try, one entry per GPU, equal on all GPUs.
pub(crate) fn slots_to_try(problem: &Problem, options: &Options) -> Vec<Vec<u32>> {
    let on_each_gpu = |slots: u32| vec![slots; problem.budget.vram.len()];
    match (options.mechanisms, options.slots) {
        (Mechanisms::ResidentCpu | Mechanisms::ResidentCpuDisk, _) => vec![on_each_gpu(0)],
        (Mechanisms::All, Some(slots)) => vec![on_each_gpu(slots)],
        (Mechanisms::All, None) if problem.budget.vram.is_empty() => vec![on_each_gpu(0)],
        (Mechanisms::All, None) if problem.blocks.len() > MANY_BLOCKS => vec![on_each_gpu(SLOTS[0])],
        (Mechanisms::All, None) => SLOTS.map(on_each_gpu).to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::Score;

    /// The bound after searches with 3 slots, then with 1: each has a bound, and placements if it found some; `None` where nothing fits.
    fn bound_after(three: Option<(f64, usize)>, one: Option<(f64, usize)>) -> Option<f64> {
        let result = |(bound, found): (f64, usize)| {
            let score = Score { objective: 2.0 * bound, crossings: 0 };
            let placement = ScoredPlacement { score, placements: vec![], slots: vec![] };
            SearchResult { best: vec![placement; found], bound }
        };
        let search = |slots: &Vec<u32>| if slots[0] == 3 { three.map(result) } else { one.map(result) };
        first_fit(&mut vec![vec![3], vec![4], vec![1]], search).map(|found| found.bound)
    }

    /// A search that found nothing and did not prove that nothing fits leaves no bound for all placements.
    #[test]
    fn a_bound_holds_only_if_what_was_passed_over_cannot_fit() {
        assert_eq!(bound_after(Some((5.0, 1)), None), Some(5.0));
        assert_eq!(bound_after(None, Some((7.0, 1))), Some(7.0));
        assert_eq!(bound_after(Some((5.0, 0)), Some((7.0, 1))), Some(0.0));
        assert_eq!(bound_after(Some((5.0, 0)), None), None);
    }
}
