//! What a corpus shows of a model: sums that can be added up prompt by prompt, so that memory does not grow with the corpus.
//!
//! Every list is as long as the model has boundaries, layers, experts or neurons, whatever the corpus.

mod check;
mod derived;
mod merge;
#[cfg(test)]
mod tests;

pub use merge::StatisticsMismatch;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Everything counted while a corpus ran. Two of the same model can be merged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Statistics {
    /// Prompts run.
    pub prompts: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Tokens generated, each of which was fed to the model again.
    pub generated_tokens: u64,
    /// Activations at each boundary, in execution order.
    #[serde(default)]
    pub boundaries: Vec<BoundaryStatistics>,
    /// How much each block changes what passes through it.
    #[serde(default)]
    pub influence: Vec<BlockInfluence>,
    /// How spread each layer's attention is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attention: Vec<AttentionEntropy>,
    /// Which experts tokens were routed to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<ExpertStatistics>,
    /// Which neurons of ReLU networks fired.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub neurons: Vec<NeuronStatistics>,
}

/// Sums over the elements of the hidden state that leaves a block. Where two tensors carry it (a residual and what is still
/// to be added), it is their sum; after the last layer it is taken before the final norm, as between other layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BoundaryStatistics {
    /// The block whose output this is.
    pub block: String,
    /// Elements seen; those that are not finite are left out and counted apart.
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
    /// Tokens seen; those whose input or output is zero or not finite have no cosine and are left out.
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
    /// Rows (token and head) seen.
    pub rows: u64,
    /// Mean entropy, nats. Rows that do not sum to 1, because a sink takes part of the attention, are scaled to 1 first.
    #[schemars(range(min = 0))]
    pub mean: f64,
}

/// Where one layer's router sent tokens.
///
/// Visits are in the order of tokens, a token's best expert first, and each prompt (with what was generated after it) begins
/// with empty caches. So sums over prompts do not depend on their order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExpertStatistics {
    /// The layer's block.
    pub block: String,
    /// Experts each token visits.
    pub top_k: u32,
    /// Tokens seen.
    pub tokens: u64,
    /// Visits of each expert.
    pub counts: Vec<u64>,
    /// Number of visits by reuse distance: entry `d` counts visits before which `d` other experts of this layer were
    /// visited since the last visit. An LRU cache of `n` experts hits those with `d < n` (Mattson's stack distances).
    pub reuse_distances: Vec<u64>,
    /// First visits in each prompt, which no cache of any size hits.
    pub first_visits: u64,
    /// Hits of the best possible cache (Belady's MIN) of 1, 2, ... experts, over the same visits. Prompts are cut into
    /// pieces of [`ORACLE_TOKENS`] tokens, at each of which it begins empty: it sees no further ahead.
    pub oracle_hits: Vec<u64>,
}

/// Most tokens the oracle of [`ExpertStatistics::oracle_hits`] looks at together.
pub const ORACLE_TOKENS: u64 = 8192;

/// How often each neuron of one layer's ReLU was above zero.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NeuronStatistics {
    /// The layer's block.
    pub block: String,
    /// Tokens seen.
    pub tokens: u64,
    /// Tokens for which each neuron was above zero.
    pub active: Vec<u64>,
}
