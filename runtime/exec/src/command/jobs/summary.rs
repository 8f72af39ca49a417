//! What a run of `hpp-exec jobs` counts and says at its end.

use crate::numbers::{counted, millis, rate};
use crate::report::disk::{self, DiskReads, PAGE_FAULTS};
use crate::report::{Bytes, memory};
use hpp_engine::Telemetry;
use serde::Serialize;
use std::time::Duration;

/// What this run has done so far, and how many prompts earlier runs answered. Printed by `--json`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct JobCounts {
    /// Prompts answered with text.
    pub answers: usize,
    /// Prompts answered with an error.
    pub errors: usize,
    /// Lines of the file of answers that earlier runs answered with text.
    pub earlier_answers: usize,
    /// Lines of it that earlier runs answered with an error.
    pub earlier_errors: usize,
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub tokens: usize,
    /// Passes over the weights.
    pub passes: u64,
    /// Tokens computed as rows of a batch of several sequences.
    pub batched_rows: u64,
    /// Most sequences at once.
    pub sequences: usize,
    /// Tokens drafted and verified in all answers, and how many of them the model accepted; absent without speculation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<DraftCounts>,
    /// Weights read from disk; absent if there were none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskReads>,
    /// Seconds that the run took, without loading.
    pub seconds: f64,
    /// How these seconds are divided; absent if nothing was loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<TimeShares>,
    /// Memory, with the states of all sequences at once; absent if nothing was loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Bytes>,
}

/// How the time of a run is divided, in milliseconds. Stages on different devices may compute at once, so `compute_ms` alone may exceed the time of
/// the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TimeShares {
    /// Computing.
    pub compute_ms: f64,
    /// Waiting for weights, from disk or on their way to a device.
    pub stall_ms: f64,
    /// Waiting for KV caches and other states on disk; 0 if they are in memory.
    pub state_stall_ms: f64,
    /// The remaining time.
    pub rest_ms: f64,
}

impl TimeShares {
    /// Divides the time of a run that took this many seconds.
    pub fn new(telemetry: &Telemetry, seconds: f64) -> Self {
        let computing = telemetry.stages.iter().map(|stage| stage.prefill.time + stage.decode.time).sum::<Duration>();
        let (compute_ms, stall_ms, state_stall_ms) = (
            millis(computing),
            millis(telemetry.disk_stalls.time + telemetry.slot_stalls.time),
            millis(telemetry.state_stalls.time),
        );
        let rest_ms = (1e3 * seconds - compute_ms - stall_ms - state_stall_ms).max(0.0);
        TimeShares { compute_ms, stall_ms, state_stall_ms, rest_ms }
    }

    /// One line for people: each part as a share of the run's seconds.
    fn line(self, seconds: f64) -> String {
        let share = |ms: f64| format!("{:.0} %", 0.1 * ms / seconds.max(1e-9));
        let TimeShares { compute_ms, stall_ms, state_stall_ms, rest_ms } = self;
        let (computing, waiting, other) = (share(compute_ms), share(stall_ms), share(rest_ms));
        let states = match state_stall_ms > 0.0 {
            true => format!("{} waiting for KV caches on disk {PAGE_FAULTS}, ", share(state_stall_ms)),
            false => String::new(),
        };
        format!("time: {computing} computing, {waiting} waiting for weights, {states}{other} other\n")
    }
}

/// Drafted tokens.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct DraftCounts {
    /// Verified.
    pub drafted: u64,
    /// Drafted tokens that the model chose.
    pub accepted: u64,
}

impl JobCounts {
    /// Adds what the engine measured in the run's seconds. `state_bytes`: bytes of the states of all sequences together.
    pub fn measured(&mut self, telemetry: &Telemetry, state_bytes: u64) {
        self.batched_rows = telemetry.batched_rows;
        self.disk = DiskReads::new(telemetry);
        self.time = Some(TimeShares::new(telemetry, self.seconds));
        self.bytes = Some(Bytes::new(telemetry, state_bytes));
    }

    /// The summary for people. Call [`measured`](Self::measured) first.
    pub fn summary(&self, telemetry: &Telemetry) -> String {
        let JobCounts { answers, errors, tokens, passes, sequences, seconds, .. } = *self;
        let errors = if errors > 0 { format!(" and {}", counted(errors as u64, "error")) } else { String::new() };
        let drafts = self.speculation.map_or_else(String::new, |DraftCounts { drafted, accepted }| {
            format!("speculation: {accepted} of {drafted} drafted tokens accepted\n")
        });
        format!(
            "{}{errors} in {}, up to {} at once\n{}: {} tok/s, {} tokens a pass\n{drafts}{}{}{}memory: {}",
            counted(answers as u64, "answer"),
            duration(Duration::from_secs_f64(seconds)),
            counted(sequences as u64, "sequence"),
            counted(tokens as u64, "new token"),
            rate(Some(tokens as f64 / seconds.max(1e-9))),
            rate((passes > 0).then(|| tokens as f64 / passes as f64)),
            batched_rows(telemetry),
            self.time.unwrap_or_default().line(seconds),
            disk::line(self.disk.as_ref()),
            self.bytes.as_ref().map(memory).unwrap_or_default()
        )
    }
}

/// Mean length of unfinished answers, as a share of that of finished ones, up to which the time left is estimated.
const LONGEST_ESTIMATED: f64 = 0.8;

/// Answers so far, counting each unfinished answer as a fraction: its tokens over the mean length of a finished answer. `running`: sequences in the last
/// pass, some of which may have ended. `tokens`: those of finished and of unfinished answers. `None` before the first answer, and while unfinished
/// answers are on average nearly as long as finished ones, because then their end cannot be estimated.
pub fn answers_so_far(answers: usize, prompts: usize, running: usize, tokens: (usize, usize)) -> Option<f64> {
    let unfinished = running.min(prompts.saturating_sub(answers)).max(1);
    let per_answer = tokens.0 as f64 / answers as f64;
    let unfinished_answers = tokens.1 as f64 / per_answer.max(1.0);
    let is_known = answers > 0 && unfinished_answers < LONGEST_ESTIMATED * unfinished as f64;
    is_known.then_some(answers as f64 + unfinished_answers)
}

/// The time that the remaining prompts will take if `answers` answers took `elapsed`; `prompts` counts all prompts.
pub fn time_left(elapsed: Duration, answers: Option<f64>, prompts: usize) -> Option<Duration> {
    answers.filter(|answers| *answers > 0.0).map(|answers| elapsed.mul_f64((prompts as f64 / answers - 1.0).max(0.0)))
}

/// How tokens were batched, for people; empty if none were.
fn batched_rows(telemetry: &Telemetry) -> String {
    let (batches, rows) = (telemetry.row_batches, telemetry.batched_rows);
    match batches {
        0 => String::new(),
        _ => format!("rows: {rows} tokens computed in batches of {:.1}\n", rows as f64 / batches as f64),
    }
}

/// `42 s`, `3 min 20 s` or `2 h 5 min`.
pub fn duration(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, _) if seconds < 10 => format!("{:.1} s", time.as_secs_f64()),
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_two_units() {
        let text = [0.26, 42.0, 200.0, 7500.0].map(|seconds| duration(Duration::from_secs_f64(seconds)));
        assert_eq!(text, ["0.3 s", "42 s", "3 min 20 s", "2 h 5 min"]);
    }

    #[test]
    fn time_left_counts_unfinished_answers() {
        let left = |answers, prompts| time_left(Duration::from_secs(18), answers, prompts);
        // 16 of 60 answers are written and 16 half done.
        assert_eq!(left(Some(24.0), 60), Some(Duration::from_secs(27)));
        assert_eq!((left(Some(60.0), 60), left(None, 60)), (Some(Duration::ZERO), None));
    }

    #[test]
    fn unfinished_answers_count_while_they_are_shorter_than_finished_ones() {
        // 16 of 32 answers are written, of 20 tokens each; 28 sequences were in the last pass, and 16 of them go on.
        let so_far = |unfinished_tokens| answers_so_far(16, 32, 28, (320, unfinished_tokens));
        assert_eq!((so_far(0), so_far(160)), (Some(16.0), Some(24.0)));
        assert_eq!((so_far(255), so_far(256), so_far(318)), (Some(28.75), None, None));
        assert_eq!(answers_so_far(0, 32, 28, (0, 5)), None);
    }

    #[test]
    fn the_summary_says_what_was_answered() {
        let speculation = Some(DraftCounts { drafted: 9, accepted: 6 });
        let mut counts = JobCounts {
            answers: 3,
            errors: 1,
            tokens: 60,
            passes: 20,
            sequences: 2,
            speculation,
            seconds: 4.0,
            ..JobCounts::default()
        };
        let mut telemetry = Telemetry::default();
        telemetry.disk_stalls.time = Duration::from_secs(1);
        counts.measured(&telemetry, 1 << 20);
        let said = counts.summary(&telemetry);
        let start = "3 answers and 1 error in 4.0 s, up to 2 sequences at once\n60 new tokens: 15";
        assert!(said.starts_with(start), "{said}");
        assert!(said.contains("tokens a pass\nspeculation: 6 of 9 drafted tokens accepted\ntime: 0 %"), "{said}");
        assert!(said.contains("time: 0 % computing, 25 % waiting for weights, 75 % other\nmemory: "), "{said}");
        assert!(said.ends_with(", state 1 MiB"), "{said}");
        let json = serde_json::to_value(&counts).unwrap();
        assert_eq!(
            json["time"],
            serde_json::json!({"compute_ms": 0.0, "stall_ms": 1000.0, "state_stall_ms": 0.0, "rest_ms": 3000.0})
        );
        assert_eq!(json["bytes"]["state"], 1 << 20);
        telemetry.state_stalls.time = Duration::from_secs(2);
        counts.measured(&telemetry, 1 << 20);
        let said = counts.summary(&telemetry);
        let states = format!("50 % waiting for KV caches on disk {PAGE_FAULTS}");
        assert!(said.contains(&format!("25 % waiting for weights, {states}, 25 % other\n")), "{said}");
    }
}
