//! Probe requests that run prompts of a corpus, and the tensors to collect statistics of.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Prompts to run through a model with taps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ObserveProbe {
    /// A plan whose partition has the taps among its outputs.
    pub plan: PathBuf,
    /// The prompts.
    pub prompts: Vec<Prompt>,
    /// Tokens to generate greedily after each prompt.
    pub decode_tokens: u64,
    /// The tensors to collect statistics of.
    pub taps: Vec<Tap>,
}

/// A prompt of the corpus.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Prompt {
    /// Its line in the corpus, from 1.
    pub line: u64,
    /// Its content.
    pub content: PromptContent,
}

/// The content of a prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PromptContent {
    /// Text to continue.
    Text(String),
    /// A conversation for the model's chat template.
    Messages(Vec<ChatTurn>),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChatTurn {
    /// `system`, `user`, `assistant`, ...
    pub role: String,
    /// Its text.
    pub content: String,
}

/// A tensor to collect statistics of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tap {
    /// The ONNX name.
    pub name: String,
    /// The block it belongs to.
    pub block: String,
    /// Its meaning.
    pub kind: TapKind,
}

/// The meaning of a tapped tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum TapKind {
    /// Hidden state `[..., hidden]` that leaves the block. If two tensors carry it, each is a tap, and the hidden state
    /// is their sum.
    Boundary,
    /// Router scores `[tokens, experts]`; a token uses the `top_k` best experts.
    RouterScores {
        /// Experts that a token uses.
        top_k: u32,
    },
    /// Indices of the used experts `[tokens, top_k]`.
    RoutedExperts {
        /// Number of experts.
        experts: u32,
    },
    /// Output of a ReLU `[..., neurons]`.
    Neurons,
    /// Attention weights `[batch, heads, tokens, context]`, rows summing to 1.
    Attention,
}

/// Prompts to run through a model with taps, to sum the second moments of each tap `[..., width]` over all positions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MomentsProbe {
    /// A plan with the taps among the outputs of its partitions.
    pub plan: PathBuf,
    /// The prompts.
    pub prompts: Vec<Prompt>,
    /// Names of the taps.
    pub taps: Vec<String>,
    /// Neighbouring numbers of a row whose products are summed: for each span the sums `[span, span]`; the last span of a row may be
    /// shorter.
    pub span: u64,
    /// The file to write: the sums of one tap after another, little-endian float64. Replaced if it exists.
    pub file: PathBuf,
}

/// Two models to compare.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CompareProbe {
    /// Plan of the unchanged model; the child keeps its logits for the next comparison with the same prompts.
    pub reference: PathBuf,
    /// Plan of the other model.
    pub other: PathBuf,
    /// The prompts; logits are compared at the last `positions` tokens of each.
    pub prompts: Vec<Prompt>,
    /// Positions to compare in each prompt.
    pub positions: u64,
}
