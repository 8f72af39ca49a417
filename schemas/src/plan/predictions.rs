//! Predicted times of a plan.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

impl Predictions {
    /// The `source` of predictions from shapes and assumed rates.
    pub const STATIC: &str = "static";

    /// Whether the times come from shapes and assumed rates alone.
    pub fn is_static(&self) -> bool {
        self.source == Self::STATIC
    }
}

/// Predicted times of a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Predictions {
    /// Source of the numbers: `static` (shapes and assumed rates), `machine: NAME` or `profile: FILE of DATE`; then `, corrected by FILE` with
    /// `--from-telemetry`, and `, refined` with `--refine`.
    pub source: String,
    /// Milliseconds per generated token at `decode_context`.
    pub decode_ms: f64,
    /// Milliseconds from the prompt to the first token.
    pub time_to_first_token_ms: f64,
    /// Prompt length that `time_to_first_token_ms` assumes, tokens.
    pub prompt_tokens: u64,
    /// Tokens per second while decoding.
    pub decode_tokens_per_second: f64,
    /// Context length that `decode_ms` assumes, tokens; 0 if unknown.
    #[serde(default)]
    pub decode_context: u64,
    /// Answer length that the objective assumes, tokens.
    #[serde(default)]
    pub new_tokens: u64,
    /// The bottleneck, in one line: the resource that is busy longest in each phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// The minimised objective; absent if blocks were placed by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objective: Option<Achieved>,
    /// Several sequences together, and several tokens of one; absent for models that do not generate tokens with states.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throughput: Option<PredictedThroughput>,
}

/// Predictions for passes over several sequences, and over several tokens of one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PredictedThroughput {
    /// Sequences to run together: `hpp-exec jobs` runs as many.
    #[schemars(range(min = 1))]
    pub sequences: u64,
    /// Generated tokens per second of all of them, each with `prompt_tokens` and `new_tokens`.
    pub tokens_per_second: f64,
    /// The largest number of sequences whose pass takes at most a tenth longer than a pass of one.
    #[schemars(range(min = 1))]
    pub free_sequences: u64,
    /// Times of passes at `decode_context`.
    #[serde(serialize_with = "crate::dim::each_on_one_line")]
    pub passes: Vec<PredictedPass>,
}

/// The time of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PredictedPass {
    /// Sequences in the pass.
    #[schemars(range(min = 1))]
    pub sequences: u64,
    /// Tokens of each.
    #[schemars(range(min = 1))]
    pub tokens: u64,
    /// Milliseconds.
    pub ms: f64,
}

/// The objective that the planner minimised, and the result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Achieved {
    /// The objective.
    pub kind: ObjectiveKind,
    /// Its value for this plan, milliseconds.
    pub ms: f64,
    /// Lower bound over all plans within the budgets and mechanisms, milliseconds; 0 if unknown.
    pub bound_ms: f64,
    /// Whether the plan is proven optimal.
    pub proven: bool,
}

/// The objective of a planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ObjectiveKind {
    /// Milliseconds per generated token.
    Decode,
    /// Milliseconds to the first token.
    Prefill,
    /// Milliseconds for a whole answer: to the first token, and for the other `new_tokens - 1`.
    Mixed,
    /// The same for the answers of all sequences together.
    Throughput,
}
