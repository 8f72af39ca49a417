//! The exact planner's search for one number of slots.
//!
//! A mixed-integer program gives a lower bound and counts of blocks at each place ([`crate::program`]). The search arranges these and
//! neighbouring counts into placements ([`crate::arrange`]) and improves the best by small changes ([`crate::improve`]). The simulator
//! evaluates every placement ([`crate::evaluate`]). A placement that reaches the bound is proven optimal. With few blocks an
//! exhaustive search ([`crate::exhaust`]) proves the best.

use crate::arrange::{arrangements, neighbours};
use crate::evaluate::{Candidate, Evaluator, Goal, SAME};
use crate::exhaust::exhaust;
use crate::greedy::greedy_run;
use crate::improve::improve;
use crate::program::{Answer, Counts, MOST_NODES, Outcome, solve};
use crate::regions::{Region, regions};
use crate::{Choice, Options, Phase, Problem, Where, fits};

/// Numbers of slots to try if the options leave the choice: 2 stall, and more than 4 gain nothing.
pub(crate) const SLOTS: [u32; 2] = [3, 4];
/// Most blocks for an exhaustive search.
pub(crate) const FEW_BLOCKS: usize = 12;
/// With a smaller relative gap to the bound the second, smaller program is not solved.
const NEAR: f64 = 1e-3;
/// Most steps of the exhaustive search.
const MOST_STEPS: usize = 20_000_000;
/// Most evaluations of climbing over counts.
const MOST_CLIMBED: usize = 12_000;
/// Number of placements to improve.
const STARTS: usize = 4;
/// Most evaluations of improving one placement.
const MOST_IMPROVEMENTS: usize = 1500;

/// With more blocks the limits are lower, because each evaluation takes longer, and only one number of slots is tried.
pub(crate) const MANY_BLOCKS: usize = 90;

/// Scales a limit down with the square of the number of blocks beyond [`MANY_BLOCKS`].
fn scaled(problem: &Problem, most: usize) -> usize {
    let blocks = problem.blocks.len().max(MANY_BLOCKS);
    most * MANY_BLOCKS * MANY_BLOCKS / (blocks * blocks)
}

/// The result of a search.
pub(crate) struct SearchResult {
    /// The best placements, best first.
    pub best: Vec<Candidate>,
    /// Lower bound of every placement, weighted milliseconds.
    pub bound: f64,
}

/// The best `count` placements for one number of slots; `None` if nothing fits. `known` are additional starting placements. Stops
/// without placements if the lower bound is above `enough`.
pub(crate) fn search(
    problem: &Problem,
    goal: Goal,
    allowed: &[Vec<Choice>],
    known: &[&Vec<Choice>],
    count: usize,
    enough: f64,
) -> Option<SearchResult> {
    let regions = regions(problem, allowed);
    tracing::debug!(
        blocks = problem.blocks.len(),
        regions = regions.len(),
        groups = regions.iter().map(|region| region.classes.len()).sum::<usize>(),
        slots = ?goal.slots,
        "integer program"
    );
    let (mut bound, counts) =
        match solve(problem, &goal, &regions, allowed, scaled(problem, MOST_NODES as usize) as u64) {
            Outcome::Infeasible => return None,
            Outcome::Unknown => (0.0, None),
            Outcome::Answer(Answer { bound, counts }) => (bound, counts),
        };
    if bound > enough {
        return Some(SearchResult { best: Vec::new(), bound });
    }
    let mut evaluator = Evaluator::new(problem, goal, count.max(STARTS));
    for choices in simple_placements(problem, &evaluator.goal, allowed) {
        evaluator.evaluate(&choices);
    }
    if let Some(counts) = counts {
        climb(&mut evaluator, &regions, counts, allowed, bound);
    }
    if evaluator.best().first().is_none_or(|best| best.score.objective > bound * (1.0 + NEAR))
        && let Some(counts) = usual_counts(&evaluator, &regions, allowed)
    {
        climb(&mut evaluator, &regions, counts, allowed, bound);
    }
    known.iter().for_each(|choices| drop(evaluator.evaluate(choices)));
    let most: Vec<Candidate> = evaluator.best().iter().take(STARTS).cloned().collect();
    for start in most {
        if evaluator.best()[0].score.objective > bound {
            improve(&mut evaluator, allowed, start, scaled(problem, MOST_IMPROVEMENTS));
        }
    }
    if problem.blocks.len() <= FEW_BLOCKS && exhaust(&mut evaluator, allowed, MOST_STEPS) {
        bound = evaluator.best().first()?.score.objective;
    }
    let best_ms = evaluator.best().first().map(|best| best.score.objective);
    tracing::debug!(bound_ms = bound, best_ms, evaluations = evaluator.evaluations, "placements searched");
    (!evaluator.best().is_empty()).then(|| SearchResult { best: evaluator.best().to_vec(), bound })
}

/// Counts from a smaller program, in which blocks have the same place in both phases, or are streamed for the prompt and decode on the
/// host. It is solved quickly where the whole program is too large, and often has the best counts.
fn usual_counts(evaluator: &Evaluator, regions: &[Region], allowed: &[Vec<Choice>]) -> Option<Counts> {
    let usual = |choice: &Choice| match (choice.prefill, choice.decode) {
        (prefill, decode) if prefill == decode => true,
        (Where::Streamed(_), Where::Cpu) => true,
        _ => false,
    };
    let few: Vec<Vec<Choice>> = allowed.iter().map(|all| all.iter().copied().filter(usual).collect()).collect();
    if few == allowed || few.iter().any(Vec::is_empty) {
        return None;
    }
    match solve(
        evaluator.problem,
        &evaluator.goal,
        regions,
        &few,
        scaled(evaluator.problem, MOST_NODES as usize) as u64 / 4,
    ) {
        Outcome::Answer(answer) => answer.counts,
        _ => None,
    }
}

/// Hill climbing over counts: evaluates all patterns of these and of neighbouring counts, while the best placement improves.
fn climb(evaluator: &mut Evaluator, regions: &[Region], mut counts: Counts, allowed: &[Vec<Choice>], bound: f64) {
    let limit = evaluator.evaluations + scaled(evaluator.problem, MOST_CLIMBED);
    let mut best = best_arrangement(evaluator, regions, &counts, allowed);
    while evaluator.best().first().is_some_and(|best| best.score.objective > bound) {
        let mut better = None;
        for other in neighbours(regions, &counts, allowed) {
            let candidate = best_arrangement(evaluator, regions, &other, allowed);
            let beats = |c: &Candidate| best.as_ref().is_none_or(|best| c.beats(best));
            if let Some(candidate) = candidate.filter(beats) {
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
    counts: &Counts,
    allowed: &[Vec<Choice>],
) -> Option<Candidate> {
    let all = arrangements(&evaluator.goal, regions, counts, allowed);
    all.iter().filter_map(|choices| evaluator.evaluate(choices)).min_by(Candidate::order)
}

/// Simple starting placements: one place for all blocks, and the greedy planner's placement.
fn simple_placements(problem: &Problem, goal: &Goal, allowed: &[Vec<Choice>]) -> Vec<Vec<Choice>> {
    let mut places = vec![Where::Cpu];
    places.extend((0..problem.budget.vram.len()).map(Where::Resident));
    if goal.mechanisms.streams() {
        places.extend((0..problem.budget.vram.len()).map(Where::Streamed));
    }
    let everywhere = places.into_iter().map(|place| vec![Choice::both(place); problem.blocks.len()]);
    let is_allowed = |choices: &Vec<Choice>| choices.iter().zip(allowed).all(|(c, allowed)| allowed.contains(c));
    everywhere.chain(greedy_run(problem).ok()).filter(is_allowed).collect()
}

/// Moves blocks from the host to a place in one phase, one after another, while they fit.
fn fill_place(
    evaluator: &Evaluator,
    allowed: &[Vec<Choice>],
    from: &[Choice],
    phase: Phase,
    place: Where,
) -> Vec<Choice> {
    let mut choices = from.to_vec();
    for (block, allowed) in allowed.iter().enumerate().filter(|(block, _)| from[*block].of(phase) == Where::Cpu) {
        let there =
            |choice: &&Choice| choice.of(phase) == place && choice.of(phase.other()) == from[block].of(phase.other());
        if let Some(choice) = allowed.iter().find(there) {
            let before = std::mem::replace(&mut choices[block], *choice);
            if fits(evaluator.problem, &choices, &evaluator.goal.slots, evaluator.goal.mechanisms).is_err() {
                choices[block] = before;
            }
        }
    }
    choices
}

/// If the objective has one phase only, optimizes the other phase with the remaining memory.
pub(crate) fn optimize_other_phase(
    problem: &Problem,
    options: &Options,
    weights: [f64; 2],
    candidate: Candidate,
) -> Candidate {
    let settled = Phase::BOTH.into_iter().find(|phase| weights[1 - *phase as usize] == 0.0);
    let Some(settled) = settled.filter(|_| options.mechanisms.streams()) else { return candidate };
    let others = |block: usize| {
        let now = candidate.choices[block];
        // The choice of the other phase must not change how state is swapped in the optimized phase.
        let stays = |choice: &Choice| problem.visit(block, *choice, settled) == problem.visit(block, now, settled);
        let keeps = |choice: &Choice| choice.of(settled) == now.of(settled);
        problem.choices(block, options.mechanisms).into_iter().filter(|choice| keeps(choice) && stays(choice)).collect()
    };
    let allowed: Vec<Vec<Choice>> = (0..problem.blocks.len()).map(others).collect();
    let mut other = [1.0; 2];
    other[settled as usize] = 0.0;
    // An existing ring keeps its slots.
    let ring = candidate.slots.iter().copied().max().filter(|slots| *slots > 0);
    let slots = vec![options.slots.or(ring).unwrap_or(SLOTS[0]); problem.budget.vram.len()];
    let goal = |weights| Goal { weights, mechanisms: options.mechanisms, slots: slots.clone() };
    let mut evaluator = Evaluator::new(problem, goal(other), 1);
    evaluator.evaluate(&candidate.choices);
    for gpu in 0..problem.budget.vram.len() {
        let filled = fill_place(&evaluator, &allowed, &candidate.choices, settled.other(), Where::Streamed(gpu));
        evaluator.evaluate(&filled);
    }
    let regions = regions(problem, &allowed);
    if let Outcome::Answer(Answer { counts: Some(counts), .. }) =
        solve(problem, &evaluator.goal, &regions, &allowed, MOST_NODES)
    {
        for choices in arrangements(&evaluator.goal, &regions, &counts, &allowed) {
            evaluator.evaluate(&choices);
        }
    }
    let Some(start) = evaluator.best().first().cloned() else { return candidate };
    let better = improve(&mut evaluator, &allowed, start, MOST_IMPROVEMENTS);
    // The optimized phase must not become slower, for example by weights that now come from disk.
    match Evaluator::new(problem, goal(weights), 1).evaluate(&better.choices) {
        Some(same) if same.score.objective <= candidate.score.objective * (1.0 + SAME) => same,
        _ => candidate,
    }
}
