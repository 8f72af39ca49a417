//! `--at-least` and `--first-token-within`: finds a plan that meets these targets, or reports the best achievable speed
//! and the VRAM that would suffice.

use crate::amount::{self, MEASURED};
use crate::choose::{Chosen, PlanInputs};
use crate::cli::SplitArgs;
use crate::error::SplitError;
use crate::input_errors::{InputError, InputErrors};
use crate::partitioning::{Partitioning, place_blocks};
use crate::predicted::PredictedTimes;
use crate::request::{LEAST_CHUNK, PlanningRequest, default_margin};
use hpp_partition::{DeviceId, Objective, plan};
use hpp_schema::ByteSize;

/// The targets; `None` where not given.
#[derive(Clone, Copy, Debug)]
struct Targets {
    min_tokens_per_s: Option<f64>,
    max_first_token_ms: Option<f64>,
}

impl Targets {
    fn are_met_by(self, times: PredictedTimes) -> bool {
        self.min_tokens_per_s.is_none_or(|target| times.tokens_per_s() >= target)
            && self.max_first_token_ms.is_none_or(|target| times.prefill_ms <= target)
    }
}

/// Returns the partitioning if it meets the targets, else one for another objective that does, else an error with numbers.
pub fn enforce(
    request: &mut PlanningRequest,
    inputs: &PlanInputs,
    partitioning: Partitioning,
) -> Result<Partitioning, SplitError> {
    let planning = &inputs.args.planning;
    let targets = Targets { min_tokens_per_s: planning.at_least, max_first_token_ms: planning.first_token_within };
    let mut tried = vec![(request.options.objective, PredictedTimes::of(&partitioning.solution))];
    if targets.are_met_by(tried[0].1) {
        return Ok(partitioning);
    }
    if partitioning.is_manual() {
        return Err(refusal(request, targets, &tried).into());
    }
    for objective in [Objective::Mixed, Objective::Decode, Objective::Prefill] {
        if tried.iter().any(|(known, _)| *known == objective) {
            continue;
        }
        let Chosen { request: other, partitioning, .. } = for_objective(request, inputs, objective)?;
        *request = other;
        let times = PredictedTimes::of(&partitioning.solution);
        if targets.are_met_by(times) {
            tell!(
                "note: planned for the objective {} instead of {}, which misses a target",
                name(objective),
                name(tried[0].0)
            );
            return Ok(partitioning);
        }
        tried.push((objective, times));
    }
    if let Some(Chosen { request: other, partitioning, .. }) = with_shorter_passes(request, inputs, targets, &mut tried)
    {
        tell!(
            "note: planned with passes of {} tokens, because longer ones miss a target",
            other.scenario.prefill_chunk
        );
        *request = other;
        return Ok(partitioning);
    }
    Err(refusal(request, targets, &tried).into())
}

/// A plan for the fastest first token that meets the targets with shorter passes than the planner takes by itself. Where memory is not
/// short, the planner takes the longest passes, although several passes over a long prompt compute less attention.
fn with_shorter_passes(
    request: &PlanningRequest,
    inputs: &PlanInputs,
    targets: Targets,
    tried: &mut Vec<(Objective, PredictedTimes)>,
) -> Option<Chosen> {
    let first = tried.iter().map(|(_, times)| times.prefill_ms).fold(f64::INFINITY, f64::min);
    if inputs.args.planning.refine.is_some() || targets.max_first_token_ms.is_none_or(|target| first <= target) {
        return None;
    }
    let change = |args: &mut SplitArgs| args.planning.objective = Objective::Prefill.into();
    PlanInputs { alternative: None, ..*inputs }.with_settings(change, |inputs| {
        let lengths: Vec<u64> = request.shorter_passes(LEAST_CHUNK).collect();
        let plans = lengths.into_iter().filter_map(|length| inputs.plan_with_passes_of(length).ok());
        plans.into_iter().find(|chosen| {
            let times = PredictedTimes::of(&chosen.partitioning.solution);
            tried.push((Objective::Prefill, times));
            targets.are_met_by(times)
        })
    })
}

/// The plan for another objective, with the costs that `--refine` measured, if that option was given.
fn for_objective(request: &PlanningRequest, inputs: &PlanInputs, objective: Objective) -> Result<Chosen, SplitError> {
    if inputs.args.planning.refine.is_some() {
        let mut request = request.clone();
        request.options.objective = objective;
        let partitioning = place_blocks(&request, inputs.args)?;
        return Ok(Chosen::new(request, partitioning));
    }
    let change = |args: &mut SplitArgs| args.planning.objective = objective.into();
    PlanInputs { alternative: None, ..*inputs }.with_settings(change, |inputs| inputs.choose())
}

fn refusal(request: &PlanningRequest, targets: Targets, tried: &[(Objective, PredictedTimes)]) -> InputErrors {
    let mut errors = InputErrors::default();
    let fastest = tried.iter().map(|(_, times)| times.tokens_per_s()).fold(0.0, f64::max);
    let first = tried.iter().map(|(_, times)| times.prefill_ms).fold(f64::INFINITY, f64::min);
    let missed_speed = targets.min_tokens_per_s.filter(|target| fastest < *target);
    let missed_latency = targets.max_first_token_ms.filter(|target| first > *target);
    // More host memory keeps weights there that are read from disk otherwise.
    let without_gpu = if request.may_be_short_of_memory() { HINT_RAM } else { HINT_NO_VRAM };
    let mut add = |what: String, targets: Targets, objective| {
        let (sufficient, hint) = match sufficient_vram(request, targets, objective) {
            Vram::NoGpu => ("the plan has no GPU".to_owned(), without_gpu),
            Vram::None => ("no VRAM budget is sufficient on this machine".to_owned(), HINT_NO_VRAM),
            Vram::Sufficient(bytes) => {
                (format!("{} of VRAM on each GPU is sufficient", ByteSize(bytes).human_rounded_up()), HINT)
            }
        };
        errors.0.push(InputError::new(format!("{what}; {sufficient}"), hint));
    };
    if let Some(target) = missed_speed {
        let what = format!(
            "--at-least {target} tokens/s is out of reach: the fastest plan is expected to reach {}",
            amount::digits_down(fastest, MEASURED)
        );
        add(what, Targets { max_first_token_ms: None, ..targets }, Objective::Decode);
    }
    if let Some(target) = missed_latency {
        let what = format!(
            "--first-token-within {target} ms is out of reach: the earliest is expected after {}",
            amount::time_up(first, MEASURED)
        );
        add(what, Targets { min_tokens_per_s: None, ..targets }, Objective::Prefill);
    }
    if missed_speed.is_none() && missed_latency.is_none() {
        let what = format!(
            "each target can be met alone, but no plan was found that meets both (best {} tokens/s, {})",
            amount::digits(fastest, MEASURED),
            amount::time(first, MEASURED)
        );
        add(what, targets, Objective::Mixed);
    }
    errors
}

const HINT: &str = "relax the target, raise --vram, or lower --prompt-tokens or --context";
const HINT_RAM: &str = "relax the target, raise --ram, or lower --prompt-tokens or --context";
const HINT_NO_VRAM: &str = "relax the target, or lower --prompt-tokens or --context";

/// The VRAM budget on each GPU with which a plan meets the targets.
enum Vram {
    NoGpu,
    /// None is sufficient.
    None,
    /// The smallest, bytes.
    Sufficient(u64),
}

/// The smallest VRAM budget with which a plan meets these targets.
fn sufficient_vram(request: &PlanningRequest, targets: Targets, objective: Objective) -> Vram {
    let problem = &request.problem;
    if problem.gpus.is_empty() {
        return Vram::NoGpu;
    }
    let whole: u64 = problem.blocks.iter().flat_map(|block| &block.weights).map(|(_, bytes)| bytes).sum();
    let rest: u64 = problem.blocks.iter().map(|block| block.kv_bytes + block.workspace_bytes).sum();
    let all = whole.saturating_add(rest).saturating_mul(2).max(1 << 30);
    let all = if request.default_margin { all } else { all.saturating_add(problem.budget.margin) };
    let meets = |vram| meets_with(request, targets, objective, vram);
    if !meets(all) {
        return Vram::None;
    }
    let sufficient = smallest(1 << 20, all, meets);
    let lacks = |gpu: usize| request.machine_memory(DeviceId::Gpu(gpu)).is_some_and(|memory| memory < sufficient);
    if (0..problem.gpus.len()).any(lacks) { Vram::None } else { Vram::Sufficient(sufficient) }
}

/// Whether a plan with this VRAM budget on each GPU meets the targets.
fn meets_with(request: &PlanningRequest, targets: Targets, objective: Objective, vram: u64) -> bool {
    let mut problem = request.problem.clone();
    problem.budget.vram.fill(vram);
    if request.default_margin {
        problem.budget.margin = default_margin(&problem.budget.vram);
    }
    let options = hpp_partition::Options { objective, ..request.options };
    plan(&problem, &options).is_ok_and(|solution| targets.are_met_by(PredictedTimes::of(&solution)))
}

/// Bisects for the smallest number in `low..=high` that `suffices`, to 1 %. Precondition: `high` suffices.
fn smallest(mut low: u64, mut high: u64, suffices: impl Fn(u64) -> bool) -> u64 {
    while high - low > high / 100 {
        let middle = low + (high - low) / 2;
        if suffices(middle) {
            high = middle;
        } else {
            low = middle;
        }
    }
    high
}

fn name(objective: Objective) -> &'static str {
    match objective {
        Objective::Decode => "decode",
        Objective::Prefill => "prefill",
        Objective::Mixed => "mixed",
        Objective::Throughput => "throughput",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bisection_is_close_to_the_smallest() {
        let found = smallest(0, 1 << 40, |n| n >= 123_456_789);
        assert!((123_456_789..123_456_789 + 123_456_789 / 50).contains(&found), "{found}");
    }
}
