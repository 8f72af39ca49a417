//! The exact planner's search for one number of slots.
//!
//! A mixed-integer program gives a bound and counts ([`crate::program`]). They and their neighbours are arranged
//! ([`crate::arrange`]) and improved ([`crate::improve`]), and the simulator judges all of it ([`crate::judge`]). Where bound and best meet, the
//! best is proven. Where the blocks are few, every placement is tried or shown to be no better ([`crate::exhaust`]).

use crate::arrange::{arrangements, neighbours};
use crate::exhaust::exhaust;
use crate::greedy::grown;
use crate::improve::improve;
use crate::judge::{Candidate, Judge, SAME, Wish};
use crate::program::{Answer, Counts, MOST_NODES, Outcome, solve};
use crate::regions::{Region, regions};
use crate::{Choice, Options, Phase, Problem, Where, fits};

/// Slots tried where the options leave the choice: two stall, and more than four gain nothing.
pub(crate) const SLOTS: [u32; 2] = [3, 4];
/// Blocks up to which every placement is tried.
pub(crate) const FEW_BLOCKS: usize = 12;
/// A placement this close to the bound, as a part of it, needs no second opinion.
const NEAR: f64 = 1e-3;
/// Steps of trying before giving up.
const MOST_STEPS: usize = 20_000_000;
/// Placements priced in trying neighbouring counts.
const MOST_RESHAPED: usize = 12_000;
/// Placements that are improved.
const STARTS: usize = 4;
/// Placements priced in improving one.
const MOST_PRICED: usize = 1500;

/// Blocks from which on less is tried, because each try takes longer; and of slots only the smaller number.
pub(crate) const MANY_BLOCKS: usize = 90;

/// How much is tried where so much is at most: the square of the blocks beyond many of them is taken off.
fn share(problem: &Problem, most: usize) -> usize {
    let blocks = problem.blocks.len().max(MANY_BLOCKS);
    most * MANY_BLOCKS * MANY_BLOCKS / (blocks * blocks)
}

/// The best placements found, best first, and milliseconds that none takes less than.
pub(crate) struct Found {
    pub best: Vec<Candidate>,
    pub bound: f64,
}

/// The best `count` placements for one number of slots; `None` when nothing fits. `known` are placements
/// worth a look. Where the bound shows that no placement takes as little as `enough`, nothing is looked for.
pub(crate) fn search(
    problem: &Problem,
    wish: Wish,
    allowed: &[Vec<Choice>],
    known: &[&Vec<Choice>],
    count: usize,
    enough: f64,
) -> Option<Found> {
    let regions = regions(problem, allowed);
    let (mut bound, counts) = match solve(problem, &wish, &regions, allowed, share(problem, MOST_NODES as usize) as u64)
    {
        Outcome::Infeasible => return None,
        Outcome::Unknown => (0.0, None),
        Outcome::Answer(Answer { bound, counts }) => (bound, counts),
    };
    if bound > enough {
        return Some(Found { best: Vec::new(), bound });
    }
    let mut judge = Judge::new(problem, wish, count.max(STARTS));
    for choices in starts(problem, &judge.wish, allowed) {
        judge.price(&choices);
    }
    if let Some(counts) = counts {
        reshape(&mut judge, &regions, counts, allowed, bound);
    }
    if judge.best().first().is_none_or(|best| best.price.objective > bound * (1.0 + NEAR))
        && let Some(counts) = usual_counts(&judge, &regions, allowed)
    {
        reshape(&mut judge, &regions, counts, allowed, bound);
    }
    known.iter().for_each(|choices| drop(judge.price(choices)));
    let most: Vec<Candidate> = judge.best().iter().take(STARTS).cloned().collect();
    for start in most {
        if judge.best()[0].price.objective > bound {
            improve(&mut judge, allowed, start, share(problem, MOST_PRICED));
        }
    }
    if problem.blocks.len() <= FEW_BLOCKS && exhaust(&mut judge, allowed, MOST_STEPS) {
        bound = judge.best().first()?.price.objective;
    }
    (!judge.best().is_empty()).then(|| Found { best: judge.best().to_vec(), bound })
}

/// Counts from a smaller program, in which what decodes on a GPU takes the prompt in there, in the same way, and the host's
/// blocks may be streamed for the prompt: found soon where the whole program is too large, and often the best there is.
fn usual_counts(judge: &Judge, regions: &[Region], allowed: &[Vec<Choice>]) -> Option<Counts> {
    let usual = |choice: &Choice| match (choice.prefill, choice.decode) {
        (prefill, decode) if prefill == decode => true,
        (Where::Streamed(_), Where::Cpu) => true,
        _ => false,
    };
    let few: Vec<Vec<Choice>> = allowed.iter().map(|all| all.iter().copied().filter(usual).collect()).collect();
    if few == allowed || few.iter().any(Vec::is_empty) {
        return None;
    }
    match solve(judge.problem, &judge.wish, regions, &few, share(judge.problem, MOST_NODES as usize) as u64 / 4) {
        Outcome::Answer(answer) => answer.counts,
        _ => None,
    }
}

/// Arranges counts in every pattern, and goes on with the neighbouring counts as long as they give something better.
fn reshape(judge: &mut Judge, regions: &[Region], mut counts: Counts, allowed: &[Vec<Choice>], bound: f64) {
    let limit = judge.priced + share(judge.problem, MOST_RESHAPED);
    let mut best = arrange(judge, regions, &counts, allowed);
    while judge.best().first().is_some_and(|best| best.price.objective > bound) {
        let mut better = None;
        for other in neighbours(regions, &counts, allowed) {
            let candidate = arrange(judge, regions, &other, allowed);
            let beats = |c: &Candidate| best.as_ref().is_none_or(|best| c.beats(best));
            if let Some(candidate) = candidate.filter(beats) {
                best = Some(candidate);
                better = Some(other);
            }
            if judge.priced >= limit {
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
fn arrange(judge: &mut Judge, regions: &[Region], counts: &Counts, allowed: &[Vec<Choice>]) -> Option<Candidate> {
    let all = arrangements(&judge.wish, regions, counts, allowed);
    all.iter().filter_map(|choices| judge.price(choices)).min_by(Candidate::order)
}

/// Placements anyone would try: one place for all, and the greedy planner's.
fn starts(problem: &Problem, wish: &Wish, allowed: &[Vec<Choice>]) -> Vec<Vec<Choice>> {
    let mut places = vec![Where::Cpu];
    places.extend((0..problem.budget.vram.len()).map(Where::Resident));
    if wish.mechanisms.streams() {
        places.extend((0..problem.budget.vram.len()).map(Where::Streamed));
    }
    let everywhere = places.into_iter().map(|place| vec![Choice::both(place); problem.blocks.len()]);
    let is_allowed = |choices: &Vec<Choice>| choices.iter().zip(allowed).all(|(c, allowed)| allowed.contains(c));
    everywhere.chain(grown(problem).ok()).filter(is_allowed).collect()
}

/// Every block that may be and still fits goes to a place in one phase, one after the other.
fn push(judge: &Judge, allowed: &[Vec<Choice>], from: &[Choice], phase: Phase, place: Where) -> Vec<Choice> {
    let mut choices = from.to_vec();
    for (block, allowed) in allowed.iter().enumerate().filter(|(block, _)| from[*block].of(phase) == Where::Cpu) {
        let there =
            |choice: &&Choice| choice.of(phase) == place && choice.of(phase.other()) == from[block].of(phase.other());
        if let Some(choice) = allowed.iter().find(there) {
            let before = std::mem::replace(&mut choices[block], *choice);
            if fits(judge.problem, &choices, &judge.wish.slots, judge.wish.mechanisms).is_err() {
                choices[block] = before;
            }
        }
    }
    choices
}

/// Where one phase alone counted, the other is made as fast as what is left of the memory allows.
pub(crate) fn then_the_other_phase(
    problem: &Problem,
    options: &Options,
    weights: [f64; 2],
    candidate: Candidate,
) -> Candidate {
    let settled = Phase::BOTH.into_iter().find(|phase| weights[1 - *phase as usize] == 0.0);
    let Some(settled) = settled.filter(|_| options.mechanisms.streams()) else { return candidate };
    let others = |block: usize| {
        let now = candidate.choices[block];
        // Moving state costs time before the first token, so where that is what counts state stays.
        let stays = |choice: &Choice| problem.visit(block, *choice, settled) == problem.visit(block, now, settled);
        let keeps = |choice: &Choice| choice.of(settled) == now.of(settled);
        problem.choices(block, options.mechanisms).into_iter().filter(|choice| keeps(choice) && stays(choice)).collect()
    };
    let allowed: Vec<Vec<Choice>> = (0..problem.blocks.len()).map(others).collect();
    let mut other = [1.0; 2];
    other[settled as usize] = 0.0;
    // A ring that is there keeps its slots.
    let ring = candidate.slots.iter().copied().max().filter(|slots| *slots > 0);
    let slots = vec![options.slots.or(ring).unwrap_or(SLOTS[0]); problem.budget.vram.len()];
    let wish = |weights| Wish { weights, mechanisms: options.mechanisms, slots: slots.clone() };
    let mut judge = Judge::new(problem, wish(other), 1);
    judge.price(&candidate.choices);
    for gpu in 0..problem.budget.vram.len() {
        let pushed = push(&judge, &allowed, &candidate.choices, settled.other(), Where::Streamed(gpu));
        judge.price(&pushed);
    }
    let regions = regions(problem, &allowed);
    if let Outcome::Answer(Answer { counts: Some(counts), .. }) =
        solve(problem, &judge.wish, &regions, &allowed, MOST_NODES)
    {
        for choices in arrangements(&judge.wish, &regions, &counts, &allowed) {
            judge.price(&choices);
        }
    }
    let Some(start) = judge.best().first().cloned() else { return candidate };
    let better = improve(&mut judge, &allowed, start, MOST_PRICED);
    // What was settled must not suffer, by weights that now come from disk for one.
    match Judge::new(problem, wish(weights), 1).price(&better.choices) {
        Some(same) if same.price.objective <= candidate.price.objective * (1.0 + SAME) => same,
        _ => candidate,
    }
}
