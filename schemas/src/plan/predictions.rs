//! What a plan is expected to take.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is expected of this plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Predictions {
    /// Where the numbers come from: `static` (shapes and assumed bandwidths), `machine: NAME`, `profile: NAME of DATE`;
    /// with `, refined` where plans were run and the times fed back.
    pub source: String,
    /// Milliseconds for one decoded token at `decode_context`.
    pub decode_ms: f64,
    /// Milliseconds from the prompt to the first token.
    pub time_to_first_token_ms: f64,
    /// Prompt length `time_to_first_token_ms` speaks of, in tokens.
    pub prompt_tokens: u64,
    /// Tokens per second while decoding.
    pub decode_tokens_per_second: f64,
    /// Tokens of context at which `decode_ms` is meant; 0 where it is not said.
    #[serde(default)]
    pub decode_context: u64,
    /// Tokens generated after the prompt, in the answer the objective speaks of.
    #[serde(default)]
    pub new_tokens: u64,
    /// What decides these times, in one line: the thing that is busy longest in each phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// What the planner made small; absent where blocks were placed by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objective: Option<Achieved>,
}

/// What the planner made small and how far it got.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Achieved {
    /// What was made small.
    pub kind: ObjectiveKind,
    /// Its value for this plan, milliseconds.
    pub ms: f64,
    /// No plan within the budgets and mechanisms takes less than this, milliseconds; 0 where nothing was proven.
    pub bound_ms: f64,
    /// Whether no plan is better.
    pub proven: bool,
}

/// What a planner makes small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ObjectiveKind {
    /// Milliseconds for one more token.
    Decode,
    /// Milliseconds to the first token.
    Prefill,
    /// Milliseconds for a whole answer: the time to the first token and `new_tokens` more.
    Mixed,
}
