//! The machine file: memory sizes and rates of a machine, for `--machine FILE` and as measured in a profile.

use crate::document::{self, DocumentError, DocumentFormat};
use crate::size::MIN_UNITLESS_BYTES;
use crate::{ByteSize, Finding, Provider};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The machine file version that this build reads and writes.
pub const MACHINE_VERSION: u32 = 1;

/// A machine: memory, and the bandwidths and arithmetic rates that programs achieve, not theoretical peaks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Format version of this file. Always the first field.
    pub hpp_machine: u32,
    /// Label.
    pub name: String,
    /// Where the numbers come from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
    /// The host.
    pub cpu: CpuRates,
    /// Accelerators, in the order gpu0, gpu1, ...
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuRates>,
    /// The disk that weights are read from if they do not fit in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskRates>,
}

/// The host processor and its memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CpuRates {
    /// Size of the memory.
    pub memory: ByteSize,
    /// Read bandwidth of memory with the threads used, in 1e9 bytes per second.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub memory_gb_per_s: f64,
    /// Arithmetic in matrix products, in 1e12 operations per second (a multiply-add counts two).
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub tflops: f64,
    /// Cost of starting a partition, microseconds.
    #[schemars(range(min = 0, max = 1e9))]
    pub launch_us: f64,
}

/// An accelerator, its memory and its link to the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GpuRates {
    /// Label.
    pub name: String,
    /// Its execution provider.
    pub provider: Provider,
    /// Size of the memory.
    pub memory: ByteSize,
    /// Read bandwidth of its memory, in 1e9 bytes per second.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub memory_gb_per_s: f64,
    /// Arithmetic in matrix products, in 1e12 operations per second.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub tflops: f64,
    /// Cost of starting a partition, microseconds.
    #[schemars(range(min = 0, max = 1e9))]
    pub launch_us: f64,
    /// Its link to the host.
    pub link: Link,
    /// Mutual slowdown of computing on the host and copying; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contention: Option<Contention>,
}

/// A link between host and device memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Host to device from pinned memory (pageable where pinning is impossible), in 1e9 bytes per second.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub to_device_gb_per_s: f64,
    /// Device to host, in 1e9 bytes per second.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub from_device_gb_per_s: f64,
    /// Cost of starting a copy, microseconds.
    #[schemars(range(min = 0, max = 1e9))]
    pub latency_us: f64,
}

/// Mutual slowdown of concurrent host computation and copies. Both factors are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Contention {
    /// Time of computing on the host while the link is busy, divided by its time alone.
    #[schemars(range(min = 1, max = 1e6))]
    pub compute: f64,
    /// Time of a copy while the host computes, divided by its time alone.
    #[schemars(range(min = 1, max = 1e6))]
    pub link: f64,
}

/// A disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskRates {
    /// Direct reads of large blocks, in 1e9 bytes per second.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub read_gb_per_s: f64,
    /// Decompression by one thread of weights that are stored compressed, in 1e9 uncompressed bytes per second; absent if not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub decompress_gb_per_s: Option<f64>,
    /// Mutual slowdown of computing on the host and reading; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contention: Option<DiskContention>,
}

/// Mutual slowdown of concurrent host computation and reads from disk. Both factors are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskContention {
    /// Time of computing on the host while the disk is read, divided by its time alone.
    #[schemars(range(min = 1, max = 1e6))]
    pub compute: f64,
    /// Time of a read while the host computes, divided by its time alone.
    #[schemars(range(min = 1, max = 1e6))]
    pub read: f64,
}

const FORMAT: DocumentFormat = DocumentFormat { what: "machine file", header: "hpp_machine", version: MACHINE_VERSION };

impl Machine {
    /// Reads and checks a machine file; the error contains all findings.
    pub fn from_yaml(text: &str) -> Result<Machine, DocumentError> {
        document::read(text, FORMAT, beyond_the_schema)
    }

    /// Writes a machine file. Equal machines give equal bytes.
    pub fn to_yaml(&self) -> Result<String, DocumentError> {
        document::write(self, FORMAT)
    }

    /// All errors in this machine, with places as in the file.
    pub fn check(&self) -> Vec<Finding> {
        document::check(self, beyond_the_schema)
    }
}

/// The JSON Schema of a machine file, as in `schemas/machine.schema.json`.
pub fn machine_json_schema() -> String {
    document::json_schema::<Machine>()
}

/// Rules that the schema cannot express: a memory size is not 0 and not a number that lacks its unit, and the provider of a GPU is not the CPU.
fn beyond_the_schema(machine: &Value) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut memory = |place: String, of: &Value| {
        let bytes = ByteSize::deserialize(&of["memory"]);
        match bytes {
            Ok(ByteSize(0)) => found.push(Finding::error(format!("{place}.memory"), "memory of 0 bytes holds nothing")),
            Ok(bytes) if bytes.0 < MIN_UNITLESS_BYTES => {
                let why = format!("memory of {} bytes: did you mean {} GiB?", bytes.0, bytes.0);
                found.push(Finding::error(format!("{place}.memory"), why));
            }
            _ => {}
        }
    };
    memory("cpu".to_owned(), &machine["cpu"]);
    let gpus: Vec<&Value> = machine["gpus"].as_array().into_iter().flatten().collect();
    for (at, gpu) in gpus.iter().enumerate() {
        memory(format!("gpus[{at}]"), gpu);
    }
    for (at, _) in gpus.iter().enumerate().filter(|(_, gpu)| gpu["provider"] == "cpu") {
        let place = format!("gpus[{at}].provider");
        found.push(Finding::error(place, "the cpu provider computes on the host, which is described under cpu"));
    }
    found
}
