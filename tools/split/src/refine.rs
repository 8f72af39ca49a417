//! `--refine N`: runs N tokens of the best few plans on this machine, corrects the cost model with the measured times,
//! and repeats until the plan that is then predicted to be best has been measured. Keeps the fastest measured plan.

mod bench;
mod feedback;

use crate::cli::SplitArgs;
use crate::error::{RefineError, SplitError};
use crate::partitioning::{DecidedBy, Partitioning, over_budget};
use crate::predicted::{PredictedTimes, round};
use crate::request::PlanningRequest;
use crate::unwritten_plan::{UnwrittenPlan, unwritten_plan};
use bench::{BenchResult, BenchRunner};
use feedback::CostFeedback;
use hpp_model::{Analysis, PartitionSpec};
use hpp_partition::{BlockPlacement, best, plan};
use serde::Serialize;
use std::path::Path;

/// Plans measured before the first correction of the cost model is used to plan again.
const INITIAL_PLANS: usize = 3;
/// Upper limit on the number of measured plans.
const MAX_PLANS: usize = 10;

/// Predicted and measured times of a plan that was run, for the table and JSON.
#[derive(Clone, Debug, Serialize)]
pub struct TrialRun {
    /// Blocks and their devices, as in the table.
    pub placement: String,
    /// Whether this is the plan that was kept.
    pub kept: bool,
    /// Milliseconds per token: predicted, measured.
    pub decode_ms: [f64; 2],
    /// Milliseconds to the first token: predicted, measured.
    pub time_to_first_token_ms: [f64; 2],
}

/// Returns the fastest measured plan, with its measured times as predictions, and all measured plans. Afterwards
/// `request` holds the corrected costs.
pub fn refine(
    request: &mut PlanningRequest,
    args: &SplitArgs,
    analysis: &Analysis,
    tokens: u64,
    out_dir: &Path,
) -> Result<(Partitioning, Vec<TrialRun>), SplitError> {
    let bench = BenchRunner::new(request, tokens, out_dir)?;
    let mut trials = Trials { args, analysis, bench, done: Vec::new() };
    let mut feedback = CostFeedback::default();
    let mut queue =
        best(&request.problem, &request.options, INITIAL_PLANS).map_err(over_budget(request, DecidedBy::Planner))?;
    queue.reverse();
    while trials.done.len() < MAX_PLANS {
        let next = match queue.pop() {
            Some(solution) => solution,
            None => plan(&request.problem, &request.options).map_err(over_budget(request, DecidedBy::Planner))?,
        };
        if trials.contains(&next.placements) {
            if queue.is_empty() {
                break;
            }
            continue;
        }
        let partitioning = Partitioning::new(request, args.partitions, next, DecidedBy::Planner);
        let trial = trials.measure(request, partitioning)?;
        feedback.correct(&mut request.problem, &trial.partitioning, &trial.measured);
    }
    trials.into_fastest(request)
}

/// A plan that was run.
struct Trial {
    partitioning: Partitioning,
    predicted: PredictedTimes,
    measured: BenchResult,
}

/// All plans that were run.
struct Trials<'a> {
    args: &'a SplitArgs,
    analysis: &'a Analysis,
    bench: BenchRunner,
    done: Vec<Trial>,
}

impl Trials<'_> {
    fn contains(&self, placements: &[BlockPlacement]) -> bool {
        self.done.iter().any(|trial| trial.partitioning.solution.placements == placements)
    }

    fn measure(&mut self, request: &PlanningRequest, partitioning: Partitioning) -> Result<&Trial, SplitError> {
        let UnwrittenPlan { partitioning, parts, plan } =
            unwritten_plan(request, self.analysis, partitioning, String::new())?;
        let predicted = PredictedTimes::of(&partitioning.solution);
        tell!("running plan {}: {}", self.done.len() + 1, describe(request, &partitioning));
        let measured = self.bench.run(self.args, self.analysis, &parts, plan)?;
        let (decode_ms, prefill_ms) = (measured.times.decode_ms, measured.times.prefill_ms);
        tracing::info!(plan = self.done.len() + 1, decode_ms, prefill_ms, ?predicted, "plan measured");
        if let Some(percent) = measured.others_cpu_percent {
            tell!(
                "warning: other processes took at least {percent} % of the CPU time both times this plan ran, so its times cannot be \
                 compared; use --refine on an idle machine"
            );
        }
        self.done.push(Trial { partitioning, predicted, measured });
        Ok(&self.done[self.done.len() - 1])
    }

    fn into_fastest(self, request: &PlanningRequest) -> Result<(Partitioning, Vec<TrialRun>), SplitError> {
        let objective_ms =
            |trial: &Trial| trial.measured.times.objective_ms(request.options.objective, &request.problem.load);
        let by_objective = |a: &usize, b: &usize| objective_ms(&self.done[*a]).total_cmp(&objective_ms(&self.done[*b]));
        let kept = (0..self.done.len()).min_by(by_objective).unwrap_or(0);
        let rows = self.done.iter().enumerate().map(|(at, Trial { partitioning, predicted, measured })| TrialRun {
            placement: describe(request, partitioning),
            kept: at == kept,
            decode_ms: [round(predicted.decode_ms), round(measured.times.decode_ms)],
            time_to_first_token_ms: [round(predicted.prefill_ms), round(measured.times.prefill_ms)],
        });
        let rows = rows.collect();
        let fastest = self.done.into_iter().nth(kept);
        let Trial { partitioning, measured, .. } =
            fastest.ok_or_else(|| RefineError::Failed("no plan was run".to_owned()))?;
        Ok((partitioning.with_measured_times(request, measured.times), rows))
    }
}

/// `cpu: embedding, layers.0-1 (3 partitions); gpu0: layers.2-3, head`.
fn describe(request: &PlanningRequest, partitioning: &Partitioning) -> String {
    let neighbours = partitioning.partitions.chunk_by(|one, next| one.placement.decode == next.placement.decode);
    let describe_run = |run: &[PartitionSpec]| {
        let blocks = run.iter().flat_map(|partition| &request.problem.blocks[partition.blocks.clone()]);
        let blocks = crate::table::blocks(&blocks.map(|block| block.label.clone()).collect::<Vec<_>>());
        let count = if run.len() > 1 { format!(" ({} partitions)", run.len()) } else { String::new() };
        format!("{}: {blocks}{count}", run[0].placement.decode)
    };
    neighbours.map(describe_run).collect::<Vec<_>>().join("; ")
}
