//! Costs of blocks: times at several token counts, and curves fitted to them.

use crate::{ByteSize, Provider};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Time per token outside partitions: feeding inputs, binding buffers, reading logits, sampling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PassCosts {
    /// Times of tokens of a model with the same numbers of states and logits that computes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timing: Option<TimingStats>,
    /// Reason of a failed measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Costs of the blocks of one class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ClassCosts {
    /// The class.
    pub class: u32,
    /// The measured block; with `--all-blocks` the entry is for this block only.
    pub block: String,
    /// One entry for each requested provider.
    pub providers: Vec<ProviderCosts>,
}

/// Costs of a block with one provider.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProviderCosts {
    /// The provider.
    pub provider: Provider,
    /// Number of consecutive blocks, from `block` on, that were also measured as one partition, to separate the time of
    /// a block from the launch time; 1 if only single blocks were measured.
    #[schemars(range(min = 1))]
    pub run_length: u32,
    /// Launch time of a partition, milliseconds, derived from the run of blocks; absent without a run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1e9))]
    pub launch_ms: Option<f64>,
    /// One token that extends the context to `tokens`. Empty for models that do not generate.
    pub decode: PhaseCosts,
    /// A pass of `tokens` into an empty context.
    pub prefill: PhaseCosts,
    /// Measured device or host memory of the block, bytes, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
    /// Reason of a failed measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Times of one phase, and the curve fitted to them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PhaseCosts {
    /// Measured points, in increasing order of tokens.
    pub points: Vec<CostPoint>,
    /// The fitted curve; absent if too few measurements succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<Fit>,
}

/// The time of one block at one token count, without the launch time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CostPoint {
    /// Tokens of context (decode) or of the pass (prefill).
    #[schemars(range(min = 1))]
    pub tokens: u64,
    /// Time of the block, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1e9))]
    pub ms: Option<f64>,
    /// Runs of the partition with one block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub single: Option<TimingStats>,
    /// Runs of the partition with `run_length` blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<TimingStats>,
    /// Reason of a failed measurement; of the run of blocks if there is a time for the single block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Times of several runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TimingStats {
    /// Measured runs, without warm-up.
    #[schemars(range(min = 1))]
    pub runs: u32,
    /// Median, milliseconds.
    #[schemars(range(min = 0, max = 1e9))]
    pub median_ms: f64,
    /// First decile, milliseconds.
    #[schemars(range(min = 0, max = 1e9))]
    pub p10_ms: f64,
    /// Ninth decile, milliseconds.
    #[schemars(range(min = 0, max = 1e9))]
    pub p90_ms: f64,
}

/// `ms(tokens) = constant + linear * tokens + quadratic * tokens^2`, no term negative.
///
/// A single point gives a constant (decode) or a line through zero (prefill).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fit {
    /// Milliseconds.
    #[schemars(range(min = 0, max = 1e9))]
    pub constant_ms: f64,
    /// Milliseconds per token.
    #[schemars(range(min = 0, max = 1e9))]
    pub linear_ms: f64,
    /// Milliseconds per token squared.
    #[schemars(range(min = 0, max = 1e9))]
    pub quadratic_ms: f64,
    /// Largest relative error at a measured point.
    #[schemars(range(min = 0))]
    pub worst_relative_error: f64,
    /// Coefficient of determination; 1 is a perfect fit.
    #[schemars(range(max = 1))]
    pub r2: f64,
}

impl Fit {
    /// Milliseconds at this many tokens.
    pub fn ms(&self, tokens: u64) -> f64 {
        let t = tokens as f64;
        self.constant_ms + t * (self.linear_ms + t * self.quadratic_ms)
    }
}
