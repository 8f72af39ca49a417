//! The mixed-integer program: how many blocks of each class make each choice. It is a relaxation (it ignores which block of a class
//! makes which choice), so its optimum is a lower bound of every placement, and its counts are a good start for a search.
//!
//! Variables: for each region and class a count for each choice; for each phase and region the first and last place and the number
//! of changes from one place to another, which determine launches and crossings. Memory is linear in the counts; the time of a
//! phase is at least each of the forms in [`time`].

mod held;
mod line;
mod order;
mod time;

use crate::evaluate::Goal;
use crate::regions::Region;
use crate::{Choice, Phase, Problem, Where};
use held::hold;
use line::{Line, Lines};
use microlp::{SolveOptions, SolveOutcome, Variable};
use order::order;
use time::time;

/// Most nodes of branch and bound; then the current bound is used.
pub(crate) const MOST_NODES: u64 = 1500;

/// By region and class: the number of blocks that make each choice.
pub(crate) type Counts = Vec<Vec<Vec<(Choice, usize)>>>;

/// A solution of the program.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// Lower bound of every placement, weighted milliseconds.
    pub bound: f64,
    /// `None` if no integer solution was found.
    pub counts: Option<Counts>,
}

/// The result of solving the program.
pub(crate) enum Outcome {
    Answer(Answer),
    /// No placement fits.
    Infeasible,
    /// The solver failed; nothing is known.
    Unknown,
}

/// A program under construction.
struct Program<'a> {
    problem: &'a Problem,
    goal: &'a Goal,
    regions: &'a [Region],
    lines: Lines,
    /// By region and class: the choices, and the number of blocks that make each.
    counts: Vec<Vec<Vec<(Choice, Variable)>>>,
    /// Unit of memory constraints, bytes.
    bytes: f64,
}

/// Solves the program for these regions. `allowed` has the choices of each block; `nodes` limits branch and bound.
pub(crate) fn solve(
    problem: &Problem,
    goal: &Goal,
    regions: &[Region],
    allowed: &[Vec<Choice>],
    nodes: u64,
) -> Outcome {
    let mut program = Program::new(problem, goal, regions, allowed);
    hold(&mut program);
    let scale = program.scale();
    // If no block may change its place between the phases, both phases share one order.
    let stays = allowed.iter().flatten().all(|choice| choice.prefill == choice.decode);
    let mut known = None;
    for phase in goal.phases() {
        let order = known.take().filter(|_| stays).unwrap_or_else(|| order(&mut program, phase));
        time(&mut program, &order, phase, goal.weights[phase as usize] / scale);
        known = Some(order);
    }
    let mut options = SolveOptions::default();
    options.node_limit = Some(nodes);
    match program.lines.lp.solve_with(options) {
        Ok(outcome) => answer(outcome, scale, &program.counts),
        Err(microlp::Error::Infeasible) => Outcome::Infeasible,
        Err(_) => Outcome::Unknown,
    }
}

/// The placement within the GPU budgets that needs the least host memory; `None` if there is none.
pub(crate) fn least_host(
    problem: &Problem,
    goal: &Goal,
    regions: &[Region],
    allowed: &[Vec<Choice>],
) -> Option<Vec<Choice>> {
    let mut program = Program::new(problem, goal, regions, allowed);
    (0..problem.budget.vram.len()).for_each(|gpu| held::on_gpu(&mut program, gpu));
    let bytes = program.lines.real(1.0);
    let host = held::host(&mut program);
    program.lines.at_least(&bytes, &host);
    let mut options = SolveOptions::default();
    options.node_limit = Some(MOST_NODES / 8);
    let Ok(outcome) = program.lines.lp.solve_with(options) else { return None };
    let Outcome::Answer(Answer { counts: Some(counts), .. }) = answer(outcome, 1.0, &program.counts) else {
        return None;
    };
    let mut choices = vec![Choice::both(Where::Cpu); problem.blocks.len()];
    for (class, counts) in regions.iter().flat_map(|region| &region.classes).zip(counts.iter().flatten()) {
        let all = counts.iter().flat_map(|(choice, count)| std::iter::repeat_n(*choice, *count));
        class.iter().zip(all).for_each(|(block, choice)| choices[*block] = choice);
    }
    Some(choices)
}

fn answer(outcome: SolveOutcome, scale: f64, counts: &[Vec<Vec<(Choice, Variable)>>]) -> Outcome {
    // The solver's bound holds within its tolerance, so subtract the tolerance.
    let safe = |bound: f64| (bound * scale * (1.0 - 1e-7)).max(0.0);
    match outcome {
        SolveOutcome::Solution(solution) => {
            let count =
                |(choice, variable): &(Choice, Variable)| (*choice, solution.var_value(*variable).round() as usize);
            let by_class =
                |choices: &Vec<(Choice, Variable)>| choices.iter().map(count).filter(|(_, n)| *n > 0).collect();
            let by_region = |classes: &Vec<Vec<(Choice, Variable)>>| classes.iter().map(by_class).collect();
            let bound = solution.stats().best_bound.unwrap_or(0.0);
            Outcome::Answer(Answer { bound: safe(bound), counts: Some(counts.iter().map(by_region).collect()) })
        }
        SolveOutcome::Interrupted(interrupted) => {
            let bound = interrupted.stats().best_bound.unwrap_or(0.0);
            Outcome::Answer(Answer { bound: safe(bound), counts: None })
        }
    }
}

impl<'a> Program<'a> {
    fn new(problem: &'a Problem, goal: &'a Goal, regions: &'a [Region], allowed: &[Vec<Choice>]) -> Self {
        let mut lines = Lines::new();
        let mut counts = Vec::new();
        for region in regions {
            let classes = region.classes.iter().map(|class| {
                let variables: Vec<(Choice, Variable)> =
                    allowed[class[0]].iter().map(|choice| (*choice, lines.whole_variable(class.len()))).collect();
                let all = Line::sum(variables.iter().map(|(_, variable)| *variable));
                lines.equal(&all, class.len() as f64);
                variables
            });
            counts.push(classes.collect());
        }
        let largest = problem.blocks.iter().map(|block| block.kv_bytes).max().unwrap_or(0);
        let largest = (0..problem.blocks.len()).map(|i| problem.weight_bytes(i)).fold(largest, u64::max);
        Program { problem, goal, regions, lines, counts, bytes: (largest as f64 / 64.0).max(1.0) }
    }

    /// Unit of the objective, weighted milliseconds: a part of the slowest finite placement without streaming.
    fn scale(&self) -> f64 {
        let phases = || self.goal.phases();
        let ms = |i: usize, phase| {
            let costs = std::iter::once(Where::Cpu).chain((0..self.problem.gpus.len()).map(Where::Resident));
            costs
                .map(|place| self.problem.block_ms_in_all(i, place, phase))
                .filter(|ms| ms.is_finite())
                .fold(0.0, f64::max)
        };
        let weigh = |phase: Phase| {
            let all: f64 = (0..self.problem.blocks.len()).map(|i| ms(i, phase)).sum();
            self.goal.weights[phase as usize] * (all + self.problem.pass_ms * self.problem.passes(phase) as f64)
        };
        let all: f64 = phases().map(weigh).sum();
        if all > 0.0 { all / 64.0 } else { 1.0 }
    }

    /// Number of blocks of a class with a selected choice.
    fn count(&self, region: usize, class: usize, is_selected: impl Fn(Choice) -> bool) -> Line {
        let selected = self.counts[region][class].iter().filter(|(choice, _)| is_selected(*choice));
        Line::sum(selected.map(|(_, variable)| *variable))
    }

    /// All classes, as (region, class).
    fn classes(&self) -> Vec<(usize, usize)> {
        let of = |region: usize| (0..self.regions[region].classes.len()).map(move |class| (region, class));
        (0..self.regions.len()).flat_map(of).collect()
    }

    /// The minimum of a number over the blocks of a class.
    fn least(&self, region: usize, class: usize, number: impl Fn(usize) -> f64) -> f64 {
        self.regions[region].classes[class].iter().map(|i| number(*i)).fold(f64::INFINITY, f64::min)
    }

    /// Places that at least one block may have in a phase, sorted.
    fn places(&self, phase: Phase) -> Vec<Where> {
        let all = self.counts.iter().flatten().flatten().map(|(choice, _)| choice.of(phase));
        let places: std::collections::BTreeSet<Where> = all.collect();
        places.into_iter().collect()
    }
}
