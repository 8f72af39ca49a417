//! What `hpp-profile` and `hpp-exec probe` say to each other: one JSON object a line, requests on stdin, replies on stdout.
//!
//! The child answers [`Reply::Ready`] first, then each request in turn with any number of [`Reply::Measured`] or
//! [`Reply::Progress`] and one [`Reply::Done`] or [`Reply::Failed`]. It ends when stdin ends. Everything else it has to say
//! goes to stderr.

mod corpus;

pub use corpus::*;

use crate::{BandwidthCurve, DType, Host, Provider, Statistics, Timing, document};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The protocol version this build speaks.
pub const PROBE_VERSION: u32 = 1;

/// What the parent asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "request", deny_unknown_fields)]
pub enum Request {
    /// Run one partition on made-up inputs and time it.
    Partition(PartitionProbe),
    /// Decode tokens and time what of each no partition bears.
    Pass(PassProbe),
    /// Measure a path of the machine.
    Machine(MachineProbe),
    /// Run prompts through a model with taps and count what they show.
    Observe(ObserveProbe),
    /// Compare the scores of two models over prompts.
    Compare(CompareProbe),
}

/// A partition to time under one provider.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PartitionProbe {
    /// The partition's ONNX file.
    pub file: PathBuf,
    /// Directory its external data lies in.
    pub weights_dir: PathBuf,
    /// The unsplit model it was cut from.
    pub model: PathBuf,
    /// Bytes of all the model's weights.
    pub weight_bytes: u64,
    /// The provider to run it under; never another.
    pub provider: Provider,
    /// What to run, in order; the session stays loaded in between.
    pub cases: Vec<Case>,
}

/// Tokens to decode through a plan, which should compute next to nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PassProbe {
    /// The plan.
    pub plan: PathBuf,
    /// Tokens, one by one.
    pub tokens: u64,
    /// Bytes of other memory to read between two tokens, as a whole model does in a pass.
    pub evict_bytes: u64,
}

/// One shape of pass to time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Its name in replies.
    pub name: String,
    /// Every input of the partition.
    pub inputs: Vec<Feed>,
    /// Every output whose shape is known; others are left to the session.
    pub outputs: Vec<Fact>,
    /// States, whose past is among the inputs and whose present is among the outputs.
    pub carried: Vec<Carried>,
    /// Bytes of other memory to read between two runs: what the rest of the model would read, so that caches are as cold
    /// as they are in a whole pass.
    pub evict_bytes: u64,
    /// Runs that are not counted.
    pub warmup: u32,
    /// Fewest counted runs.
    pub min_runs: u32,
    /// Most counted runs.
    pub max_runs: u32,
    /// No further run begins after this time, milliseconds, once there are `min_runs`.
    pub budget_ms: f64,
}

/// An input and what to put there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Feed {
    /// The ONNX name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: Vec<u64>,
    /// Contents.
    pub fill: Fill,
}

/// What to put into a made-up input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum Fill {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// The same number everywhere in the first axis but the last, counting up along the last: positions from `start` on.
    Positions {
        /// The first position.
        start: i64,
    },
    /// Whole numbers below a limit, the same for the same seed.
    Integers {
        /// The limit.
        below: u64,
        /// Where chance starts.
        seed: u64,
    },
    /// Normally distributed with mean 0 and deviation 1, the same for the same seed.
    Normal {
        /// Where chance starts.
        seed: u64,
    },
    /// Like `normal` as far as an axis is filled, and zeros beyond, which take no memory: a buffer that is only partly in use.
    PartlyNormal {
        /// Where chance starts.
        seed: u64,
        /// The axis.
        axis: usize,
        /// Indices along it that are filled.
        filled: u64,
    },
    /// These numbers.
    Values {
        /// In row-major order.
        values: Vec<i64>,
    },
}

/// An output of known shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fact {
    /// The ONNX name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: Vec<u64>,
}

/// A state of the partition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Carried {
    /// The input.
    pub past: String,
    /// The output.
    pub present: String,
    /// Whether both are one buffer.
    pub in_place: bool,
}

/// A path of the machine to measure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "path", deny_unknown_fields)]
pub enum MachineProbe {
    /// Reading host memory.
    RamRead {
        /// Sizes of the arrays read, bytes.
        bytes: Vec<u64>,
    },
    /// Reading a file past the page cache.
    DiskRead {
        /// A large file on the disk in question; only read.
        file: PathBuf,
        /// Sizes of single reads, bytes.
        bytes: Vec<u64>,
    },
    /// Copies between host and device, both ways, pinned where that is possible, and pageable.
    Link {
        /// Whose device.
        provider: Provider,
        /// Sizes of single copies, bytes.
        bytes: Vec<u64>,
    },
    /// What reading host memory with all threads and copying to the device do to each other.
    Contention {
        /// Whose device.
        provider: Provider,
        /// Size of single copies, bytes.
        bytes: u64,
    },
    /// Arithmetic of the host in one matrix product.
    Arithmetic,
}

/// What the child says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "reply", deny_unknown_fields)]
pub enum Reply {
    /// First of all: who speaks.
    Ready {
        /// The protocol's version.
        version: u32,
        /// Machine and programs.
        host: Host,
    },
    /// The partition is loaded.
    Loaded {
        /// Milliseconds it took.
        load_ms: f64,
        /// The processor it computes on.
        processor: String,
    },
    /// A case was measured.
    Measured {
        /// The case.
        case: String,
        /// Its times.
        timing: Timing,
        /// Most bytes of the child in RAM so far, where the system tells.
        peak_resident: Option<u64>,
    },
    /// A case could not be measured; the next one is tried.
    CaseFailed {
        /// The case.
        case: String,
        /// Why.
        reason: String,
    },
    /// What of a token no partition bears was measured.
    Pass {
        /// Its times.
        timing: Timing,
    },
    /// A path of the machine was measured.
    Bandwidth {
        /// The curves.
        curves: Vec<BandwidthCurve>,
    },
    /// Contention was measured: time of each while the other goes on, over its time alone.
    Contention {
        /// Of reading host memory with all threads.
        compute: f64,
        /// Of copies.
        link: f64,
    },
    /// Arithmetic was measured.
    Arithmetic {
        /// 1e12 operations per second.
        tflops: f64,
    },
    /// One more prompt is done.
    Progress {
        /// Its line.
        line: u64,
        /// Its tokens.
        prompt_tokens: u64,
    },
    /// A prompt could not be used; the next one is tried.
    PromptFailed {
        /// Its line.
        line: u64,
        /// Why.
        reason: String,
    },
    /// What the prompts of this request showed.
    Observed {
        /// Sums.
        statistics: Statistics,
    },
    /// How far the scores are apart.
    Compared {
        /// Positions compared.
        positions: u64,
        /// Mean Kullback-Leibler divergence from the reference, nats.
        kl: f64,
        /// Part of the positions whose best token changed.
        top1_changed: f64,
    },
    /// The request is done.
    Done,
    /// The request failed; the next one may succeed.
    Failed {
        /// Why.
        reason: String,
    },
}

/// A line of the conversation, in either direction: what `schemas/probe.schema.json` describes.
#[derive(JsonSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only its schema is wanted")]
enum Line {
    Request(Request),
    Reply(Reply),
}

/// The JSON Schema of a line, as `schemas/probe.schema.json` has it.
pub fn probe_json_schema() -> String {
    document::json_schema::<Line>()
}
