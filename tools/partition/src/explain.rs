//! Explains a solution: the cost of each run in other placements, and the bottleneck of each phase.

use crate::plan::slots_to_try;
use crate::{
    BlockPlacement, DeviceId, Mechanisms, Options, OverBudget, Phase, Placement, Planner, Problem, Simulation,
    Solution, evaluate, fits, simulate,
};
use hpp_schema::SpanKind;
use std::fmt;
use std::ops::Range;

/// A resource is the bottleneck if it is busy at least this share of the time.
const BUSY_SHARE: f64 = 0.99;

/// One run of neighbours with the same block placement.
#[derive(Clone, Debug, PartialEq)]
pub struct RunExplanation {
    /// Blocks, by position.
    pub blocks: Range<usize>,
    /// Their block placement.
    pub placement: BlockPlacement,
    /// The objective with this run at each other place and everything else unchanged.
    pub elsewhere: Vec<Alternative>,
}

/// A run at another place.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// The place, in both phases.
    pub place: Placement,
    /// The slots of each GPU.
    pub slots: Vec<u32>,
    /// The objective, milliseconds.
    pub objective_ms: f64,
    /// The budget that it exceeds there; `None` if it fits.
    pub over_budget: Option<OverBudget>,
}

/// The bottleneck of a phase: the resource that is always busy, or else the one that takes the largest part of the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// Computing on this device.
    Compute(DeviceId),
    /// The link to this GPU.
    Link(usize),
    /// Reading weights or KV caches from disk.
    Disk,
    /// Launching partitions, crossings between devices, and the overhead of a pass.
    Overhead,
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bottleneck::Compute(place) => write!(f, "compute on {place}"),
            Bottleneck::Link(gpu) => write!(f, "copies to gpu{gpu}"),
            Bottleneck::Disk => f.write_str("reading from disk"),
            Bottleneck::Overhead => f.write_str("overhead of starting partitions and of crossings"),
        }
    }
}

/// Computes [`Problem::cuts`] of a placement.
pub type FindCuts<'a> = &'a dyn Fn(&[BlockPlacement]) -> Vec<usize>;

/// Evaluates each run of neighbours with one block placement at every other place, with the cuts that `cuts` finds for it. Plans nothing. Blocks that
/// the user assigned or keeps on the host are in runs of their own.
pub fn explain_runs(problem: &Problem, options: &Options, solution: &Solution, cuts: FindCuts) -> Vec<RunExplanation> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let constraint = |block: usize| (problem.blocks[block].kept_on_host, problem.blocks[block].assigned.is_some());
    let like = |a: usize, b: usize| solution.placements[a] == solution.placements[b] && constraint(a) == constraint(b);
    for i in 0..solution.placements.len() {
        match runs.last_mut() {
            Some(run) if like(run.start, i) => run.end = i + 1,
            _ => runs.push(i..i + 1),
        }
    }
    let explained = |blocks: Range<usize>| RunExplanation {
        placement: solution.placements[blocks.start],
        elsewhere: alternatives(problem, options, solution, &blocks, cuts),
        blocks,
    };
    runs.into_iter().map(explained).collect()
}

/// Every other place that can compute the whole run, whether or not it fits there. Blocks that need a GPU are not compared with the host.
fn alternatives(
    problem: &Problem,
    options: &Options,
    solution: &Solution,
    run: &Range<usize>,
    cuts: FindCuts,
) -> Vec<Alternative> {
    let mechanisms = match options.planner {
        Planner::Exact => options.mechanisms,
        Planner::Greedy => Mechanisms::ResidentCpu,
    };
    let others = problem.possible_placements(run.start, mechanisms).into_iter();
    let others = others
        .filter(|placement| placement.prefill == placement.decode && *placement != solution.placements[run.start]);
    let allowed = |block: usize, placement: &BlockPlacement| {
        let needs_gpu = problem.blocks[block].needs_gpu && placement.computes_on_host();
        !needs_gpu && problem.possible_placements(block, mechanisms).contains(placement)
    };
    let possible = |placement: &BlockPlacement| run.clone().all(|block| allowed(block, placement));
    let alternative = |placement: BlockPlacement| {
        let mut placements = solution.placements.clone();
        placements[run.clone()].fill(placement);
        let with_cuts = Problem { cuts: cuts(&placements), ..problem.clone() };
        let with_slots = |slots: Vec<u32>| {
            let over_budget = fits(&with_cuts, &placements, &slots, options.mechanisms).err();
            let objective_ms = evaluate(&with_cuts, options, placements.clone(), slots.clone()).objective_ms;
            Alternative { place: placement.decode, slots, objective_ms, over_budget }
        };
        let all: Vec<Alternative> =
            possible_slots(problem, options, solution, placement).into_iter().map(with_slots).collect();
        let fastest = all.iter().filter(|one| one.over_budget.is_none());
        let fastest = fastest.min_by(|a, b| a.objective_ms.total_cmp(&b.objective_ms));
        // The first has the fewest slots.
        fastest.or(all.first()).cloned()
    };
    others.filter(possible).filter_map(alternative).collect()
}

/// The slots of each GPU with which a run can be placed so: those of the solution, and for a GPU that has none yet each number that the planner
/// tries, the smallest first.
fn possible_slots(
    problem: &Problem,
    options: &Options,
    solution: &Solution,
    placement: BlockPlacement,
) -> Vec<Vec<u32>> {
    let Placement::Streamed(gpu) = placement.decode else { return vec![solution.slots.clone()] };
    if solution.slots[gpu] > 0 {
        return vec![solution.slots.clone()];
    }
    let mut numbers: Vec<u32> = slots_to_try(problem, options).into_iter().map(|slots| slots[gpu]).collect();
    numbers.sort_unstable();
    let with = |number: u32| {
        let mut slots = solution.slots.clone();
        slots[gpu] = number;
        slots
    };
    numbers.into_iter().map(with).collect()
}

/// The bottleneck of a phase of this solution.
pub fn bottleneck(problem: &Problem, solution: &Solution, phase: Phase) -> Bottleneck {
    let simulation = simulate(problem, &solution.placements, &solution.slots, phase);
    let window = simulation.timeline.spans.iter().map(|s| s.start_us + s.duration_us).fold(0.0, f64::max);
    let transfers_us = |lane: &str| -> f64 {
        let on = simulation.timeline.spans.iter().filter(|span| span.lane == lane && span.kind == SpanKind::Transfer);
        on.map(|span| span.duration_us).sum()
    };
    let busy = |lane: &str| if window > 0.0 { transfers_us(lane) / window } else { 0.0 };
    if busy("disk") >= BUSY_SHARE {
        return Bottleneck::Disk;
    }
    let busy_link = (0..problem.gpus.len()).find(|gpu| busy(&format!("to gpu{gpu}")) >= BUSY_SHARE);
    match busy_link {
        Some(gpu) => Bottleneck::Link(gpu),
        None => largest_part(&simulation, busiest_transfer(problem.gpus.len(), transfers_us)),
    }
}

/// The disk or the link that transfers longest; `None` if nothing is transferred. `transfers_us` has the transfer time of
/// each lane.
fn busiest_transfer(gpus: usize, transfers_us: impl Fn(&str) -> f64) -> Option<Bottleneck> {
    let links = (0..gpus).map(|gpu| {
        let both = [format!("to gpu{gpu}"), format!("from gpu{gpu}")].map(|lane| transfers_us(&lane));
        (Bottleneck::Link(gpu), both.iter().sum::<f64>())
    });
    let all = links.chain([(Bottleneck::Disk, transfers_us("disk"))]).filter(|(_, us)| *us > 0.0);
    all.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(bottleneck, _)| bottleneck)
}

/// The resource that takes the largest part of the time. The time in which blocks wait for weights counts as time of
/// `transfer`.
fn largest_part(simulation: &Simulation, transfer: Option<Bottleneck>) -> Bottleneck {
    let gpus = simulation.gpu_ms.iter().enumerate();
    let mut parts: Vec<(Bottleneck, f64)> =
        gpus.map(|(gpu, ms)| (Bottleneck::Compute(DeviceId::Gpu(gpu)), *ms)).collect();
    parts.push((Bottleneck::Compute(DeviceId::Cpu), simulation.cpu_ms));
    let known: f64 = parts.iter().map(|(_, ms)| ms).sum::<f64>() + simulation.stall_ms;
    parts.push((Bottleneck::Overhead, (simulation.ms - known).max(0.0)));
    parts.extend(transfer.map(|transfer| (transfer, simulation.stall_ms)));
    parts.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(Bottleneck::Overhead, |(bottleneck, _)| bottleneck)
}
