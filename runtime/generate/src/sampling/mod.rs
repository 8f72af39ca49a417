//! Sampling: chooses the next token from one row of logits. Knows no model and no text.

mod allowed;
mod candidates;
mod draw;
mod exp_sum;
mod overrides;
mod sampler;

pub use allowed::AllowedTokens;
pub use exp_sum::{exp_sum, max_logit};
pub use overrides::{JsonSeed, JsonTopK, SamplingOverrides, SettingRange, new_seed};
pub(crate) use sampler::top_probability;
pub use sampler::{Sampler, SamplingError, greedy};

/// How tokens are chosen. Every field has a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// Greedy or random.
    pub choice: SamplingMethod,
    /// Divides the logits of tokens already in the text (multiplies negative ones; Keskar et al., "CTRL", arXiv:1909.05858); 1 changes nothing.
    pub repetition_penalty: f64,
}

impl SamplingParams {
    /// The seed of a random choice.
    pub fn seed(&self) -> Option<u64> {
        match self.choice {
            SamplingMethod::Greedy => None,
            SamplingMethod::Random(choice) => Some(choice.seed),
        }
    }
}

/// Greedy or random.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SamplingMethod {
    /// The token with the largest logit.
    Greedy,
    /// A token drawn by its probability among those that the filters leave.
    Random(RandomSampling),
}

/// The filters between logits and the draw, in the order in which they apply.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomSampling {
    /// Divides the logits; above zero.
    pub temperature: f64,
    /// Keeps this many most likely tokens (Fan et al., arXiv:1805.04833); 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest most likely tokens whose probabilities sum to at least this (nucleus sampling: Holtzman et al., arXiv:1904.09751); 1 keeps
    /// all.
    pub top_p: f64,
    /// Keeps tokens at least this likely relative to the most likely one (Nguyen et al., arXiv:2407.01082); 0 keeps all.
    pub min_p: f64,
    /// Seed of the random numbers: the same seed, logits and settings give the same tokens.
    pub seed: u64,
}
