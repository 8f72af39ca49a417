//! Prompts to run, and what to look at while they run.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Prompts to run through a model with taps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ObserveProbe {
    /// A plan whose partition has the taps among its outputs.
    pub plan: PathBuf,
    /// What to run.
    pub prompts: Vec<Prompt>,
    /// Tokens to generate after each, greedily.
    pub decode_tokens: u64,
    /// What to count.
    pub taps: Vec<Tap>,
}

/// A prompt of the corpus.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Prompt {
    /// Its line in the corpus, from 1.
    pub line: u64,
    /// What it holds.
    pub content: PromptContent,
}

/// What a prompt holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PromptContent {
    /// Text to continue.
    Text(String),
    /// A conversation for the model's chat template.
    Messages(Vec<Message>),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// `system`, `user`, `assistant`, ...
    pub role: String,
    /// What was said.
    pub content: String,
}

/// A tensor to look at, and what it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tap {
    /// The ONNX name.
    pub name: String,
    /// The block it belongs to.
    pub block: String,
    /// What to count there.
    pub kind: TapKind,
}

/// What a tapped tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum TapKind {
    /// `[..., hidden]`, leaving the block. Where two tensors carry the hidden state, each is a tap; their sum is what passes.
    Boundary,
    /// Router scores `[tokens, experts]`; the `top_k` best are visited.
    RouterScores {
        /// Experts a token visits.
        top_k: u32,
    },
    /// Indices of visited experts `[tokens, top_k]`.
    RoutedExperts {
        /// Experts there are.
        experts: u32,
    },
    /// Output of a ReLU `[..., neurons]`.
    Neurons,
    /// Attention weights `[batch, heads, tokens, context]`, rows summing to 1.
    Attention,
}

/// Two models to compare.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CompareProbe {
    /// Plan of the model as it is; its scores are kept for the next comparison with the same prompts.
    pub reference: PathBuf,
    /// Plan of the other.
    pub other: PathBuf,
    /// What to run; scores are compared at the last `positions` tokens of each.
    pub prompts: Vec<Prompt>,
    /// Positions to compare in each prompt.
    pub positions: u64,
}
