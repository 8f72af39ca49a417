//! The protocol between `hpp-profile` and its child process `hpp-exec probe`: one JSON object per line, requests on
//! stdin, replies on stdout.
//!
//! The child first sends [`Reply::Ready`]. It answers each request in order with any number of results and [`Reply::Progress`], then one
//! [`Reply::Done`] or [`Reply::Failed`]. It exits when stdin ends. All other output goes to stderr.

mod corpus;
mod corpus_line;

pub use corpus::*;

use crate::{BandwidthCurve, DType, Host, HostKernels, Provider, Statistics, TimingStats, document};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The protocol version of this build.
pub const PROBE_VERSION: u32 = 4;

/// Fewer compared positions than this say little about other texts.
pub const FEW_POSITIONS: u64 = 1000;

/// A request of the parent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "request", deny_unknown_fields)]
pub enum Request {
    /// Run one partition on generated inputs and time it.
    Partition(PartitionProbe),
    /// Decode tokens and time the part of each outside partitions.
    Pass(PassProbe),
    /// Measure a rate of the machine.
    Machine(MachineProbe),
    /// Run prompts through a model with taps and collect statistics.
    Observe(ObserveProbe),
    /// Run prompts through a model with taps and sum the second moments of the tapped tensors.
    Moments(MomentsProbe),
    /// Compare the logits of two models on prompts.
    Compare(CompareProbe),
}

/// A partition to time under one provider.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PartitionProbe {
    /// The partition's ONNX file.
    pub file: PathBuf,
    /// Directory of its external data.
    pub weights_dir: PathBuf,
    /// What the partition and the unsplit model demand of CPU kernels.
    #[serde(default, skip_serializing_if = "HostKernels::is_default")]
    pub host_kernels: HostKernels,
    /// Bytes of all weights of the model.
    pub weight_bytes: u64,
    /// The provider to run it with, without fallback.
    pub provider: Provider,
    /// Cases to run, in order, in one session.
    pub cases: Vec<Case>,
}

/// Tokens to decode with a plan that computes almost nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PassProbe {
    /// The plan.
    pub plan: PathBuf,
    /// Number of tokens, decoded one by one.
    pub tokens: u64,
    /// Bytes of other memory to read between two tokens, so that caches are as cold as in a pass of the whole model.
    pub evict_bytes: u64,
}

/// One size of pass to time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Its name in replies.
    pub name: String,
    /// All inputs of the partition.
    pub inputs: Vec<Feed>,
    /// Outputs with known shapes; the session allocates others.
    pub outputs: Vec<OutputSpec>,
    /// States, with `past` among the inputs and `present` among the outputs.
    pub carried: Vec<Carried>,
    /// Bytes of other memory to read between two runs, so that caches are as cold as in a pass of the whole model.
    pub evict_bytes: u64,
    /// Warm-up runs, which are not counted.
    pub warmup: u32,
    /// Minimum of counted runs.
    pub min_runs: u32,
    /// Maximum of counted runs.
    pub max_runs: u32,
    /// Time after which no further run starts, milliseconds, once there are `min_runs`.
    pub budget_ms: f64,
}

/// An input and its generated contents.
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

/// Generated contents of an input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum Fill {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// Positions: counts up from `start` along the last axis, equal along all others.
    Positions {
        /// The first position.
        start: i64,
    },
    /// Pseudorandom integers below a limit.
    Integers {
        /// The limit.
        below: u64,
        /// Seed of the generator.
        seed: u64,
    },
    /// Pseudorandom numbers with mean 0 and standard deviation 1.
    Normal {
        /// Seed of the generator.
        seed: u64,
    },
    /// Like `normal` in the filled part of an axis, and untouched zero pages beyond: a partly filled buffer.
    PartlyNormal {
        /// Seed of the generator.
        seed: u64,
        /// The axis.
        axis: usize,
        /// Indices along it that are filled.
        filled: u64,
    },
    /// Given numbers.
    Values {
        /// In row-major order.
        values: Vec<i64>,
    },
}

/// An output with known shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OutputSpec {
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
    /// Whether both are bound to one buffer.
    pub in_place: bool,
}

/// A rate of the machine to measure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "path", deny_unknown_fields)]
pub enum MachineProbe {
    /// Reads of host memory.
    RamRead {
        /// Sizes of the arrays, bytes.
        bytes: Vec<u64>,
    },
    /// Direct reads of a file, which bypass the page cache.
    DiskRead {
        /// A large file on the disk to measure; never written.
        file: PathBuf,
        /// Sizes of single reads, bytes.
        bytes: Vec<u64>,
    },
    /// Mutual slowdown of reading host memory with all threads and reading a file past the page cache.
    DiskContention {
        /// A large file on the disk to measure; never written.
        file: PathBuf,
    },
    /// Decompression of weights by one thread.
    Decompress,
    /// Copies between host and device, in both directions, from pinned memory if possible and from pageable memory.
    Link {
        /// The provider of the device.
        provider: Provider,
        /// Sizes of single copies, bytes.
        bytes: Vec<u64>,
    },
    /// Mutual slowdown of reading host memory with all threads and copying to the device.
    Contention {
        /// The provider of the device.
        provider: Provider,
        /// Size of single copies, bytes.
        bytes: u64,
    },
    /// Arithmetic rate of the host in a matrix product.
    Arithmetic,
}

/// A reply of the child.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "reply", deny_unknown_fields)]
pub enum Reply {
    /// The first message of the child.
    Ready {
        /// The protocol's version.
        version: u32,
        /// Machine and software versions.
        host: Host,
    },
    /// The partition is loaded.
    Loaded {
        /// Load time, milliseconds.
        load_ms: f64,
        /// The processor that it computes on.
        processor: String,
    },
    /// A case was measured.
    Measured {
        /// The case.
        case: String,
        /// Its times.
        timing: TimingStats,
        /// Peak resident memory of the child so far, bytes, if the system reports it.
        peak_resident: Option<u64>,
    },
    /// A case could not be measured; the child continues with the next.
    CaseFailed {
        /// The case.
        case: String,
        /// The reason.
        reason: String,
    },
    /// The time outside partitions was measured.
    Pass {
        /// Its times.
        timing: TimingStats,
    },
    /// A rate of the machine was measured.
    Bandwidth {
        /// The curves.
        curves: Vec<BandwidthCurve>,
    },
    /// Contention was measured: the time of each activity while the other runs, divided by its time alone.
    Contention {
        /// Of reading host memory with all threads.
        compute: f64,
        /// Of copies, or of reads from disk.
        link: f64,
    },
    /// Arithmetic was measured.
    Arithmetic {
        /// 1e12 operations per second.
        tflops: f64,
    },
    /// A prompt is done.
    Progress {
        /// Its line in the corpus.
        line: u64,
        /// Tokens of the prompt.
        prompt_tokens: u64,
    },
    /// A prompt could not be used; the child continues with the next.
    PromptFailed {
        /// Its line in the corpus.
        line: u64,
        /// The reason.
        reason: String,
    },
    /// Statistics of the prompts of this request.
    Observed {
        /// The statistics.
        statistics: Statistics,
    },
    /// Second moments are in the file of the request.
    Moments {
        /// Positions that were summed.
        positions: u64,
        /// Numbers in a row of each tap, in the order of the request.
        widths: Vec<u64>,
    },
    /// Differences of the logits.
    Compared {
        /// Positions compared.
        positions: u64,
        /// Mean Kullback-Leibler divergence from the reference, nats.
        kl: f64,
        /// Share of the positions whose best token changed, 0 to 1.
        top1_changed: f64,
    },
    /// The request is done.
    Done,
    /// The request failed; the next one may succeed.
    Failed {
        /// The reason.
        reason: String,
    },
}

/// A message in either direction, as described by `schemas/probe.schema.json`.
#[derive(JsonSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only its schema is used")]
enum Line {
    Request(Request),
    Reply(Reply),
}

/// The JSON Schema of a message, as in `schemas/probe.schema.json`.
pub fn probe_json_schema() -> String {
    document::json_schema::<Line>()
}
