//! Statistics of a model over a corpus: sums that are merged prompt by prompt, so that memory does not grow with the
//! corpus.
//!
//! Invariant: the length of every list depends only on the model's numbers of boundaries, layers, experts or neurons.

mod check;
mod derived;
mod interleaved;
mod merge;
#[cfg(test)]
mod tests;

pub use merge::StatisticsMismatch;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// All statistics of a corpus run. Statistics of the same model can be merged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Statistics {
    /// Prompts run.
    pub prompts: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Generated tokens, each of which was fed back to the model.
    pub generated_tokens: u64,
    /// Activations at each boundary, in execution order.
    #[serde(default)]
    pub boundaries: Vec<BoundaryStatistics>,
    /// How much each block changes the hidden state.
    #[serde(default)]
    pub influence: Vec<BlockInfluence>,
    /// Entropy of each layer's attention.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attention: Vec<AttentionEntropy>,
    /// Routing of tokens to experts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<ExpertStatistics>,
    /// Activity of ReLU neurons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub neurons: Vec<NeuronStatistics>,
}

/// Sums over the elements of the hidden state that leaves a block. If two tensors carry it (a residual and the next
/// addend), it is their sum. After the last layer it is taken before the final norm, as between other layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BoundaryStatistics {
    /// The block whose output this is.
    pub block: String,
    /// Finite elements.
    pub elements: u64,
    /// Elements that were not finite.
    pub not_finite: u64,
    /// Mean of the absolute values.
    #[schemars(range(min = 0))]
    pub mean_abs: f64,
    /// Mean.
    pub mean: f64,
    /// Sum of squared distances from the mean (Welford); over `elements` it is the variance.
    #[schemars(range(min = 0))]
    pub squares: f64,
    /// Largest absolute value.
    #[schemars(range(min = 0))]
    pub max_abs: f64,
}

/// `1 - cosine(input, output)` of a block, averaged over tokens (the "block influence" of ShortGPT, arXiv:2403.03853).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockInfluence {
    /// The block.
    pub block: String,
    /// Tokens, without those whose input or output is zero or not finite, which have no cosine.
    pub tokens: u64,
    /// Mean of `1 - cosine`, 0 to 2.
    #[schemars(range(min = 0, max = 2))]
    pub mean: f64,
}

/// Entropy of a layer's attention weights, averaged over heads and tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AttentionEntropy {
    /// The layer's block.
    pub block: String,
    /// Rows (pairs of token and head).
    pub rows: u64,
    /// Mean entropy, nats. Rows with a sum other than 1, because a sink takes a part of the attention, are scaled to 1
    /// first.
    #[schemars(range(min = 0))]
    pub mean: f64,
}

/// Routing of one layer.
///
/// Visits are in the order of tokens, a token's best expert first. Each prompt, with its generated tokens, starts with
/// empty caches, so sums over prompts do not depend on their order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExpertStatistics {
    /// The layer's block.
    pub block: String,
    /// Experts that each token uses.
    pub top_k: u32,
    /// Tokens.
    pub tokens: u64,
    /// Visits of each expert.
    pub counts: Vec<u64>,
    /// Number of visits by reuse distance: entry `d` counts visits with `d` other experts of this layer visited since
    /// the previous visit. An LRU cache of `n` experts hits those with `d < n` (Mattson's stack distances).
    pub reuse_distances: Vec<u64>,
    /// First visits in each prompt, which miss in a cache of any size.
    pub first_visits: u64,
    /// Hits of the optimal cache (Belady's MIN) of 1, 2, ... experts over the same visits. It looks ahead at most
    /// [`ORACLE_TOKENS`] tokens: prompts are cut into runs of that length, each of which starts with an empty cache.
    pub oracle_hits: Vec<u64>,
}

/// Lookahead of the cache in [`ExpertStatistics::oracle_hits`], tokens.
pub const ORACLE_TOKENS: u64 = 8192;

/// Activity of the ReLU neurons of one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NeuronStatistics {
    /// The layer's block.
    pub block: String,
    /// Tokens.
    pub tokens: u64,
    /// Tokens for which each neuron was above zero.
    pub active: Vec<u64>,
}
