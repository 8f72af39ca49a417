//! What the engine measured about itself: times, counts and bytes, all cheap enough to be always on.

use crate::port::MemoryUse;
use hpp_schema::Provider;
use std::time::Duration;

/// What plans call the host.
const HOST: &str = "cpu";

/// Which schedule a pass followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Taking several tokens in, or the first.
    Prefill,
    /// One more token.
    Decode,
}

/// How often something happened and how long it took in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Times it happened.
    pub count: u64,
    /// Time in all.
    pub time: Duration,
}

impl Tally {
    pub(crate) fn add(&mut self, time: Duration) {
        self.count += 1;
        self.time += time;
    }

    /// Milliseconds in all.
    pub fn millis(&self) -> f64 {
        self.time.as_secs_f64() * 1e3
    }

    /// Milliseconds each, zero if it never happened.
    pub fn millis_each(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.millis() / self.count as f64 }
    }
}

/// One partition's part.
#[derive(Clone, Debug, PartialEq)]
pub struct StageTelemetry {
    /// Partition name.
    pub partition: String,
    /// The plan's device.
    pub device: String,
    /// The provider that has it.
    pub provider: Provider,
    /// The processor it computes on, as its owner calls it.
    pub processor: String,
    /// Providers the plan prefers, each with the reason it was not to be had.
    pub refused: Vec<(Provider, String)>,
    /// Time to load it.
    pub load: Duration,
    /// Its runs with several tokens.
    pub prefill: Tally,
    /// Its runs with one more token.
    pub decode: Tally,
}

impl StageTelemetry {
    /// Where its time belongs: the plan's device, said to be on the CPU where that is a GPU and its provider is not to be had.
    pub fn lane(&self) -> String {
        match (self.provider, self.device.as_str()) {
            (Provider::Cpu, device) if device != HOST => format!("{device} on the CPU"),
            (_, device) => device.to_owned(),
        }
    }

    pub(crate) fn phase(&mut self, phase: Phase) -> &mut Tally {
        match phase {
            Phase::Prefill => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        }
    }
}

/// One pass, taken apart: what its devices, copies and waits took. Copies of weights and reads go on beside the rest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PassTelemetry {
    /// Computing, by the stages' [lanes](StageTelemetry::lane).
    pub compute: Vec<(String, Duration)>,
    /// Copies of tensors between memories, the scores' way to the host included.
    pub copies: Tally,
    /// Bytes in those copies.
    pub copied_bytes: u64,
    /// Copies of streamed weights to devices that runs of this pass waited for or found there.
    pub uploads: Tally,
    /// Bytes in those copies.
    pub uploaded_bytes: u64,
    /// Waits for streamed weights that were not on their device.
    pub slot_stalls: Tally,
    /// Times weights were in a slot or on their way there when their run was next.
    pub slot_hits: u64,
    /// Times they were not.
    pub slot_misses: u64,
    /// Reads of weights from disk. Several go on at once, so their times may add up to more than the time that passed.
    pub reads: Tally,
    /// Bytes in those reads.
    pub read_bytes: u64,
    /// Waits for weights that were not read yet.
    pub stalls: Tally,
}

impl PassTelemetry {
    /// Zeros for these lanes.
    pub(crate) fn of(lanes: &[String]) -> Self {
        let mut compute: Vec<(String, Duration)> = Vec::new();
        for lane in lanes {
            if !compute.iter().any(|(known, _)| known == lane) {
                compute.push((lane.clone(), Duration::ZERO));
            }
        }
        PassTelemetry { compute, ..Self::default() }
    }

    /// Zeros for the same lanes.
    pub(crate) fn begin(&mut self) {
        let mut compute = std::mem::take(&mut self.compute);
        compute.iter_mut().for_each(|(_, time)| *time = Duration::ZERO);
        *self = PassTelemetry { compute, ..Self::default() };
    }

    /// Something was computed on a lane; its place in `compute`.
    pub(crate) fn computed(&mut self, lane: &str, time: Duration) -> Option<usize> {
        let at = self.compute.iter().position(|(known, _)| known == lane)?;
        self.compute[at].1 += time;
        Some(at)
    }

    /// All that is neither beside something else nor unknown: computing, copies between memories and waits.
    pub fn accounted(&self) -> Duration {
        let compute: Duration = self.compute.iter().map(|(_, time)| *time).sum();
        compute + self.copies.time + self.slot_stalls.time + self.stalls.time
    }
}

/// What an engine measured since it was loaded or last reset.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Telemetry {
    /// From the call of `load` to a ready engine.
    pub load: Duration,
    /// One entry for each partition, in the plan's order.
    pub stages: Vec<StageTelemetry>,
    /// Copies of tensors between memories.
    pub copies: Tally,
    /// Bytes in those copies.
    pub copied_bytes: u64,
    /// Reads of weights from disk. Several go on at once, so their times add up to more than the time that passed.
    pub reads: Tally,
    /// Bytes in those reads.
    pub read_bytes: u64,
    /// Copies of a stage's weights to a device: loading apart, those that are streamed.
    pub uploads: Tally,
    /// Bytes in those copies.
    pub uploaded_bytes: u64,
    /// Times a stage found the weights that are streamed to it in a slot or on their way there.
    pub slot_hits: u64,
    /// Times it did not, and they were copied while it waited.
    pub slot_misses: u64,
    /// Waits of stages for streamed weights that had not arrived on their device.
    pub slot_stalls: Tally,
    /// Waits of stages for weights that were not read from disk yet.
    pub stalls: Tally,
    /// Whole passes with several tokens.
    pub prefill: Tally,
    /// Tokens in them.
    pub prefill_tokens: u64,
    /// Whole passes with one more token.
    pub decode: Tally,
    /// Tokens in them.
    pub decode_tokens: u64,
    /// Bytes reserved for the states of the sequences made so far.
    pub state_bytes: u64,
    /// Memory, asked for when the telemetry is.
    pub memory: MemoryUse,
}

impl Telemetry {
    /// Tokens taken in a second while prefilling; `None` before the first.
    pub fn prefill_tokens_per_second(&self) -> Option<f64> {
        per_second(self.prefill_tokens, self.prefill.time)
    }

    /// Tokens made in a second while decoding; `None` before the first.
    pub fn decode_tokens_per_second(&self) -> Option<f64> {
        per_second(self.decode_tokens, self.decode.time)
    }

    /// Forgets the times and counts of passes, not those of loading.
    pub(crate) fn reset_passes(&mut self) {
        for stage in &mut self.stages {
            (stage.prefill, stage.decode) = Default::default();
        }
        (self.copies, self.copied_bytes) = Default::default();
        (self.reads, self.read_bytes, self.stalls) = Default::default();
        (self.uploads, self.uploaded_bytes, self.slot_stalls) = Default::default();
        (self.slot_hits, self.slot_misses) = Default::default();
        (self.prefill, self.prefill_tokens, self.decode, self.decode_tokens) = Default::default();
    }
}

fn per_second(tokens: u64, time: Duration) -> Option<f64> {
    (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
}
