//! The passes of a run whose times the plan predicts, and what they took.

use crate::numbers::millis;
use crate::report::disk::{MeasuredTimes, slower_for_disk};
use hpp_engine::{PassTelemetry, Telemetry};
use hpp_generate::adapt::{PassSize, PredictedTimes};
use hpp_schema::Predictions;

/// Sums over the passes of all sequences that a run has memory for, if the plan predicts their time. Passes of fewer sequences are left out: a plan
/// predicts their time without the states of the others, whose memory would hold weights that these passes read from disk.
#[derive(Clone, Debug)]
pub struct PredictedPasses {
    predicted: Option<PredictedTimes>,
    /// Sequences that the run has memory for.
    sequences: u64,
    passes: u64,
    ms: f64,
    predicted_ms: f64,
    /// Milliseconds in which partitions waited for weights from disk.
    disk_stall_ms: f64,
    /// Milliseconds in which partitions waited for states on disk.
    state_stall_ms: f64,
}

impl PredictedPasses {
    /// Starts without passes, for a plan with these predictions and a run with memory for so many sequences.
    pub fn new(predictions: &Predictions, sequences: u64) -> Self {
        let predicted = PredictedTimes::of(predictions);
        PredictedPasses {
            predicted,
            sequences,
            passes: 0,
            ms: 0.0,
            predicted_ms: 0.0,
            disk_stall_ms: 0.0,
            state_stall_ms: 0.0,
        }
    }

    /// Adds a pass, if the plan has a prediction for its size.
    pub fn add(&mut self, size: Option<PassSize>, pass: &PassTelemetry) {
        let Some((times, PassSize { sequences, tokens, .. })) = self.predicted.as_ref().zip(size) else { return };
        let Some(predicted_ms) = times.ms(sequences, tokens).filter(|_| sequences == self.sequences) else { return };
        self.passes += 1;
        self.ms += millis(pass.time);
        self.predicted_ms += predicted_ms;
        self.disk_stall_ms += millis(pass.disk_stalls.time);
        self.state_stall_ms += millis(pass.state_stalls.time);
    }

    /// A warning if these passes took longer than predicted because of the disk.
    pub fn slow_disk_warning(&self, predictions: &Predictions, telemetry: &Telemetry) -> Option<String> {
        if self.passes == 0 {
            return None;
        }
        let passes = self.passes as f64;
        let times = MeasuredTimes {
            unit: "pass",
            ms: self.ms / passes,
            predicted_ms: self.predicted_ms / passes,
            waiting: self.disk_stall_ms / self.ms.max(f64::MIN_POSITIVE),
            waiting_for_states: self.state_stall_ms / self.ms.max(f64::MIN_POSITIVE),
        };
        slower_for_disk(predictions, &times, telemetry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_engine::Counter;
    use hpp_schema::{PredictedPass, PredictedThroughput};
    use std::time::Duration;

    /// A plan that predicts 100 ms for a pass of one sequence, and 200 ms of four.
    fn predictions() -> Predictions {
        let pass = |sequences, ms| PredictedPass { sequences, tokens: 1, ms };
        let throughput =
            PredictedThroughput { sequences: 4, passes: vec![pass(1, 100.0), pass(4, 200.0)], ..Default::default() };
        Predictions {
            source: "static".into(),
            decode_ms: 100.0,
            throughput: Some(throughput),
            ..Predictions::default()
        }
    }

    /// The warning after ten passes of so many sequences, all that the run has memory for.
    fn warning(sequences: u64, ms: u64, stalls: u64) -> Option<String> {
        warning_with_states(sequences, ms, stalls, 0)
    }

    fn warning_with_states(sequences: u64, ms: u64, stalls: u64, state_stalls: u64) -> Option<String> {
        warning_of_run(sequences, sequences, ms, stalls, state_stalls)
    }

    fn warning_of_run(most: u64, sequences: u64, ms: u64, stalls: u64, state_stalls: u64) -> Option<String> {
        let (predictions, mut passes) = (predictions(), PredictedPasses::new(&predictions(), most));
        let of = |ms: u64| Counter { count: 1, time: Duration::from_millis(ms) };
        let pass = PassTelemetry {
            time: Duration::from_millis(ms),
            disk_stalls: of(stalls),
            state_stalls: of(state_stalls),
            ..PassTelemetry::default()
        };
        (0..10).for_each(|_| passes.add(Some(PassSize { sequences, tokens: 1, context: 1 }), &pass));
        // A pass over prompts of different lengths.
        passes.add(None, &PassTelemetry { time: Duration::from_secs(99), ..PassTelemetry::default() });
        let telemetry = Telemetry { read_bytes: 1_000_000_000, reads: of(4000), ..Telemetry::default() };
        passes.slow_disk_warning(&predictions, &telemetry)
    }

    #[test]
    fn passes_of_several_sequences_are_compared_with_what_the_plan_predicts_for_them() {
        let slow = warning(4, 800, 600).unwrap();
        let start = "slower than planned: 800.0 ms per pass instead of 200.0; the disk delivers 0.25 GB/s, and partitions wait for it \
                     75 % of the time.";
        assert!(slow.starts_with(start), "{slow}");
        let states = warning_with_states(4, 800, 10, 600).unwrap();
        assert!(
            states.contains("wait 75 % of the time for KV caches on disk. With enough --ram, hpp-split --kv follow"),
            "{states}"
        );
        assert_eq!(warning_with_states(4, 250, 0, 200), None, "as planned");
        let both = warning_with_states(4, 800, 400, 350).unwrap();
        assert!(both.contains("the disk delivers"), "weights wait longer: {both}");
        assert_eq!(warning(4, 250, 200), None, "slow for one sequence, as planned for four");
        assert_eq!(warning(4, 800, 10), None, "the processor is slow");
        assert_eq!(warning(5, 8000, 6000), None, "the plan predicts no such pass");
        assert_eq!(warning_of_run(4, 1, 800, 600, 0), None, "the states of four leave less memory for weights");
    }
}
