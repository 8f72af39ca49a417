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
    /// The share of `objective_ms` by which a better plan may be faster ([`hpp_partition::Solution::gap`]).
    pub gap: f64,
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
            gap: partitioning.solution.gap(),
            longest_pass: request.scenario.prefill_chunk,
        }
    }

    /// [`gap`](Self::gap) if the plan `then` gains less: the search may have missed a plan as fast as `then`.
    pub fn gap_beyond(&self, then: &Expected) -> Option<f64> {
        let is_faster = then.objective_ms < self.objective_ms;
        (is_faster && then.objective_ms > self.objective_ms * (1.0 - self.gap)).then_some(self.gap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gain_within_the_gap_may_be_due_to_the_search() {
        let expected = |objective_ms, gap| {
            let alone = PredictedTimes { decode_ms: 1.0, prefill_ms: 1.0 };
            Expected { alone, answer_ms: 2.0, throughput: None, objective_ms, gap, longest_pass: 1 }
        };
        let beyond = |now: f64, gap: f64, then: f64| expected(now, gap).gap_beyond(&expected(then, 0.0));
        assert_eq!([beyond(100.0, 0.1, 95.0), beyond(100.0, 1.0, 1.0)], [Some(0.1), Some(1.0)]);
        assert_eq!([beyond(100.0, 0.1, 85.0), beyond(100.0, 0.0, 99.0), beyond(100.0, 0.1, 100.0)], [None; 3]);
    }
}
