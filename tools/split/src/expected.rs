//! What a plan is expected to give: the numbers that its predictions record, before they are rounded.

use crate::partitioning::Partitioning;
use crate::predicted::PredictedTimes;
use crate::request::PlanningRequest;
use crate::unwritten_plan::predicted_throughput;
use hpp_partition::{Objective, Throughput};
use hpp_schema::ModelKind;

/// What a plan is expected to give.
pub struct Expected {
    /// Times of one sequence alone.
    pub alone: PredictedTimes,
    /// Milliseconds of its whole answer.
    pub answer_ms: f64,
    /// What all sequences give together, for the throughput objective.
    pub throughput: Option<Throughput>,
    /// The time that the objective minimises, milliseconds; for throughput, the time per token.
    pub objective_ms: f64,
    /// Tokens of the longest pass of a prompt.
    pub longest_pass: u64,
}

impl Expected {
    /// What a placement of a model is expected to give.
    pub fn of(request: &PlanningRequest, kind: ModelKind, partitioning: &Partitioning) -> Self {
        let alone = partitioning.times_alone(request);
        let is_for_many = request.options.objective == Objective::Throughput && !partitioning.is_manual();
        let throughput = is_for_many.then(|| predicted_throughput(request, kind, partitioning)).flatten();
        let rate = throughput.as_ref().map(|throughput| throughput.tokens_per_second).filter(|rate| *rate > 0.0);
        let ms_per_token = rate.map(|rate| 1e3 / rate);
        Expected {
            alone,
            answer_ms: request.single().load.answer_ms(alone.prefill_ms, alone.decode_ms),
            throughput,
            objective_ms: ms_per_token.unwrap_or(partitioning.solution.objective_ms),
            longest_pass: request.scenario.prefill_chunk,
        }
    }
}
