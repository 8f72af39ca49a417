//! A machine in numbers: what `--machine FILE` reads, and what a profile measures of the machine it was made on.

use crate::{ByteSize, Provider};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The machine file version this build writes and reads.
pub const MACHINE_VERSION: u32 = 1;

/// A machine: memory, bandwidths and arithmetic rates that programs really get, not peaks on paper.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Format version of this file. Always the first field.
    pub hpp_machine: u32,
    /// For people.
    pub name: String,
    /// Where the numbers come from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
    /// The host.
    pub cpu: CpuRates,
    /// Accelerators, in the order gpu0, gpu1, ...
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuRates>,
    /// Where weights lie that do not fit in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskRates>,
}

/// The host processor and its memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CpuRates {
    /// Memory there is.
    pub memory: ByteSize,
    /// Read bandwidth of memory with the threads used, in 1e9 bytes per second.
    pub memory_gb_per_s: f64,
    /// Arithmetic in matrix products, in 1e12 operations per second (a multiply-add counts two).
    pub tflops: f64,
    /// Cost of starting a partition, microseconds.
    pub launch_us: f64,
}

/// An accelerator, its memory and its link to the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GpuRates {
    /// For people.
    pub name: String,
    /// The execution provider that computes there.
    pub provider: Provider,
    /// Memory there is.
    pub memory: ByteSize,
    /// Read bandwidth of its memory, in 1e9 bytes per second.
    pub memory_gb_per_s: f64,
    /// Arithmetic in matrix products, in 1e12 operations per second.
    pub tflops: f64,
    /// Cost of starting a partition, microseconds.
    pub launch_us: f64,
    /// The way to the host.
    pub link: Link,
    /// What computing on the host and moving bytes do to each other; absent means nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contention: Option<Contention>,
}

/// A link between host and device memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Host to device from pinned memory (from any memory where nothing can be pinned), in 1e9 bytes per second.
    pub to_device_gb_per_s: f64,
    /// Device to host, in 1e9 bytes per second.
    pub from_device_gb_per_s: f64,
    /// Cost of starting a copy, microseconds.
    pub latency_us: f64,
}

/// How much two things slow each other down when they happen at once. Both factors are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Contention {
    /// Time of computing on the host while the link is busy, over its time alone.
    pub compute: f64,
    /// Time of a copy while the host computes, over its time alone.
    pub link: f64,
}

/// A disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskRates {
    /// Direct reads of large blocks, in 1e9 bytes per second.
    pub read_gb_per_s: f64,
}
