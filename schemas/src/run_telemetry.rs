//! What a run of a plan measured, as far as the planner uses it: a part of the JSON object that `hpp-exec bench PLAN --json` prints.

use serde::Deserialize;

/// Measurements of a benchmark. Other fields of the object are ignored.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct RunTelemetry {
    /// Name of the model.
    pub model: String,
    /// Whether the unsplit model ran instead of the plan's partitions.
    pub unsplit: bool,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens generated after it.
    pub new_tokens: u64,
    /// Percent of the machine's CPU time that other processes took; absent if so little that it does not disturb.
    #[serde(default)]
    pub others_cpu_percent: Option<u64>,
    /// Where the time of a decoded token goes; absent if none was decoded.
    #[serde(default)]
    pub token: Option<TokenTelemetry>,
    /// Times of the partitions.
    pub stages: Vec<StageTelemetry>,
    /// Weights read from disk; absent if none were.
    #[serde(default)]
    pub disk: Option<DiskTelemetry>,
}

/// Times of one partition.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct StageTelemetry {
    /// Its device in the plan.
    pub device: String,
    /// Name of the execution provider that ran it.
    pub provider: String,
    /// Labels of its blocks.
    pub blocks: Vec<String>,
    /// Its time in all passes of the prompt, milliseconds; 0 if it took no part in them.
    pub prefill_ms: f64,
    /// Its mean time per decoded token, milliseconds; 0 if it took no part.
    pub decode_ms_per_token: f64,
    /// The median of the same.
    #[serde(default)]
    pub decode_ms_median: Option<f64>,
}

/// Where the time of a decoded token goes: medians over all decoded tokens.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct TokenTelemetry {
    /// Its time outside of partitions, copies and waits, milliseconds.
    pub rest_ms: f64,
    /// What it reads from disk; absent if nothing.
    #[serde(default)]
    pub disk: Option<TokenReads>,
    /// Experts that are read by demand; absent if it uses none.
    #[serde(default)]
    pub experts: Option<TokenExperts>,
}

/// Experts that a token uses.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct TokenExperts {
    /// How many.
    pub used: f64,
    /// How many are in memory when the router selects them.
    pub in_memory: f64,
}

/// Reads of weights for one token.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct TokenReads {
    /// Time in which the disk reads, milliseconds.
    pub busy_ms: f64,
}

/// Reads of weights.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct DiskTelemetry {
    /// Their rate, 1e9 bytes per second.
    pub gb_per_second: f64,
    /// Experts that are read by demand; absent if none were used.
    #[serde(default)]
    pub experts: Option<ExpertMemoryTelemetry>,
}

/// Memory for experts that are read by demand. Runs by earlier versions do not tell it: both are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ExpertMemoryTelemetry {
    /// Bytes of all experts.
    pub all_bytes: u64,
    /// Bytes of memory for them.
    pub cache_bytes: u64,
}

impl RunTelemetry {
    /// Reads the object.
    ///
    /// # Errors
    /// The text is not JSON, or another object.
    pub fn from_json(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }
}
