//! The cost of reading weights from disk: fields for `--json` and lines for people.

use crate::numbers::{gb_per_second, millis};
use hpp_engine::{StageTelemetry, Telemetry};
use hpp_generate::Generated;
use hpp_schema::{ByteSize, Predictions};
use serde::Serialize;

/// A warning is given if a token or pass takes longer than its prediction times this.
const SLOW_FACTOR: f64 = 1.5;

/// What the time of waiting for KV caches on disk leaves out.
pub const PAGE_FAULTS: &str = "(page faults on them count as computing)";

/// Mean time of a run's passes or tokens, and the plan's prediction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredTimes {
    /// What `ms` is the time of: `token` or `pass`.
    pub unit: &'static str,
    /// Mean milliseconds of one token or pass.
    pub ms: f64,
    /// Milliseconds of one token or pass that the plan predicts.
    pub predicted_ms: f64,
    /// The part of the time in which partitions waited for weights from disk.
    pub waiting: f64,
    /// The part of the time in which partitions waited for states on disk.
    pub waiting_for_states: f64,
}

impl MeasuredTimes {
    /// Whether the times exceed [`SLOW_FACTOR`] times the prediction, and waiting explains most of the excess. `waiting`: part of the time.
    fn are_longer_for(&self, waiting: f64) -> bool {
        let MeasuredTimes { ms, predicted_ms, .. } = *self;
        predicted_ms > 0.0 && ms > SLOW_FACTOR * predicted_ms && ms * waiting > (ms - predicted_ms) / 2.0
    }
}

/// Weights read from disk while a plan ran.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DiskReads {
    /// Bytes read.
    pub bytes: u64,
    /// Time in which at least one read was in progress, in milliseconds.
    pub busy_ms: f64,
    /// Bytes over that time, in 1e9 bytes a second.
    pub gb_per_second: f64,
    /// Time in which partitions waited for their weights, in milliseconds. Unlike `busy_ms`, it includes the time to start reads and to evict pages
    /// for them.
    pub stall_ms: f64,
    /// Experts that runs used, where they are read by demand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertUse>,
}

/// Experts of mixtures that runs used, each counted once for each pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ExpertUse {
    /// Experts that were in memory when the router selected them.
    pub hits: u64,
    /// Experts whose read had begun before the router selected them, because an earlier layer predicted the selection.
    pub read_ahead: u64,
    /// Experts that had to be read from disk after the router selected them.
    pub misses: u64,
    /// Experts that were read ahead and not used.
    pub read_in_vain: u64,
    /// Bytes of all experts that are read by demand.
    pub all_bytes: u64,
    /// Bytes of memory for them.
    pub cache_bytes: u64,
}

impl ExpertUse {
    /// `None` if no run used an expert that is read by demand.
    fn new(telemetry: &Telemetry) -> Option<Self> {
        let uses = ExpertUse {
            hits: telemetry.expert_hits,
            read_ahead: telemetry.experts_read_ahead,
            misses: telemetry.expert_misses,
            read_in_vain: telemetry.experts_read_in_vain,
            all_bytes: telemetry.expert_bytes,
            cache_bytes: telemetry.expert_cache_bytes,
        };
        (uses.all() > 0).then_some(uses)
    }

    fn all(self) -> u64 {
        self.hits + self.read_ahead + self.misses
    }

    /// For people.
    fn line(self) -> String {
        let share = |part: u64| 100.0 * part as f64 / self.all() as f64;
        let ahead = match self.read_ahead + self.read_in_vain {
            0 => String::new(),
            _ => format!(
                ", {:.0} % prefetched, {} more prefetched and not used",
                share(self.read_ahead),
                self.read_in_vain
            ),
        };
        format!("experts: {} used, {:.0} % of them in memory{ahead}\n", self.all(), share(self.hits))
    }
}

impl DiskReads {
    /// From the engine's telemetry; `None` if nothing was read.
    pub fn new(telemetry: &Telemetry) -> Option<Self> {
        let (bytes, busy_ms) = (telemetry.read_bytes, telemetry.reads.millis());
        let stall_ms = millis(telemetry.disk_stalls.time);
        (bytes > 0).then(|| DiskReads {
            bytes,
            busy_ms,
            gb_per_second: gb_per_second(bytes as f64, busy_ms),
            stall_ms,
            experts: ExpertUse::new(telemetry),
        })
    }
}

/// One line for people; empty if nothing was read.
pub fn line(reads: Option<&DiskReads>) -> String {
    let Some(reads) = reads else { return String::new() };
    let bytes = ByteSize(reads.bytes).human();
    let text = format!(
        "disk: {bytes} of weights at {:.2} GB/s in {:.0} ms; partitions waited {:.0} ms for them\n",
        reads.gb_per_second, reads.busy_ms, reads.stall_ms
    );
    text + &reads.experts.map(ExpertUse::line).unwrap_or_default()
}

/// A warning if tokens take longer than the plan predicts because of the disk. `None` if they do not, or if the cause is another.
pub fn slow_disk_warning(predicted: &Predictions, generated: &Generated, telemetry: &Telemetry) -> Option<String> {
    let decoded = generated.tokens.len().saturating_sub(1);
    if decoded == 0 {
        return None;
    }
    let decode_ms = millis(generated.timings.decode);
    let total_ms = millis(generated.timings.prefill) + decode_ms;
    let times = MeasuredTimes {
        unit: "token",
        ms: decode_ms / decoded as f64,
        predicted_ms: predicted.decode_ms,
        waiting: millis(telemetry.disk_stalls.time) / total_ms.max(f64::MIN_POSITIVE),
        waiting_for_states: millis(telemetry.state_stalls.time) / total_ms.max(f64::MIN_POSITIVE),
    };
    slower_for_disk(predicted, &times, telemetry)
}

/// A warning if `times` are longer than predicted because of the disk. `None` if they are not, or if the cause is another.
pub fn slower_for_disk(predicted: &Predictions, times: &MeasuredTimes, telemetry: &Telemetry) -> Option<String> {
    let MeasuredTimes { unit, ms, predicted_ms, waiting, waiting_for_states } = *times;
    if waiting_for_states >= waiting && times.are_longer_for(waiting_for_states) {
        return Some(format!(
            "slower than planned: {ms:.1} ms per {unit} instead of {predicted_ms:.1}; partitions wait {:.0} % of the time for KV caches \
             on disk. With enough --ram, hpp-split --kv follow keeps them in memory",
            100.0 * waiting_for_states.min(1.0)
        ));
    }
    let reads = DiskReads::new(telemetry).filter(|_| times.are_longer_for(waiting))?;
    let fell_back = telemetry.stages.iter().any(StageTelemetry::fell_back);
    let advice = match (fell_back, predicted.source.starts_with("profile")) {
        (true, _) => "The plan was made for a GPU that is not usable here: plan for this machine without --vram",
        // A plan made with a profile accounts for the speed of this machine's disk already.
        (false, true) => "A larger --ram reads less from disk",
        (false, false) => "A larger --ram reads less from disk, and hpp-profile measures this disk for the plan",
    };
    Some(format!(
        "slower than planned: {ms:.1} ms per {unit} instead of {predicted_ms:.1}; the disk delivers {:.2} GB/s, and partitions wait \
         for it {:.0} % of the time. {advice}",
        reads.gb_per_second,
        100.0 * waiting.min(1.0)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_engine::Counter;
    use hpp_engine::port::WeightResidency;
    use hpp_generate::{FinishReason, GenerationTimings, TokenUsage};
    use hpp_schema::Provider;
    use std::time::Duration;

    #[test]
    fn without_reads_there_is_no_line() {
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
        (telemetry.expert_hits, telemetry.expert_misses) = (30, 10);
        let reads = line(DiskReads::new(&telemetry).as_ref());
        assert!(reads.ends_with("\nexperts: 40 used, 75 % of them in memory\n"), "{reads}");
        (telemetry.experts_read_ahead, telemetry.experts_read_in_vain) = (10, 4);
        let reads = line(DiskReads::new(&telemetry).as_ref());
        let last = "\nexperts: 50 used, 60 % of them in memory, 20 % prefetched, 4 more prefetched and not used\n";
        assert!(reads.ends_with(last), "{reads}");
    }

    /// The warning for ten tokens in `decode` milliseconds, `stalls` of them waiting, where `source` predicted 100 ms per token.
    fn warning(decode: u64, stalls: u64, source: &str) -> Option<String> {
        warning_with(vec![], decode, stalls, source)
    }

    fn warning_with(stages: Vec<StageTelemetry>, decode: u64, stalls: u64, source: &str) -> Option<String> {
        let mut telemetry = Telemetry { read_bytes: 1_000_000_000, stages, ..Telemetry::default() };
        telemetry.reads.time = Duration::from_millis(decode);
        telemetry.disk_stalls.time = Duration::from_millis(stalls);
        let generated = Generated {
            speculation: None,
            tokens: vec![7; 11],
            text: None,
            finish_reason: FinishReason::Length,
            usage: TokenUsage { prompt_tokens: 1, reused_tokens: 0, completion_tokens: 11 },
            timings: GenerationTimings { decode: Duration::from_millis(decode), ..GenerationTimings::default() },
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
            throughput: None,
        };
        slow_disk_warning(&predicted, &generated, &telemetry)
    }

    #[test]
    fn a_disk_slower_than_planned_is_reported_and_other_causes_are_not_blamed_on_it() {
        let slow = warning(4000, 3200, "static").unwrap();
        assert_eq!(
            slow,
            "slower than planned: 400.0 ms per token instead of 100.0; the disk delivers 0.25 GB/s, and partitions wait for it 80 % \
             of the time. A larger --ram reads less from disk, and hpp-profile measures this disk for the plan"
        );
        let profiled = warning(4000, 3200, "profile: profile.yaml of 2026-01-01T00:00:00Z, refined").unwrap();
        assert!(profiled.ends_with("A larger --ram reads less from disk"), "{profiled}");
        let fell_back = StageTelemetry {
            partition: "gpu_0".into(),
            device: "gpu0".into(),
            provider: Provider::CPU,
            processor: String::new(),
            packs_weights: false,
            residency: WeightResidency::ReadFromDisk,
            refused: vec![],
            load: Duration::ZERO,
            prefill: Counter::default(),
            decode: Counter::default(),
        };
        let missing = warning_with(vec![fell_back], 4000, 3200, "static").unwrap();
        assert!(missing.ends_with("plan for this machine without --vram") && !missing.contains("--ram"), "{missing}");
        assert_eq!(warning(1400, 1200, "static"), None, "nearly as planned");
        assert_eq!(warning(4000, 100, "static"), None, "the processor is slow");
    }
}
