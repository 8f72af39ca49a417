//! Predicted times of a placement.

use hpp_partition::{Objective, Solution, Workload};

/// Predicted or measured times of a placement, milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PredictedTimes {
    /// Per generated token.
    pub decode_ms: f64,
    /// To the first token.
    pub prefill_ms: f64,
}

impl PredictedTimes {
    /// The times that a planner's solution predicts.
    pub fn of(solution: &Solution) -> Self {
        PredictedTimes { decode_ms: solution.decode_ms, prefill_ms: solution.prefill_ms }
    }

    /// The value of the objective for this load, milliseconds.
    pub fn objective_ms(self, objective: Objective, load: &Workload) -> f64 {
        match objective {
            Objective::Decode => self.decode_ms,
            Objective::Prefill => self.prefill_ms,
            Objective::Mixed | Objective::Throughput => load.answer_ms(self.prefill_ms, self.decode_ms),
        }
    }

    /// Generated tokens per second; 0 where the time is 0.
    pub fn tokens_per_s(self) -> f64 {
        if self.decode_ms > 0.0 { 1e3 / self.decode_ms } else { 0.0 }
    }
}

/// Rounds to four significant digits, the precision that plans record.
pub fn round(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powf(3.0 - value.abs().log10().floor());
    (value * scale).round() / scale
}
