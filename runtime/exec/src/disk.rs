//! What reading weights from disk cost, for programs and for people.

use crate::generate::Generated;
use crate::report::millis;
use hpp_engine::Telemetry;
use hpp_schema::{ByteSize, Predictions};
use serde::Serialize;

/// A token that takes so many times as long as predicted deserves a word, where the disk is to blame.
const SLOW: f64 = 1.5;

/// Weights read from disk while a plan ran.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskReads {
    /// Bytes read.
    pub bytes: u64,
    /// Time in which something was read, in milliseconds; where several threads read at once, their times added up.
    pub busy_ms: f64,
    /// Bytes over that time, in 1e9 bytes a second.
    pub gb_per_second: f64,
    /// Time in which partitions waited for their weights, in milliseconds: starting reads and making room for them are part of it
    /// and not of reading.
    pub stall_ms: f64,
}

impl DiskReads {
    /// From what the engine measured; `None` where nothing was read.
    pub fn new(telemetry: &Telemetry) -> Option<Self> {
        let (bytes, busy_ms) = (telemetry.read_bytes, telemetry.reads.millis());
        let gb_per_second = if busy_ms > 0.0 { bytes as f64 / busy_ms / 1e6 } else { 0.0 };
        (bytes > 0).then(|| DiskReads { bytes, busy_ms, gb_per_second, stall_ms: millis(telemetry.disk_stalls.time) })
    }
}

/// One line for people; nothing where nothing was read.
pub fn line(reads: Option<&DiskReads>) -> String {
    let Some(reads) = reads else { return String::new() };
    let bytes = ByteSize(reads.bytes).human();
    format!(
        "disk: {bytes} of weights at {:.2} GB/s in {:.0} ms; partitions waited {:.0} ms for them\n",
        reads.gb_per_second, reads.busy_ms, reads.stall_ms
    )
}

/// What a person should know where a plan is slower than predicted because the disk is; `None` where it is not, or where
/// something else is to blame.
pub fn slower(predicted: &Predictions, generated: &Generated, telemetry: &Telemetry) -> Option<String> {
    let (reads, predicted, by) = (DiskReads::new(telemetry)?, predicted.decode_ms, &predicted.source);
    let more = generated.tokens.len().saturating_sub(1);
    let took = millis(generated.decode) / more.max(1) as f64;
    let all = millis(generated.prefill) + millis(generated.decode);
    let waits = reads.stall_ms / all.max(f64::MIN_POSITIVE);
    // Most of what is more than predicted is waiting.
    let is_slow = more > 0 && predicted > 0.0 && took > SLOW * predicted && took * waits > (took - predicted) / 2.0;
    // A plan of a profile knows this machine already.
    let advice =
        if by.starts_with("profile") { "" } else { "; with a profile of this machine (hpp-profile) the plan knows it" };
    is_slow.then(|| {
        format!(
            "slower than planned: {took:.1} ms a token, {predicted:.1} were expected; the disk brings {:.2} GB/s and is waited for \
             {:.0} % of the time. More --ram reads less from it{advice}",
            reads.gb_per_second,
            100.0 * waits.min(1.0)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_is_not_read_is_not_spoken_of() {
        let mut telemetry = Telemetry::default();
        assert_eq!(DiskReads::new(&telemetry), None);
        assert_eq!(line(None), "");
        telemetry.read_bytes = 3_000_000_000;
        telemetry.reads.time = Duration::from_millis(2000);
        telemetry.disk_stalls.time = Duration::from_millis(500);
        let reads = DiskReads::new(&telemetry).unwrap();
        assert_eq!(reads.gb_per_second, 1.5);
        assert_eq!(
            line(Some(&reads)),
            "disk: 2.79 GiB of weights at 1.50 GB/s in 2000 ms; partitions waited 500 ms for them\n"
        );
    }

    /// Ten tokens in `decode` milliseconds, of which `stalls` were waiting, where `source` predicted 100 ms a token.
    fn said(decode: u64, stalls: u64, source: &str) -> Option<String> {
        let mut telemetry = Telemetry { read_bytes: 1_000_000_000, ..Telemetry::default() };
        telemetry.reads.time = Duration::from_millis(decode);
        telemetry.disk_stalls.time = Duration::from_millis(stalls);
        let generated = Generated {
            tokens: vec![7; 11],
            text: None,
            finish: crate::generate::FinishReason::Length,
            reused: 0,
            first_token: None,
            prefill: Duration::ZERO,
            decode: Duration::from_millis(decode),
        };
        let predicted = Predictions {
            source: source.into(),
            decode_ms: 100.0,
            time_to_first_token_ms: 0.0,
            prompt_tokens: 1,
            decode_tokens_per_second: 10.0,
            decode_context: 0,
            new_tokens: 0,
            limit: None,
            objective: None,
        };
        slower(&predicted, &generated, &telemetry)
    }

    #[test]
    fn a_disk_slower_than_planned_is_named_and_nothing_else_is_blamed_on_it() {
        let slow = said(4000, 3200, "static").unwrap();
        assert!(
            slow.starts_with("slower than planned: 400.0 ms a token, 100.0 were expected; the disk brings 0.25 GB/s"),
            "{slow}"
        );
        assert!(slow.contains("for 80 % of the time"), "{slow}");
        assert!(
            slow.ends_with("reads less from it; with a profile of this machine (hpp-profile) the plan knows it"),
            "{slow}"
        );
        let profiled = said(4000, 3200, "profile: profile.yaml of 2026-01-01T00:00:00Z, refined").unwrap();
        assert!(profiled.ends_with("More --ram reads less from it"), "{profiled}");
        assert_eq!(said(1400, 1200, "static"), None, "as planned, or nearly");
        assert_eq!(said(4000, 100, "static"), None, "the processor is slow");
    }
}
