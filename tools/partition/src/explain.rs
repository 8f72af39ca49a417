//! Why a solution is as it is: what each run would cost elsewhere, what more memory would change, what limits it.

use crate::plan::plan_from;
use crate::{
    Choice, Mechanisms, NoFit, Options, Phase, Place, Planner, Problem, Simulation, Solution, Where, fits, judge,
    simulate,
};
use hpp_schema::SpanKind;
use std::fmt;
use std::ops::Range;

const GIB: u64 = 1 << 30;
/// Busy this part of the time is busy all the time.
const ALWAYS: f64 = 0.99;
/// Slots that are assumed where something is streamed for the first time.
const SLOTS: u32 = 3;
/// A change smaller than this part of the objective is none.
const NONE: f64 = 1e-6;

/// Why a solution is as it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// Runs of neighbours with one choice, in the order of blocks.
    pub runs: Vec<RunExplanation>,
    /// What one more GiB on each GPU would change; absent where the planner then refuses, too.
    pub more_vram: Vec<Option<Change>>,
    /// What one more GiB of host memory would change; absent where host memory has no limit.
    pub more_ram: Option<Change>,
    /// What decides the time of a decoded token.
    pub decode: Limit,
    /// What decides the time to the first token.
    pub prefill: Limit,
    /// Memories of which one more GiB would make the objective smaller.
    pub scarce: Vec<Place>,
}

/// One run of neighbours with the same choice.
#[derive(Clone, Debug, PartialEq)]
pub struct RunExplanation {
    /// Blocks, by position.
    pub blocks: Range<usize>,
    /// Where they compute.
    pub choice: Choice,
    /// What the objective would be with this run elsewhere and everything else as it is.
    pub elsewhere: Vec<Elsewhere>,
}

/// A run moved.
#[derive(Clone, Debug, PartialEq)]
pub struct Elsewhere {
    /// To where, in both phases.
    pub place: Where,
    /// The objective then, milliseconds.
    pub objective_ms: f64,
    /// Why it cannot be there, where it cannot.
    pub no_fit: Option<NoFit>,
}

/// What changes when a limit or a wish does. Milliseconds; negative is faster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// Of one more token.
    pub decode_ms: f64,
    /// Of the time to the first token.
    pub prefill_ms: f64,
    /// Of the objective.
    pub objective_ms: f64,
}

/// What decides a time: what is busy all the time, or else what takes most of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Computing there.
    Compute(Place),
    /// The link to this GPU.
    Link(usize),
    /// Reading weights from disk.
    Disk,
    /// Starting partitions, crossing between devices, and what no partition bears.
    Overhead,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::Compute(place) => write!(f, "compute on {place}"),
            Limit::Link(gpu) => write!(f, "copies to gpu{gpu}"),
            Limit::Disk => f.write_str("reading from disk"),
            Limit::Overhead => f.write_str("overhead of starting partitions and of crossings"),
        }
    }
}

/// Explains a solution of this problem. What more memory would change is told against the best placement there is, where
/// the solution is one that no planner made; and, since another placement has other cuts, both are priced without any.
pub fn explain(problem: &Problem, options: &Options, solution: &Solution, cuts: Cuts) -> Explanation {
    let cut = problem;
    let problem = &Problem { cuts: Vec::new(), ..problem.clone() };
    let planned = match solution.bound_ms > 0.0 {
        true => Ok(judge(problem, options, solution.choices.clone(), solution.slots.clone())),
        false => plan_from(problem, options, &[solution]),
    };
    let planned = planned.unwrap_or_else(|_| solution.clone());
    let more_vram: Vec<Option<Change>> = (0..problem.budget.vram.len())
        .map(|gpu| {
            let mut more = problem.clone();
            more.budget.vram[gpu] = more.budget.vram[gpu].saturating_add(GIB);
            change(&planned, &more, options).ok()
        })
        .collect();
    let more_ram = problem.budget.ram.and_then(|ram| {
        let mut more = problem.clone();
        more.budget.ram = Some(ram.saturating_add(GIB));
        change(&planned, &more, options).ok()
    });
    let helps = |change: &Option<Change>| change.is_some_and(|c| c.objective_ms < -NONE * planned.objective_ms);
    let gpus = more_vram.iter().enumerate().filter(|(_, change)| helps(change)).map(|(gpu, _)| Place::Gpu(gpu));
    let scarce = gpus.chain(helps(&more_ram).then_some(Place::Cpu)).collect();
    let limit = |phase| limit(cut, solution, phase);
    Explanation {
        runs: explain_runs(cut, options, solution, cuts),
        decode: limit(Phase::Decode),
        prefill: limit(Phase::Prefill),
        more_vram,
        more_ram,
        scarce,
    }
}

/// What planning `other` (the same model with more memory, or another context) changes against `solution`.
pub fn change(solution: &Solution, other: &Problem, options: &Options) -> Result<Change, NoFit> {
    let new = plan_from(other, options, &[solution])?;
    Ok(Change {
        decode_ms: new.decode_ms - solution.decode_ms,
        prefill_ms: new.prefill_ms - solution.prefill_ms,
        objective_ms: new.objective_ms - solution.objective_ms,
    })
}

/// Where partitions begin beside changes of place, for given choices: [`Problem::cuts`] of another placement.
pub type Cuts<'a> = &'a dyn Fn(&[Choice]) -> Vec<usize>;

/// Each run of neighbours with one choice, and what it would cost elsewhere, cut as it would be then. Judges only; plans
/// nothing.
pub fn explain_runs(problem: &Problem, options: &Options, solution: &Solution, cuts: Cuts) -> Vec<RunExplanation> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (i, choice) in solution.choices.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if solution.choices[run.start] == *choice => run.end = i + 1,
            _ => runs.push(i..i + 1),
        }
    }
    let explained = |blocks: Range<usize>| RunExplanation {
        choice: solution.choices[blocks.start],
        elsewhere: elsewhere(problem, options, solution, &blocks, cuts),
        blocks,
    };
    runs.into_iter().map(explained).collect()
}

/// Every other place the whole run could be in, whether or not it fits there.
fn elsewhere(
    problem: &Problem,
    options: &Options,
    solution: &Solution,
    run: &Range<usize>,
    cuts: Cuts,
) -> Vec<Elsewhere> {
    let mechanisms = match options.planner {
        Planner::Exact => options.mechanisms,
        Planner::Greedy => Mechanisms::ResidentCpu,
    };
    let everywhere = problem.choices(run.start, mechanisms).into_iter();
    let places = everywhere.filter(|choice| choice.prefill == choice.decode && *choice != solution.choices[run.start]);
    let possible = |choice: &Choice| run.clone().all(|i| problem.choices(i, mechanisms).contains(choice));
    let moved = |choice: Choice| {
        let mut choices = solution.choices.clone();
        choices[run.clone()].fill(choice);
        let mut slots = solution.slots.clone();
        if let Where::Streamed(gpu) = choice.decode {
            slots[gpu] = if slots[gpu] == 0 { options.slots.unwrap_or(SLOTS) } else { slots[gpu] };
        }
        let problem = Problem { cuts: cuts(&choices), ..problem.clone() };
        let no_fit = fits(&problem, &choices, &slots, options.mechanisms).err();
        let objective_ms = judge(&problem, options, choices, slots).objective_ms;
        Elsewhere { place: choice.decode, objective_ms, no_fit }
    };
    places.filter(possible).map(moved).collect()
}

/// What decides the time of a phase of this solution.
pub fn limit(problem: &Problem, solution: &Solution, phase: Phase) -> Limit {
    let simulation = simulate(problem, &solution.choices, &solution.slots, phase);
    let window = simulation.timeline.spans.iter().map(|s| s.start_us + s.duration_us).fold(0.0, f64::max);
    let busy = |lane: &str| {
        let on = simulation.timeline.spans.iter().filter(|span| span.lane == lane && span.kind == SpanKind::Transfer);
        let us: f64 = on.map(|span| span.duration_us).sum();
        if window > 0.0 { us / window } else { 0.0 }
    };
    if busy("disk") >= ALWAYS {
        return Limit::Disk;
    }
    let always = (0..problem.gpus.len()).find(|gpu| busy(&format!("to gpu{gpu}")) >= ALWAYS);
    match always {
        Some(gpu) => Limit::Link(gpu),
        None => longest(&simulation),
    }
}

/// What takes most of the time of the chain.
fn longest(simulation: &Simulation) -> Limit {
    let gpus = simulation.gpu_ms.iter().enumerate();
    let mut parts: Vec<(Limit, f64)> = gpus.map(|(gpu, ms)| (Limit::Compute(Place::Gpu(gpu)), *ms)).collect();
    parts.push((Limit::Compute(Place::Cpu), simulation.cpu_ms));
    let known: f64 = parts.iter().map(|(_, ms)| ms).sum::<f64>() + simulation.stall_ms;
    parts.push((Limit::Overhead, (simulation.ms - known).max(0.0)));
    // Waiting is the link's doing.
    let link = simulation.transfer_ms.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    parts.extend(link.map(|(gpu, _)| (Limit::Link(gpu), simulation.stall_ms)));
    parts.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(Limit::Overhead, |(limit, _)| limit)
}
