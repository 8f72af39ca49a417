//! What blocks cost: times at token counts, and the curves through them.

use crate::{ByteSize, Provider};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What of a token no partition bears: feeding it, binding what changed, reading its scores, choosing the next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PassCosts {
    /// Tokens with as many states and scores as the model's, and nothing computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timing: Option<Timing>,
    /// Why there are no times, where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// What blocks of one class cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ClassCosts {
    /// The class.
    pub class: u32,
    /// The block that was measured; with `--all-blocks` the entry speaks of this block alone.
    pub block: String,
    /// One entry for each provider asked for.
    pub providers: Vec<ProviderCosts>,
}

/// What a block costs under one provider.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProviderCosts {
    /// The provider.
    pub provider: Provider,
    /// Blocks, from `block` on and whatever their classes, that were also measured in one partition, to tell a block from
    /// the cost of starting a partition; 1 where nothing but single blocks was measured.
    #[schemars(range(min = 1))]
    pub run_length: u32,
    /// Cost of starting a partition, milliseconds, as the run of blocks shows it; absent where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1e9))]
    pub launch_ms: Option<f64>,
    /// One more token, with which the context has `tokens`. Empty for models that do not generate.
    pub decode: PhaseCosts,
    /// A pass of `tokens` into an empty context.
    pub prefill: PhaseCosts,
    /// Bytes of device or host memory the block was seen to take, where they can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
    /// Why there are no numbers, where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Times of one phase, and the curve through them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PhaseCosts {
    /// What was measured, in the order of tokens.
    pub points: Vec<CostPoint>,
    /// What they say of other token counts; absent where too few succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<Fit>,
}

/// The time of one block at one token count, the cost of starting a partition taken off.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CostPoint {
    /// Tokens of context (decode) or of the pass (prefill).
    #[schemars(range(min = 1))]
    pub tokens: u64,
    /// The block alone, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1e9))]
    pub ms: Option<f64>,
    /// Runs of the partition with one block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub single: Option<Timing>,
    /// Runs of the partition with `run_length` blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<Timing>,
    /// What could not be measured, with the reason; of the run where there is a time all the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Several runs of one thing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    /// Measured runs, warm-up apart.
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
/// Through a single point goes the constant (decode) or the line from zero (prefill).
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
    /// Largest distance from a measured point, as a part of it.
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
