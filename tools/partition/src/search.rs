//! The exact planner's search for one number of slots.
//!
//! A mixed-integer program gives a lower bound and counts of blocks at each place ([`crate::program`]). The search arranges these and
//! neighbouring counts into placements ([`crate::arrange`]) and improves the best by local changes ([`crate::improve`]). The simulator
//! evaluates every placement ([`crate::evaluate`]). A placement that reaches the bound is proven optimal. With few blocks an
//! exhaustive search ([`crate::exhaust`]) proves the best.

use crate::arrange::{arrangements, neighbours};
use crate::evaluate::{Evaluator, Goal, ScoredPlacement, TIME_TOLERANCE};
use crate::exhaust::exhaust;
use crate::improve::improve;
use crate::program::{MAX_NODES, Outcome, PlacementCounts, ProgramSolution, solve};
use crate::regions::{Region, regions};
use crate::starts::{full_gpus, simple_placements};
use crate::{BlockPlacement, Options, Phase, Placement, Problem, fits};

/// Numbers of slots to try if the options do not give one, in this order. With fewer than 3 copies stall, but each slot takes the place of a
/// resident block; more than 4 gain nothing.
pub(crate) const SLOTS: [u32; 4] = [3, 2, 1, 4];
/// Maximum number of blocks for an exhaustive search.
pub(crate) const FEW_BLOCKS: usize = 12;
/// With at most this relative gap to the bound the second, smaller program is not solved.
const SMALL_GAP: f64 = 1e-3;
/// Maximum number of steps of the exhaustive searches of all numbers of slots: about three seconds. They rarely find a better placement;
/// they prove that the best one is optimal.
pub(crate) const MAX_STEPS: usize = 1_000_000;
/// Maximum number of evaluations of hill climbing over counts.
const MAX_CLIMB_EVALUATIONS: usize = 12_000;
/// Number of placements to improve.
const STARTS: usize = 4;
/// Number of placements with full GPUs to improve.
const FULL_STARTS: usize = 2;
/// Maximum number of evaluations of the local search from one placement.
const MAX_IMPROVE_EVALUATIONS: usize = 1500;

/// With more blocks the limits are lower, because each evaluation takes longer, and only one number of slots is tried.
pub(crate) const MANY_BLOCKS: usize = 90;

/// Scales a limit down with the square of the number of blocks beyond [`MANY_BLOCKS`].
fn scaled(problem: &Problem, limit: usize) -> usize {
    let blocks = problem.blocks.len().max(MANY_BLOCKS);
    limit * MANY_BLOCKS * MANY_BLOCKS / (blocks * blocks)
}

/// Maximum number of branch-and-bound nodes for this problem.
fn max_nodes(problem: &Problem) -> u64 {
    scaled(problem, MAX_NODES as usize) as u64
}

/// The result of a search.
pub(crate) struct SearchResult {
    /// The best placements, best first; empty if none was found.
    pub best: Vec<ScoredPlacement>,
    /// Lower bound of every placement that fits, found or not, weighted milliseconds; 0 if unknown.
    pub bound: f64,
}

impl SearchResult {
    /// Adds the result of another search, if anything fits there.
    pub fn extend(&mut self, found: Option<SearchResult>) {
        if let Some(found) = found {
            self.bound = self.bound.min(found.bound);
            self.best.extend(found.best);
        }
    }
}

/// The best `count` placements for one number of slots; `None` if it is proven that nothing fits. `known` are additional starting placements. Looks for
/// those that take less than `known_ms`, weighted milliseconds, and returns no placements if the lower bound is above it. An exhaustive search takes its
/// steps from `steps`.
pub(crate) fn search(
    problem: &Problem,
    goal: Goal,
    allowed: &[Vec<BlockPlacement>],
    known: &[&Vec<BlockPlacement>],
    count: usize,
    known_ms: f64,
    steps: &mut usize,
) -> Option<SearchResult> {
    let regions = regions(problem, allowed);
    tracing::debug!(
        blocks = problem.blocks.len(),
        regions = regions.len(),
        groups = regions.iter().map(|region| region.classes.len()).sum::<usize>(),
        slots = ?goal.slots,
        "integer program"
    );
    let (mut bound, counts) = match solve(problem, &goal, &regions, allowed, max_nodes(problem)) {
        Outcome::Infeasible => return None,
        Outcome::Unknown => (0.0, None),
        Outcome::Bounded(ProgramSolution { bound, counts }) => (bound, counts),
    };
    if bound > known_ms {
        return Some(SearchResult { best: Vec::new(), bound });
    }
    let mut evaluator = Evaluator::new(problem, goal, count.max(STARTS));
    for placements in simple_placements(problem, &evaluator.goal, allowed) {
        evaluator.evaluate(&placements);
    }
    if let Some(counts) = counts {
        climb(&mut evaluator, &regions, counts, allowed, bound);
    }
    if evaluator.best().first().is_none_or(|best| best.score.objective > bound * (1.0 + SMALL_GAP))
        && let Some(counts) = counts_of_smaller_program(&evaluator, &regions, allowed)
    {
        climb(&mut evaluator, &regions, counts, allowed, bound);
    }
    known.iter().for_each(|placements| drop(evaluator.evaluate(placements)));
    let starts: Vec<ScoredPlacement> = evaluator.best().iter().take(STARTS).cloned().collect();
    improve_each(&mut evaluator, allowed, starts, bound);
    if evaluator.best().first().is_none_or(|best| best.score.objective > bound * (1.0 + SMALL_GAP)) {
        let full = full_gpus(problem, &evaluator.goal, allowed);
        let mut starts: Vec<_> = full.iter().filter_map(|placements| evaluator.evaluate(placements)).collect();
        starts.sort_by(ScoredPlacement::order);
        starts.truncate(FULL_STARTS);
        improve_each(&mut evaluator, allowed, starts, bound);
    }
    let is_exhausted = problem.blocks.len() <= FEW_BLOCKS && exhaust(&mut evaluator, allowed, steps, known_ms);
    if is_exhausted {
        bound = evaluator.best().first().map_or(known_ms, |best| best.score.objective.min(known_ms)).max(bound);
    }
    let best_ms = evaluator.best().first().map(|best| best.score.objective);
    tracing::debug!(bound_ms = bound, best_ms, evaluations = evaluator.evaluations, "placements searched");
    let best = evaluator.best().to_vec();
    let fits_nothing = best.is_empty() && is_exhausted && known_ms == f64::INFINITY;
    (!fits_nothing).then_some(SearchResult { best, bound })
}

/// Improves one placement after the other, unless the best has reached the bound.
fn improve_each(evaluator: &mut Evaluator, allowed: &[Vec<BlockPlacement>], starts: Vec<ScoredPlacement>, bound: f64) {
    let limit = scaled(evaluator.problem, MAX_IMPROVE_EVALUATIONS);
    for start in starts {
        if evaluator.best()[0].score.objective > bound {
            improve(evaluator, allowed, start, limit);
        }
    }
}

/// Counts from a smaller program, in which blocks have the same place in both phases, or are streamed for the prompt and decode on the
/// host. The solver solves it quickly where the whole program is too large, and it often has the best counts.
fn counts_of_smaller_program(
    evaluator: &Evaluator,
    regions: &[Region],
    allowed: &[Vec<BlockPlacement>],
) -> Option<PlacementCounts> {
    let is_usual = |placement: &BlockPlacement| {
        placement.prefill == placement.decode
            || matches!((placement.prefill, placement.decode), (Placement::Streamed(_), Placement::Cpu))
    };
    let usual: Vec<Vec<BlockPlacement>> =
        allowed.iter().map(|placements| placements.iter().copied().filter(is_usual).collect()).collect();
    if usual == allowed || usual.iter().any(Vec::is_empty) {
        return None;
    }
    let nodes = max_nodes(evaluator.problem) / 4;
    match solve(evaluator.problem, &evaluator.goal, regions, &usual, nodes) {
        Outcome::Bounded(solution) => solution.counts,
        _ => None,
    }
}

/// Hill climbing over counts: evaluates all patterns of these and of neighbouring counts, while the best placement improves.
fn climb(
    evaluator: &mut Evaluator,
    regions: &[Region],
    mut counts: PlacementCounts,
    allowed: &[Vec<BlockPlacement>],
    bound: f64,
) {
    let limit = evaluator.evaluations + scaled(evaluator.problem, MAX_CLIMB_EVALUATIONS);
    let mut best = best_arrangement(evaluator, regions, &counts, allowed);
    while evaluator.best().first().is_some_and(|best| best.score.objective > bound) {
        let mut better = None;
        for other in neighbours(regions, &counts, allowed) {
            let candidate = best_arrangement(evaluator, regions, &other, allowed);
            let is_better = |candidate: &ScoredPlacement| best.as_ref().is_none_or(|best| candidate.beats(best));
            if let Some(candidate) = candidate.filter(is_better) {
                best = Some(candidate);
                better = Some(other);
            }
            if evaluator.evaluations >= limit {
                return;
            }
        }
        match better {
            Some(better) => counts = better,
            None => return,
        }
    }
}

/// The best placement with these counts.
fn best_arrangement(
    evaluator: &mut Evaluator,
    regions: &[Region],
    counts: &PlacementCounts,
    allowed: &[Vec<BlockPlacement>],
) -> Option<ScoredPlacement> {
    let all = arrangements(&evaluator.goal, regions, counts, allowed);
    all.iter().filter_map(|placements| evaluator.evaluate(placements)).min_by(ScoredPlacement::order)
}

/// Moves blocks from the host to a place in one phase, one after another, while they fit.
fn fill_place(
    evaluator: &Evaluator,
    allowed: &[Vec<BlockPlacement>],
    from: &[BlockPlacement],
    phase: Phase,
    place: Placement,
) -> Vec<BlockPlacement> {
    let mut placements = from.to_vec();
    for (block, allowed) in
        allowed.iter().enumerate().filter(|(block, _)| from[*block].in_phase(phase) == Placement::Cpu)
    {
        let (other, other_place) = (phase.other(), from[block].in_phase(phase.other()));
        let moved = allowed
            .iter()
            .find(|placement| placement.in_phase(phase) == place && placement.in_phase(other) == other_place);
        if let Some(placement) = moved {
            let before = std::mem::replace(&mut placements[block], *placement);
            if fits(evaluator.problem, &placements, &evaluator.goal.slots, evaluator.goal.mechanisms).is_err() {
                placements[block] = before;
            }
        }
    }
    placements
}

/// If the objective has one phase only, optimizes the other phase with the remaining memory.
pub(crate) fn optimize_other_phase(
    problem: &Problem,
    options: &Options,
    weights: [f64; 2],
    candidate: ScoredPlacement,
) -> ScoredPlacement {
    let optimized = Phase::BOTH.into_iter().find(|phase| weights[phase.other() as usize] == 0.0);
    let Some(optimized) = optimized.filter(|_| options.mechanisms.streams()) else { return candidate };
    // Placements that keep the block's place and its state swaps in the optimized phase.
    let placements_for_other = |block: usize| -> Vec<BlockPlacement> {
        let current = candidate.placements[block];
        let swap = problem.state_swap(block, current, optimized);
        let all = problem.placements(block, options.mechanisms).into_iter();
        all.filter(|placement| placement.in_phase(optimized) == current.in_phase(optimized))
            .filter(|placement| problem.state_swap(block, *placement, optimized) == swap)
            .collect()
    };
    let allowed: Vec<Vec<BlockPlacement>> = (0..problem.blocks.len()).map(placements_for_other).collect();
    let mut other_weights = [1.0; 2];
    other_weights[optimized as usize] = 0.0;
    // An existing ring keeps its slots.
    let ring = candidate.slots.iter().copied().max().filter(|slots| *slots > 0);
    let slots = vec![options.slots.or(ring).unwrap_or(SLOTS[0]); problem.budget.vram.len()];
    let goal = |weights| Goal { weights, mechanisms: options.mechanisms, slots: slots.clone() };
    let mut evaluator = Evaluator::new(problem, goal(other_weights), 1);
    evaluator.evaluate(&candidate.placements);
    for gpu in 0..problem.budget.vram.len() {
        let filled =
            fill_place(&evaluator, &allowed, &candidate.placements, optimized.other(), Placement::Streamed(gpu));
        evaluator.evaluate(&filled);
    }
    let regions = regions(problem, &allowed);
    if let Outcome::Bounded(ProgramSolution { counts: Some(counts), .. }) =
        solve(problem, &evaluator.goal, &regions, &allowed, MAX_NODES)
    {
        for placements in arrangements(&evaluator.goal, &regions, &counts, &allowed) {
            evaluator.evaluate(&placements);
        }
    }
    let Some(start) = evaluator.best().first().cloned() else { return candidate };
    let better = improve(&mut evaluator, &allowed, start, MAX_IMPROVE_EVALUATIONS);
    // The optimized phase must not become slower, for example by weights that now come from disk.
    match Evaluator::new(problem, goal(weights), 1).evaluate(&better.placements) {
        Some(same) if same.score.objective <= candidate.score.objective * (1.0 + TIME_TOLERANCE) => same,
        _ => candidate,
    }
}
