//! From a placement to a complete plan that is not written yet.

use crate::error::SplitError;
use crate::experts::divide;
use crate::operators;
use crate::partitioning::Partitioning;
use crate::predicted::{PredictedTimes, round};
use crate::reason::reasons;
use crate::request::PlanningRequest;
use hpp_graph::{PartitionGraph, cut, join_for_state};
use hpp_model::{Analysis, Decision, assemble};
use hpp_partition::{
    Objective, PassTime, Phase, Problem, Solution, Throughput, bottleneck, evaluate, throughput, tokens_per_second,
};
use hpp_schema::{Achieved, ModelKind, ObjectiveKind, Plan, PredictedPass, PredictedThroughput, Predictions};

/// A plan that is not written yet.
pub struct UnwrittenPlan {
    /// Where blocks compute. Partitions are joined where a cut between them would divide a state.
    pub partitioning: Partitioning,
    /// The parts of the graph, one for each partition.
    pub parts: Vec<PartitionGraph>,
    /// The plan.
    pub plan: Plan,
}

/// Cuts the model as placed and assembles the plan. `source` says where the costs come from.
pub fn unwritten_plan(
    request: &PlanningRequest,
    analysis: &Analysis,
    partitioning: Partitioning,
    source: String,
) -> Result<UnwrittenPlan, SplitError> {
    let (partitioning, parts) = cut_around_states(request, analysis, partitioning)?;
    partitioning.check(request)?;
    operators::check_host(analysis, &partitioning, &parts, request.allow_unknown_operators)?;
    let divided = divide(request, analysis, &partitioning, parts)?;
    let reasons = reasons(request, &partitioning);
    let throughput = predicted_throughput(request, analysis.kind, &partitioning);
    let plan = assemble(&Decision {
        analysis,
        blocks: &request.single().blocks,
        partitions: &divided.specs,
        mixtures: &divided.mixtures,
        segmentation: &divided.segmentation,
        slots: &partitioning.solution.slots,
        providers: &request.providers,
        movable: request.movable,
        disk: partitioning.disk_streaming(request).map(|disk| divided.disk_streaming(disk)),
        packing: request.problem.budget.packing,
        compress_permille: request.compress_permille,
        heap: request.heap,
        session_creation: partitioning.session_creation(request),
        budgets: request.recorded_budgets.clone(),
        kv: request.problem.budget.kv,
        host_kv_on_disk: request.problem.budget.host_kv_on_disk,
        parts: &divided.parts,
        scenario: request.scenario,
        reasons: divided.origins.iter().map(|origin| reasons[*origin].clone()).collect(),
        decode_tokens: throughput.as_ref().map_or(1, |throughput| throughput.decode_tokens),
        predictions: predictions(request, &partitioning, throughput, source),
    });
    Ok(UnwrittenPlan { partitioning, parts: divided.parts, plan })
}

/// Cuts, and joins partitions as long as one of them reads a state of another.
fn cut_around_states(
    request: &PlanningRequest,
    analysis: &Analysis,
    mut partitioning: Partitioning,
) -> Result<(Partitioning, Vec<PartitionGraph>), SplitError> {
    loop {
        let groups: Vec<_> = partitioning.partitions.iter().map(|partition| partition.blocks.clone()).collect();
        let parts = cut(&analysis.graph, &analysis.segmentation, &groups).map_err(|e| SplitError::Cut(Box::new(e)))?;
        match join_for_state(&analysis.segmentation, &parts) {
            Some(index) => partitioning = partitioning.join_with_next(index, request),
            None => return Ok((partitioning, parts)),
        }
    }
}

/// What the partitions give with several sequences, if the model can run them. In a pass of several sequences each sequence has tensors of its own:
/// times of tensors with several rows say nothing about that.
pub fn predicted_throughput(
    request: &PlanningRequest,
    kind: ModelKind,
    partitioning: &Partitioning,
) -> Option<Throughput> {
    (kind == ModelKind::Decoder && request.scenario.batch == 1).then(|| throughput_of(request, partitioning))
}

/// What the partitions give with several sequences.
pub fn throughput_of(request: &PlanningRequest, partitioning: &Partitioning) -> Throughput {
    let single = partitioning.single_problem(request);
    let planned = request.problem.load.sequences / single.load.sequences.max(1);
    let Solution { placements, slots, .. } = &partitioning.solution;
    let predicted = throughput(&single, planned, &request.options, &partitioning.solution);
    if !partitioning.is_measured {
        return predicted;
    }
    let simulated = evaluate(&single, &request.options, placements.clone(), slots.clone());
    scaled(predicted, &single, &PredictedTimes::of(&simulated), &PredictedTimes::of(&partitioning.solution))
}

/// Times as much longer as those of one sequence were measured than simulated.
fn scaled(
    throughput: Throughput,
    single: &Problem,
    simulated: &PredictedTimes,
    measured: &PredictedTimes,
) -> Throughput {
    let longer = measured.decode_ms / simulated.decode_ms;
    let rate = |times: &PredictedTimes| tokens_per_second(single, times.prefill_ms, times.decode_ms);
    let passes = throughput.passes.into_iter().map(|pass| PassTime { ms: pass.ms * longer, ..pass });
    Throughput {
        passes: passes.collect(),
        tokens_per_second: throughput.tokens_per_second * rate(measured) / rate(simulated),
        ..throughput
    }
}

/// The plan's predictions, rounded to four significant digits.
fn predictions(
    request: &PlanningRequest,
    partitioning: &Partitioning,
    throughput: Option<Throughput>,
    source: String,
) -> Predictions {
    let objective = request.options.objective;
    let (planned, times) = (PredictedTimes::of(&partitioning.solution), partitioning.times_alone(request));
    let scenario = request.scenario;
    let achieved = || Achieved {
        kind: match objective {
            Objective::Decode => ObjectiveKind::Decode,
            Objective::Prefill => ObjectiveKind::Prefill,
            Objective::Mixed => ObjectiveKind::Mixed,
            Objective::Throughput => ObjectiveKind::Throughput,
        },
        ms: round(planned.objective_ms(objective, &request.problem.load)),
        bound_ms: round(partitioning.solution.bound_ms),
        proven: partitioning.solution.proven,
    };
    Predictions {
        source,
        decode_ms: round(times.decode_ms),
        time_to_first_token_ms: round(times.prefill_ms),
        prompt_tokens: scenario.prompt,
        decode_tokens_per_second: round(times.tokens_per_s()),
        decode_context: scenario.decode_context(),
        new_tokens: scenario.new_tokens,
        limit: Some(bottlenecks(request, partitioning)),
        objective: (!partitioning.is_manual()).then(achieved),
        throughput: throughput.as_ref().map(recorded_throughput),
    }
}

fn recorded_throughput(throughput: &Throughput) -> PredictedThroughput {
    let pass = |pass: &PassTime| PredictedPass { sequences: pass.sequences, tokens: pass.tokens, ms: round(pass.ms) };
    PredictedThroughput {
        sequences: throughput.sequences,
        tokens_per_second: round(throughput.tokens_per_second),
        free_sequences: throughput.free_sequences,
        passes: throughput.passes.iter().map(pass).collect(),
    }
}

/// The bottleneck of each phase: the resource that is busy longest.
fn bottlenecks(request: &PlanningRequest, partitioning: &Partitioning) -> String {
    let problem = partitioning.problem(request);
    let [decode, prefill] =
        [Phase::Decode, Phase::Prefill].map(|phase| bottleneck(&problem, &partitioning.solution, phase).to_string());
    if decode == prefill { decode } else { format!("{decode} while decoding, {prefill} in the prompt") }
}
