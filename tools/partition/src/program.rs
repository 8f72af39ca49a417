//! The mixed-integer program: how many blocks of each class have each block placement. It is a relaxation (it ignores which block of a class
//! has which block placement), so its optimum is a lower bound of every placement, and its counts are a good start for a search.
//!
//! Variables: for each region and class a count for each block placement; for each phase and region the first and last place and the number
//! of changes from one place to another, which determine launches and crossings. Memory is linear in the counts
//! ([`memory_constraints`]); the time of a phase is at least each of the linear expressions in [`time`].

mod linear;
mod memory_constraints;
mod order;
mod time;

use crate::evaluate::Goal;
use crate::regions::Region;
use crate::{BlockPlacement, Phase, Placement, Problem};
use linear::{LinearExpr, LinearModel};
use memory_constraints::{add_gpu_limit, add_memory_constraints, host_demand};
use microlp::{SolveOptions, SolveOutcome, Variable};
use order::add_place_order;
use time::add_time_constraints;

/// Maximum number of branch-and-bound nodes; the solver then stops with the bound it has.
pub(crate) const MAX_NODES: u64 = 1500;

/// By region and class: the number of blocks with each block placement.
pub(crate) type PlacementCounts = Vec<Vec<Vec<(BlockPlacement, usize)>>>;

/// By region and class: the variable of each block placement, the number of blocks that have it.
type CountVariables = Vec<Vec<Vec<(BlockPlacement, Variable)>>>;

/// A solution of the program.
#[derive(Clone, Debug)]
pub(crate) struct ProgramSolution {
    /// Lower bound of every placement, weighted milliseconds.
    pub bound: f64,
    /// `None` if no integer solution was found.
    pub counts: Option<PlacementCounts>,
}

/// The result of solving the program.
pub(crate) enum Outcome {
    /// A lower bound, and usually counts.
    Bounded(ProgramSolution),
    /// No placement fits.
    Infeasible,
    /// The solver failed; nothing is known.
    Unknown,
}

/// A program under construction.
struct IntegerProgram<'a> {
    problem: &'a Problem,
    goal: &'a Goal,
    regions: &'a [Region],
    model: LinearModel,
    counts: CountVariables,
    /// Unit of memory constraints, bytes.
    memory_unit: f64,
}

/// Solves the program for these regions. `allowed` has the placements of each block; `nodes` limits branch and bound.
pub(crate) fn solve(
    problem: &Problem,
    goal: &Goal,
    regions: &[Region],
    allowed: &[Vec<BlockPlacement>],
    nodes: u64,
) -> Outcome {
    let mut program = IntegerProgram::new(problem, goal, regions, allowed);
    add_memory_constraints(&mut program);
    let scale = program.objective_unit();
    // If no block may change its place between the phases, both phases share one order of places.
    let same_in_both_phases = allowed.iter().flatten().all(|placement| placement.prefill == placement.decode);
    let mut previous = None;
    for phase in goal.phases() {
        let order =
            previous.take().filter(|_| same_in_both_phases).unwrap_or_else(|| add_place_order(&mut program, phase));
        add_time_constraints(&mut program, &order, phase, goal.weights[phase as usize] / scale);
        previous = Some(order);
    }
    let mut options = SolveOptions::default();
    options.node_limit = Some(nodes);
    match program.model.lp.solve_with(options) {
        Ok(outcome) => solved(outcome, scale, &program.counts),
        Err(microlp::Error::Infeasible) => Outcome::Infeasible,
        Err(_) => Outcome::Unknown,
    }
}

/// The placement within the GPU budgets that needs the least host memory; `None` if there is none.
pub(crate) fn min_host_placement(
    problem: &Problem,
    goal: &Goal,
    regions: &[Region],
    allowed: &[Vec<BlockPlacement>],
) -> Option<Vec<BlockPlacement>> {
    let mut program = IntegerProgram::new(problem, goal, regions, allowed);
    (0..problem.budget.vram.len()).for_each(|gpu| add_gpu_limit(&mut program, gpu));
    let objective = program.model.nonnegative(1.0);
    let host = host_demand(&mut program);
    program.model.at_least(&objective, &host);
    let mut options = SolveOptions::default();
    options.node_limit = Some(MAX_NODES / 8);
    let Ok(outcome) = program.model.lp.solve_with(options) else { return None };
    let Outcome::Bounded(ProgramSolution { counts: Some(counts), .. }) = solved(outcome, 1.0, &program.counts) else {
        return None;
    };
    let mut placements = vec![BlockPlacement::both(Placement::Cpu); problem.blocks.len()];
    for (class, counts) in regions.iter().flat_map(|region| &region.classes).zip(counts.iter().flatten()) {
        let all = counts.iter().flat_map(|(placement, count)| std::iter::repeat_n(*placement, *count));
        class.iter().zip(all).for_each(|(block, placement)| placements[*block] = placement);
    }
    Some(placements)
}

/// The bound in weighted milliseconds, and the rounded counts. `scale` is the unit of the objective.
fn solved(outcome: SolveOutcome, scale: f64, variables: &CountVariables) -> Outcome {
    // The solver's bound holds within its tolerance, so subtract the tolerance.
    let safe = |bound: Option<f64>| (bound.unwrap_or(0.0) * scale * (1.0 - 1e-7)).max(0.0);
    let solution = match outcome {
        SolveOutcome::Solution(solution) => solution,
        SolveOutcome::Interrupted(interrupted) => {
            let bound = safe(interrupted.stats().best_bound);
            return Outcome::Bounded(ProgramSolution { bound, counts: None });
        }
    };
    let count_of = |(placement, variable): &(BlockPlacement, Variable)| {
        let count = solution.var_value(*variable).round() as usize;
        (count > 0).then_some((*placement, count))
    };
    let of_class = |placements: &Vec<(BlockPlacement, Variable)>| placements.iter().filter_map(count_of).collect();
    let of_region = |classes: &Vec<Vec<(BlockPlacement, Variable)>>| classes.iter().map(of_class).collect();
    let counts = variables.iter().map(of_region).collect();
    Outcome::Bounded(ProgramSolution { bound: safe(solution.stats().best_bound), counts: Some(counts) })
}

impl<'a> IntegerProgram<'a> {
    fn new(problem: &'a Problem, goal: &'a Goal, regions: &'a [Region], allowed: &[Vec<BlockPlacement>]) -> Self {
        let mut model = LinearModel::new();
        let mut counts = Vec::new();
        for region in regions {
            let classes = region.classes.iter().map(|class| {
                let variables: Vec<(BlockPlacement, Variable)> = allowed[class[0]]
                    .iter()
                    .map(|placement| (*placement, model.integer_variable(class.len())))
                    .collect();
                let all = LinearExpr::sum(variables.iter().map(|(_, variable)| *variable));
                model.equal(&all, class.len() as f64);
                variables
            });
            counts.push(classes.collect());
        }
        let largest = problem.blocks.iter().map(|block| block.kv_bytes).max().unwrap_or(0);
        let largest = (0..problem.blocks.len()).map(|i| problem.weight_bytes(i)).fold(largest, u64::max);
        IntegerProgram { problem, goal, regions, model, counts, memory_unit: (largest as f64 / 64.0).max(1.0) }
    }

    /// Unit of the objective, weighted milliseconds: 1/64 of the slowest finite placement without streaming.
    fn objective_unit(&self) -> f64 {
        let places = || std::iter::once(Placement::Cpu).chain((0..self.problem.gpus.len()).map(Placement::Resident));
        let slowest_ms = |block: usize, phase: Phase| {
            let ms = places().map(|place| self.problem.phase_ms(block, place, phase));
            ms.filter(|ms| ms.is_finite()).fold(0.0, f64::max)
        };
        let mut objective = 0.0;
        for phase in self.goal.phases() {
            let blocks_ms: f64 = (0..self.problem.blocks.len()).map(|block| slowest_ms(block, phase)).sum();
            let overhead_ms = self.problem.pass_overhead_ms * self.problem.passes(phase) as f64;
            objective += self.goal.weights[phase as usize] * (blocks_ms + overhead_ms);
        }
        if objective > 0.0 { objective / 64.0 } else { 1.0 }
    }

    /// Number of blocks of a class with a selected block placement.
    fn count(&self, region: usize, class: usize, selects: impl Fn(BlockPlacement) -> bool) -> LinearExpr {
        let selected = self.counts[region][class].iter().filter(|(placement, _)| selects(*placement));
        LinearExpr::sum(selected.map(|(_, variable)| *variable))
    }

    /// All classes, as (region, class).
    fn classes(&self) -> Vec<(usize, usize)> {
        let of_region = |region: usize| (0..self.regions[region].classes.len()).map(move |class| (region, class));
        (0..self.regions.len()).flat_map(of_region).collect()
    }

    /// The minimum of a number over the blocks of a class.
    fn min_of_class(&self, region: usize, class: usize, number: impl Fn(usize) -> f64) -> f64 {
        self.regions[region].classes[class].iter().map(|i| number(*i)).fold(f64::INFINITY, f64::min)
    }

    /// Places that at least one block may have in a phase, sorted.
    fn places(&self, phase: Phase) -> Vec<Placement> {
        let all = self.counts.iter().flatten().flatten().map(|(placement, _)| placement.in_phase(phase));
        let places: std::collections::BTreeSet<Placement> = all.collect();
        places.into_iter().collect()
    }
}
