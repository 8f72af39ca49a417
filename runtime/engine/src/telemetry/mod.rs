//! The engine's telemetry: times, counts and bytes, cheap enough to be always on.

mod recorder;

pub(crate) use recorder::{Awaited, DeviceEvent, Recorder, StageRun, TensorCopy};

use crate::port::{MemoryUse, WeightResidency};
use hpp_schema::Provider;
use std::ops::{Index, IndexMut};
use std::time::Duration;

/// The host's name in plans.
const HOST: &str = "cpu";

/// Which schedule a pass follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// All other passes: prompts and their chunks, also a last chunk of one token, longer drafts, and every pass of a model without states.
    Prefill,
    /// A pass after the first of its sequence, alone in its step, of at most as many tokens as the plan's `schedule.decode_tokens` (1 if it does not
    /// say): the next token, or a short draft.
    Decode,
}

impl Phase {
    /// Both phases.
    pub const BOTH: [Phase; 2] = [Phase::Prefill, Phase::Decode];
}

/// One value for each phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PerPhase<T> {
    pub prefill: T,
    pub decode: T,
}

impl<T> PerPhase<T> {
    /// Makes each value from its phase.
    pub fn new(mut make: impl FnMut(Phase) -> T) -> Self {
        PerPhase { prefill: make(Phase::Prefill), decode: make(Phase::Decode) }
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        [&self.prefill, &self.decode].into_iter()
    }

    pub fn map<U>(&self, mut f: impl FnMut(&T) -> U) -> PerPhase<U> {
        PerPhase { prefill: f(&self.prefill), decode: f(&self.decode) }
    }
}

impl<T> Index<Phase> for PerPhase<T> {
    type Output = T;
    fn index(&self, phase: Phase) -> &T {
        match phase {
            Phase::Prefill => &self.prefill,
            Phase::Decode => &self.decode,
        }
    }
}

impl<T> IndexMut<Phase> for PerPhase<T> {
    fn index_mut(&mut self, phase: Phase) -> &mut T {
        match phase {
            Phase::Prefill => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        }
    }
}

/// A count of events and their total time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// Number of events.
    pub count: u64,
    /// Their total time.
    pub time: Duration,
}

impl Counter {
    pub(crate) fn add(&mut self, time: Duration) {
        self.count += 1;
        self.time += time;
    }

    /// Total milliseconds.
    pub fn millis(&self) -> f64 {
        self.time.as_secs_f64() * 1e3
    }

    /// Mean milliseconds per event; 0 without events.
    pub fn millis_each(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.millis() / self.count as f64 }
    }
}

/// Times of one stage: a partition in one of its variants.
#[derive(Clone, Debug, PartialEq)]
pub struct StageTelemetry {
    /// Partition name.
    pub partition: String,
    /// The plan's device.
    pub device: String,
    /// The provider that runs it.
    pub provider: Provider,
    /// The processor it computes on, in the backend's words.
    pub processor: String,
    /// Whether kernels on the host compute with packed weights.
    pub packs_weights: bool,
    /// Where its weights are between runs if it computes on the host.
    pub residency: WeightResidency,
    /// Providers the plan prefers, each with the reason it is unavailable.
    pub refused: Vec<(Provider, String)>,
    /// Time to load it.
    pub load: Duration,
    /// Its runs that followed the schedule of prefill.
    pub prefill: Counter,
    /// Its runs that followed the schedule of decoding.
    pub decode: Counter,
}

impl StageTelemetry {
    /// The device that it runs on.
    pub fn used_device(&self) -> &str {
        if self.fell_back() { HOST } else { &self.device }
    }

    /// Whether it runs on the host.
    pub fn is_on_host(&self) -> bool {
        self.used_device() == HOST
    }

    /// Whether it was planned for a GPU and runs on the CPU.
    pub fn fell_back(&self) -> bool {
        self.provider == Provider::CPU && self.device != HOST
    }

    /// The timeline's track for its runs: the plan's device, with a note where that is a GPU and the partition runs on the CPU.
    pub fn track(&self) -> String {
        if self.fell_back() { format!("{} on the CPU", self.device) } else { self.device.clone() }
    }

    pub(crate) fn phase(&mut self, phase: Phase) -> &mut Counter {
        match phase {
            Phase::Prefill => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        }
    }
}

/// The times of one pass by what took them. Reads and uploads of weights overlap the rest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PassTelemetry {
    /// From its start to its end, if it has succeeded.
    pub time: Duration,
    /// Time of stage runs by their [tracks](StageTelemetry::track).
    pub compute: Vec<(String, Duration)>,
    /// Tokens that were rows of a batch of several sequences.
    pub batched_rows: u64,
    /// Copies of tensors between memories, including that of the logits to the host.
    pub copies: Counter,
    /// Bytes in those copies.
    pub copied_bytes: u64,
    /// Uploads of streamed weights that runs of this pass used.
    pub uploads: Counter,
    /// Bytes in those copies.
    pub uploaded_bytes: u64,
    /// Waits for weights that had not been uploaded to their slot.
    pub slot_stalls: Counter,
    /// Runs whose weights were in a slot, or being uploaded to one, when the run was next.
    pub slot_hits: u64,
    /// Runs whose weights were not.
    pub slot_misses: u64,
    /// Reads of weights from disk. Several overlap, so their times may add up to more than the time that passed.
    pub reads: Counter,
    /// Bytes in those reads.
    pub read_bytes: u64,
    /// Experts that its runs used, where they are read by demand.
    pub experts_used: u64,
    /// Those that were in memory when the router selected them.
    pub expert_hits: u64,
    /// Waits for weights that had not been read from disk.
    pub disk_stalls: Counter,
    /// Waits for states on disk: for writes of the run before, and to start writes and reads. Each prefetch and each eviction counts, however short.
    pub state_stalls: Counter,
}

impl PassTelemetry {
    /// Zeros for these tracks.
    pub(crate) fn of(tracks: &[String]) -> Self {
        let mut compute: Vec<(String, Duration)> = Vec::new();
        for track in tracks {
            if !compute.iter().any(|(known, _)| known == track) {
                compute.push((track.clone(), Duration::ZERO));
            }
        }
        PassTelemetry { compute, ..Self::default() }
    }

    /// Zeros for the same tracks.
    pub(crate) fn begin(&mut self) {
        let mut compute = std::mem::take(&mut self.compute);
        compute.iter_mut().for_each(|(_, time)| *time = Duration::ZERO);
        *self = PassTelemetry { compute, ..Self::default() };
    }

    /// Adds time to a track; its index in `compute`.
    pub(crate) fn computed(&mut self, track: &str, time: Duration) -> Option<usize> {
        let at = self.compute.iter().position(|(known, _)| known == track)?;
        self.compute[at].1 += time;
        Some(at)
    }

    /// Time on the critical path whose cause is known: stage runs, copies between memories and waits.
    pub fn accounted(&self) -> Duration {
        let compute: Duration = self.compute.iter().map(|(_, time)| *time).sum();
        compute + self.copies.time + self.slot_stalls.time + self.disk_stalls.time + self.state_stalls.time
    }
}

/// What an engine measured since it was loaded or its telemetry was reset.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Telemetry {
    /// From the call of `load` to a ready engine.
    pub load: Duration,
    /// One entry for each stage, in the plan's order of partitions; a partition with another variant for prefill has two.
    pub stages: Vec<StageTelemetry>,
    /// Runs of a whole pass that had rows of several sequences.
    pub row_batches: u64,
    /// The tokens computed in them.
    pub batched_rows: u64,
    /// Copies of tensors between memories.
    pub copies: Counter,
    /// Bytes in those copies.
    pub copied_bytes: u64,
    /// Reads of weights from disk. Several overlap, so their times add up to more than the time that passed.
    pub reads: Counter,
    /// Bytes in those reads.
    pub read_bytes: u64,
    /// Bytes of all experts that are read by demand.
    pub expert_bytes: u64,
    /// Bytes of memory for them.
    pub expert_cache_bytes: u64,
    /// Experts that runs used and that were in memory.
    pub expert_hits: u64,
    /// Experts that runs used and whose reads had begun before the router selected them.
    pub experts_read_ahead: u64,
    /// Experts that runs used and that were read from disk for them.
    pub expert_misses: u64,
    /// Experts that were read ahead and then not used by the next run of their stage, or evicted before it.
    pub experts_read_in_vain: u64,
    /// Uploads of streamed weights to devices, without uploads at load.
    pub uploads: Counter,
    /// Bytes in those copies.
    pub uploaded_bytes: u64,
    /// Runs whose weights were in a slot, or being uploaded to one, when the run was next.
    pub slot_hits: u64,
    /// Runs whose weights were in no slot and not being uploaded, so that they were uploaded while the run waited.
    pub slot_misses: u64,
    /// Waits for weights that had not been uploaded to their slot.
    pub slot_stalls: Counter,
    /// Waits for weights that had not been read from disk.
    pub disk_stalls: Counter,
    /// Waits for states on disk: for writes of the run before, and to start writes and reads, and between passes to create and free sequences.
    /// Each prefetch and each eviction counts, however short.
    pub state_stalls: Counter,
    /// Whole passes that followed the schedule of prefill.
    pub prefill: Counter,
    /// Tokens in them.
    pub prefill_tokens: u64,
    /// Whole passes that followed the schedule of decoding.
    pub decode: Counter,
    /// Tokens in them.
    pub decode_tokens: u64,
    /// Bytes reserved for the states of all sequences made so far.
    pub state_bytes: u64,
    /// Most bytes of states on disk that are in memory at once; 0 without such states.
    pub state_window: u64,
    /// Memory use, taken when the telemetry is read.
    pub memory: MemoryUse,
}

/// Where an expert was when the router had selected it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertUse {
    InMemory,
    /// Read, or being read, because a prediction said that it would be selected.
    ReadAhead,
    /// On disk.
    Read,
}

impl Telemetry {
    /// Prefill tokens per second; `None` before the first.
    pub fn prefill_tokens_per_second(&self) -> Option<f64> {
        per_second(self.prefill_tokens, self.prefill.time)
    }

    /// Decoded tokens per second; `None` before the first.
    pub fn decode_tokens_per_second(&self) -> Option<f64> {
        per_second(self.decode_tokens, self.decode.time)
    }

    /// Resets times and counts of passes, not those of loading.
    pub(crate) fn reset_passes(&mut self) {
        for stage in &mut self.stages {
            (stage.prefill, stage.decode) = Default::default();
        }
        (self.row_batches, self.batched_rows) = Default::default();
        (self.copies, self.copied_bytes) = Default::default();
        (self.reads, self.read_bytes, self.disk_stalls) = Default::default();
        self.state_stalls = Default::default();
        (self.uploads, self.uploaded_bytes, self.slot_stalls) = Default::default();
        (self.slot_hits, self.slot_misses) = Default::default();
        (self.expert_hits, self.experts_read_ahead) = Default::default();
        (self.expert_misses, self.experts_read_in_vain) = Default::default();
        (self.prefill, self.prefill_tokens, self.decode, self.decode_tokens) = Default::default();
    }
}

fn per_second(tokens: u64, time: Duration) -> Option<f64> {
    (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
}
