//! The profile: measurements of a model on a machine. `hpp-profile` writes it after each measurement, `hpp-split
//! --profile` reads it.
//!
//! Times are medians of several runs, milliseconds. A failed measurement is recorded with its reason. Pending
//! measurements have no points, so an incomplete profile is valid.

mod check;
mod costs;

pub use costs::*;

use crate::document::{self, DocumentError, DocumentFormat};
use crate::{Activations, ByteSize, DiskContention, Finding, Machine, Provider, ProviderOptions, Statistics};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The profile version that this build reads and writes.
pub const PROFILE_VERSION: u32 = 1;

/// Share of CPU time used by other programs from which measured times are unreliable.
pub const BUSY_CPU_SHARE: f64 = 0.10;

/// All measurements of one model on one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Format version of this file. Always the first field.
    pub hpp_profile: u32,
    /// The model.
    pub model: ProfiledModel,
    /// The machine.
    pub host: Host,
    /// Start of the measurements, RFC 3339.
    pub date: String,
    /// Settings of the measurements.
    pub settings: ProfileSettings,
    /// Rates of the machine.
    pub machine: MeasuredMachine,
    /// Time per token outside partitions; absent before it is measured, and in profiles of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass: Option<PassCosts>,
    /// Costs of each class of isomorphic blocks.
    pub classes: Vec<ClassCosts>,
    /// Statistics of the corpus; absent before it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub corpus: Option<CorpusStatistics>,
    /// Effect of rounding one block's weights on the logits; absent unless requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sensitivity: Vec<Sensitivity>,
    /// Time saved per byte by placing each block on a device; absent without a device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hotness: Vec<BlockHotness>,
    /// Largest share of the machine's CPU time that other programs used during one run of hpp-profile, 0 to 1; absent
    /// if the system does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub others_cpu_share: Option<f64>,
    /// Notes for users: what was left out, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The model of a profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfiledModel {
    /// Label.
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
    /// Its class. Blocks of one class have the same graph and different weights.
    pub class: u32,
    /// Bytes of its weights.
    pub weight_bytes: ByteSize,
}

/// The machine and the software versions of a profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Model name of the processor.
    pub cpu: String,
    /// Physical cores.
    #[schemars(range(min = 1))]
    pub cores: u32,
    /// Size of the memory.
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
    /// Devices of each provider.
    pub devices: Vec<HostDevice>,
}

/// The device of a provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HostDevice {
    /// The provider.
    pub provider: Provider,
    /// Its name.
    pub name: String,
    /// Its own memory, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
}

/// Settings of a profile's measurements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfileSettings {
    /// Requested providers.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub providers: Vec<Provider>,
    /// Options that the providers got, by provider.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub provider_options: BTreeMap<Provider, ProviderOptions>,
    /// Context lengths at which decoding was measured, tokens.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub contexts: Vec<u64>,
    /// Token counts at which prefill was measured.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub prefill_tokens: Vec<u64>,
    /// Whether `--quick` was given: fewer runs of fewer cases.
    pub quick: bool,
    /// Whether every block was measured instead of one per class.
    pub all_blocks: bool,
    /// The activations that 4- and 8-bit weights multiply: `--int8-activations`.
    #[serde(default, skip_serializing_if = "Activations::are_exported")]
    pub activations: Activations,
    /// Tokens generated after each prompt of the corpus.
    pub decode_tokens: u64,
}

/// Rates of the machine, and the bandwidth curves that they are read from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeasuredMachine {
    /// The rates that the planner uses; absent until all are measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Machine>,
    /// Bandwidth by size, one curve per path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub curves: Vec<BandwidthCurve>,
    /// Arithmetic of the host in matrix products with the threads used for computing, in 1e12 operations per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub tflops: Option<f64>,
    /// Mutual slowdown of host computation and copies, one entry per device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contention: Vec<MeasuredContention>,
    /// Mutual slowdown of host computation and reads from disk; absent if not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_contention: Option<DiskContention>,
    /// Failed measurements, with reasons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<String>,
}

/// Contention between the host's memory and one device's link: the time of each activity while the other runs, divided
/// by its time alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeasuredContention {
    /// The provider of the device.
    pub provider: Provider,
    /// For reads of host memory with all threads.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub compute: f64,
    /// For copies to the device.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub link: f64,
}

/// Bandwidth of one path by size of the transfer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BandwidthCurve {
    /// The path.
    pub path: BandwidthPath,
    /// Points in increasing order of size.
    pub points: Vec<BandwidthPoint>,
}

/// A path of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum BandwidthPath {
    /// Reads of host memory with the threads used for computing.
    RamRead,
    /// Direct reads of the model's disk, which bypass the page cache.
    DiskRead,
    /// Decompression of weights by one thread, in uncompressed bytes.
    Decompress,
    /// Between host and device memory.
    Link {
        /// The provider of the device.
        provider: Provider,
        /// Host to device, or back.
        to_device: bool,
        /// Whether the host memory was pinned.
        pinned: bool,
    },
}

/// One measured bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BandwidthPoint {
    /// Bytes of one transfer.
    #[schemars(range(min = 1))]
    pub bytes: u64,
    /// Median, in 1e9 bytes per second.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub gb_per_s: f64,
}

/// Statistics of a corpus run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CorpusStatistics {
    /// BLAKE3 of the corpus file.
    pub hash: String,
    /// BLAKE3 of the prompts to run, in order; absent in profiles of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompts_hash: Option<String>,
    /// Prompts done so far.
    pub prompts_done: u64,
    /// Prompts to run: all of the corpus, or `--max-prompts`; absent while unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompts_in_all: Option<u64>,
    /// The first few skipped lines, with reasons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<String>,
    /// Number of skipped lines.
    pub skipped_in_all: u64,
    /// The statistics.
    pub statistics: Statistics,
}

/// Effect of rounding one block's weights on the logits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Sensitivity {
    /// The block.
    pub block: String,
    /// Bits per rounded weight, in groups of 32 with one scale each.
    pub bits: u32,
    /// Positions compared.
    pub positions: u64,
    /// Mean Kullback-Leibler divergence from the unchanged model, nats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub kl: Option<f64>,
    /// Share of the positions whose best token changed, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub top1_changed: Option<f64>,
    /// Reason of a failed measurement.
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
    /// For one token at the longest measured context.
    pub decode: HotnessTerms,
    /// For a pass with the largest measured number of tokens.
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
    /// Weights that the device would hold, bytes.
    pub weight_bytes: u64,
    /// State that the device would hold, bytes.
    pub kv_bytes: u64,
    /// Milliseconds saved per GiB of device memory.
    pub ms_per_gib: f64,
}

const FORMAT: DocumentFormat = DocumentFormat { what: "profile", header: "hpp_profile", version: PROFILE_VERSION };

impl Profile {
    /// A warning if other programs kept the machine busy during the measurements.
    pub fn busy_machine(&self) -> Option<String> {
        let share = self.others_cpu_share.filter(|share| *share >= BUSY_CPU_SHARE)?;
        Some(format!(
            "other programs took {:.0} % of the CPU time during the measurements: times are too long and vary; profile again on an idle \
             machine before relying on them",
            share * 100.0
        ))
    }

    /// Reads and checks a profile; the error contains all findings.
    pub fn from_yaml(text: &str) -> Result<Profile, DocumentError> {
        document::read(text, FORMAT, check::beyond_the_schema)
    }

    /// Writes a profile. Equal profiles give equal bytes.
    pub fn to_yaml(&self) -> Result<String, DocumentError> {
        document::write(self, FORMAT)
    }

    /// All errors in this profile: negative times, missing or repeated classes, unknown blocks. Places are as in the
    /// file. Pending measurements are no errors.
    pub fn check(&self) -> Vec<Finding> {
        document::check(self, check::beyond_the_schema)
    }
}

/// The JSON Schema of a profile, as in `schemas/profile.schema.json`.
pub fn profile_json_schema() -> String {
    document::json_schema::<Profile>()
}
