//! The profile: what was measured of a model on a machine. Written after each measurement, read by `hpp-split --profile`.
//!
//! Times are milliseconds, medians of several runs. A measurement that failed keeps its place with the reason. What is not
//! measured yet has no entry among the points, so that a profile is good at every moment.

mod check;
mod costs;

pub use costs::*;

use crate::document::{self, DocumentError, Format};
use crate::{ByteSize, Finding, Machine, Provider, Statistics};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The profile version this build writes and reads.
pub const PROFILE_VERSION: u32 = 1;

/// From this share of CPU time taken by other programs on, measured times are doubtful.
pub const BUSY_CPU_SHARE: f64 = 0.10;

/// Everything measured of one model on one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Format version of this file. Always the first field.
    pub hpp_profile: u32,
    /// Which model was measured.
    pub model: ProfiledModel,
    /// Which machine it was measured on.
    pub host: Host,
    /// When the profile was begun, RFC 3339.
    pub date: String,
    /// How it was measured.
    pub settings: ProfileSettings,
    /// What the machine can do.
    pub machine: MeasuredMachine,
    /// What of a token no partition bears; absent before it was measured, and in profiles of a version that did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass: Option<PassCosts>,
    /// What each class of isomorphic blocks costs.
    pub classes: Vec<ClassCosts>,
    /// What the corpus showed; absent before it was run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub corpus: Option<CorpusStatistics>,
    /// What rounding one block's weights does to the scores; absent where it was not asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sensitivity: Vec<Sensitivity>,
    /// Gain of each block on a device for each byte it takes there; absent without a device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hotness: Vec<BlockHotness>,
    /// Largest share of the machine's CPU time that other programs took during the measurements of one start of hpp-profile, 0 to 1;
    /// absent where the system does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub others_cpu_share: Option<f64>,
    /// What else a person should know: what was left out, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The model a profile speaks of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfiledModel {
    /// For people.
    pub name: String,
    /// BLAKE3 of the model file and samples of its weights: a profile of another model is refused.
    pub hash: String,
    /// Bytes of all weights.
    pub weight_bytes: ByteSize,
    /// Blocks in execution order.
    pub blocks: Vec<ProfiledBlock>,
}

/// A block of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfiledBlock {
    /// `embedding`, `layers.3`, `head`.
    pub label: String,
    /// Blocks of one class are the same graph with other weights.
    pub class: u32,
    /// Bytes of its weights.
    pub weight_bytes: ByteSize,
}

/// The machine and programs a profile was made with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// The processor, as it calls itself.
    pub cpu: String,
    /// Physical cores.
    #[schemars(range(min = 1))]
    pub cores: u32,
    /// Memory there is.
    pub memory: ByteSize,
    /// Operating system and architecture.
    pub system: String,
    /// Threads used for computing.
    #[schemars(range(min = 1))]
    pub threads: u32,
    /// Version of ONNX Runtime.
    pub onnxruntime: String,
    /// Version of HPP.
    pub hpp: String,
    /// Processors each provider computes on, as their owners call them.
    pub devices: Vec<HostDevice>,
}

/// What a provider computes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HostDevice {
    /// The provider.
    pub provider: Provider,
    /// The processor.
    pub name: String,
    /// Memory of its own, where it tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
}

/// How a profile was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfileSettings {
    /// Providers asked for.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub providers: Vec<Provider>,
    /// Context lengths at which decoding was measured, tokens.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub contexts: Vec<u64>,
    /// Token counts at which prefill was measured.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub prefill_tokens: Vec<u64>,
    /// Fewer runs of fewer cases.
    pub quick: bool,
    /// Every block instead of one of each class.
    pub all_blocks: bool,
    /// Tokens generated after each prompt of the corpus.
    pub decode_tokens: u64,
}

/// The machine in numbers, with the curves they were read from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeasuredMachine {
    /// The numbers planning uses; absent until all of them are measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Machine>,
    /// Bandwidth by size, one entry for each thing measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub curves: Vec<BandwidthCurve>,
    /// Arithmetic of the host in matrix products with the threads used for computing, in 1e12 operations per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub tflops: Option<f64>,
    /// What computing on the host and copying do to each other, one entry for each device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contention: Vec<MeasuredContention>,
    /// What could not be measured, with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<String>,
}

/// Contention between the host's memory and one device's link: time of each while the other goes on, over its time alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeasuredContention {
    /// The provider whose device it is.
    pub provider: Provider,
    /// Of reading host memory with all threads.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub compute: f64,
    /// Of copies to the device.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub link: f64,
}

/// Bandwidth of one path by size of what is moved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BandwidthCurve {
    /// Which path.
    pub path: BandwidthPath,
    /// Points in the order of size.
    pub points: Vec<BandwidthPoint>,
}

/// A path bytes take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum BandwidthPath {
    /// Reading host memory with the threads used for computing.
    RamRead,
    /// Reading the disk the model lies on, past the page cache.
    DiskRead,
    /// Between host and device memory.
    Link {
        /// The provider whose device it is.
        provider: Provider,
        /// Host to device, or back.
        to_device: bool,
        /// Whether the host's side was pinned.
        pinned: bool,
    },
}

/// One measured bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BandwidthPoint {
    /// Bytes in one piece.
    #[schemars(range(min = 1))]
    pub bytes: u64,
    /// Median, in 1e9 bytes per second.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub gb_per_s: f64,
}

/// What running the corpus showed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CorpusStatistics {
    /// BLAKE3 of the corpus file.
    pub hash: String,
    /// Prompts taken from it so far.
    pub prompts_done: u64,
    /// Prompts it has, or `--max-prompts`; absent while it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompts_in_all: Option<u64>,
    /// Lines that were skipped because they could not be read or used, with the reason; the first few.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<String>,
    /// Lines that were skipped.
    pub skipped_in_all: u64,
    /// What was counted.
    pub statistics: Statistics,
}

/// What rounding one block's weights does to the scores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Sensitivity {
    /// The block.
    pub block: String,
    /// Bits its weights were rounded to, in groups of 32 with one scale each.
    pub bits: u32,
    /// Positions compared.
    pub positions: u64,
    /// Mean Kullback-Leibler divergence of the scores from those of the model as it is, nats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub kl: Option<f64>,
    /// Part of the positions whose best token changed, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub top1_changed: Option<f64>,
    /// Why there are no numbers, where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// `(cpu_ms - gpu_ms) / (weight_bytes + kv_bytes)` of a block, with its terms, for each phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockHotness {
    /// The block.
    pub block: String,
    /// The device's provider.
    pub provider: Provider,
    /// One more token at the longest context measured.
    pub decode: HotnessTerms,
    /// A pass of the most tokens measured.
    pub prefill: HotnessTerms,
}

/// The terms of a hotness.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HotnessTerms {
    /// Time on the host, milliseconds.
    #[schemars(range(min = 0, max = 1e9))]
    pub cpu_ms: f64,
    /// Time on the device, milliseconds.
    #[schemars(range(min = 0, max = 1e9))]
    pub gpu_ms: f64,
    /// Weights the device would hold, bytes.
    pub weight_bytes: u64,
    /// State the device would hold, bytes.
    pub kv_bytes: u64,
    /// Milliseconds saved per GiB of device memory.
    pub ms_per_gib: f64,
}

const FORMAT: Format = Format { what: "profile", header: "hpp_profile", version: PROFILE_VERSION };

impl Profile {
    /// A warning for people where other programs kept the machine busy during the measurements.
    pub fn busy_machine(&self) -> Option<String> {
        let share = self.others_cpu_share.filter(|share| *share >= BUSY_CPU_SHARE)?;
        Some(format!(
            "other programs took {:.0} % of the CPU time during the measurements: times are too long and vary; profile again on an idle \
             machine before relying on them",
            share * 100.0
        ))
    }

    /// Reads a profile and checks it; everything wrong with it is in the one error.
    pub fn from_yaml(text: &str) -> Result<Profile, DocumentError> {
        document::read(text, FORMAT, check::beyond_the_schema)
    }

    /// Writes a profile: fields in the order of the types, the same bytes for the same profile.
    pub fn to_yaml(&self) -> Result<String, DocumentError> {
        document::write(self, FORMAT)
    }

    /// Everything in this profile that cannot have been measured: negative times, classes that are missing or occur twice,
    /// blocks the model does not have. Places are as in the file. What is not measured yet is no finding.
    pub fn check(&self) -> Vec<Finding> {
        document::check(self, check::beyond_the_schema)
    }
}

/// The JSON Schema of a profile, as `schemas/profile.schema.json` has it.
pub fn profile_json_schema() -> String {
    document::json_schema::<Profile>()
}
