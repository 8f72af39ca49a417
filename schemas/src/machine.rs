//! A machine in numbers: what `--machine FILE` reads, and what a profile measures of the machine it was made on.

use crate::document::{self, DocumentError, Format, finding};
use crate::{ByteSize, Finding, Provider};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

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
    /// For people.
    pub name: String,
    /// The execution provider that computes there.
    pub provider: Provider,
    /// Memory there is.
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
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub to_device_gb_per_s: f64,
    /// Device to host, in 1e9 bytes per second.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub from_device_gb_per_s: f64,
    /// Cost of starting a copy, microseconds.
    #[schemars(range(min = 0, max = 1e9))]
    pub latency_us: f64,
}

/// How much two things slow each other down when they happen at once. Both factors are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Contention {
    /// Time of computing on the host while the link is busy, over its time alone.
    #[schemars(range(min = 1, max = 1e6))]
    pub compute: f64,
    /// Time of a copy while the host computes, over its time alone.
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
}

const FORMAT: Format = Format { what: "machine file", header: "hpp_machine", version: MACHINE_VERSION };

impl Machine {
    /// Reads a machine file and checks it; everything wrong with it is in the one error.
    pub fn from_yaml(text: &str) -> Result<Machine, DocumentError> {
        document::read(text, FORMAT, beyond_the_schema)
    }

    /// Writes a machine file: fields in the order of the types, the same bytes for the same machine.
    pub fn to_yaml(&self) -> Result<String, DocumentError> {
        document::write(self, FORMAT)
    }

    /// Everything that is wrong with this machine, places as in the file.
    pub fn check(&self) -> Vec<Finding> {
        document::check(self, beyond_the_schema)
    }
}

/// The JSON Schema of a machine file, as `schemas/machine.schema.json` has it.
pub fn machine_json_schema() -> String {
    document::json_schema::<Machine>()
}

/// Memory of no bytes holds nothing, and an accelerator is no CPU.
fn beyond_the_schema(machine: &Value) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut memory = |place: String, of: &Value| {
        let bytes = ByteSize::deserialize(&of["memory"]);
        if bytes.is_ok_and(|bytes| bytes.0 == 0) {
            found.push(finding(format!("{place}.memory"), "memory of 0 bytes holds nothing"));
        }
    };
    memory("cpu".to_owned(), &machine["cpu"]);
    let gpus: Vec<&Value> = machine["gpus"].as_array().into_iter().flatten().collect();
    for (at, gpu) in gpus.iter().enumerate() {
        memory(format!("gpus[{at}]"), gpu);
    }
    for (at, _) in gpus.iter().enumerate().filter(|(_, gpu)| gpu["provider"] == "cpu") {
        let place = format!("gpus[{at}].provider");
        found.push(finding(place, "the cpu provider computes on the host, which is described under cpu"));
    }
    found
}
