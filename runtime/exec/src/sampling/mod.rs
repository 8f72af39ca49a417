//! Which token comes next, from one row of scores. Knows no model and no text.

mod candidates;
mod filters;
mod mass;
mod sampler;

pub use sampler::{Sampler, SamplingError, greedy};

/// How tokens are chosen; every field has a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Greedy, or by chance.
    pub choice: Choice,
    /// Scores of tokens already in the text are divided by this (multiplied where negative); 1 changes nothing.
    pub repetition_penalty: f64,
}

/// Greedy, or by chance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// The best-scored token.
    Greedy,
    /// A token drawn by its probability after these filters, in this order.
    Random(RandomChoice),
}

/// Filters between scores and chance, in the order they apply.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomChoice {
    /// Scores are divided by this; above zero.
    pub temperature: f64,
    /// Only this many best tokens stay; 0 keeps all.
    pub top_k: usize,
    /// Only the fewest best tokens whose probabilities reach this stay; 1 keeps all.
    pub top_p: f64,
    /// Only tokens at least this likely, relative to the best, stay; 0 keeps all.
    pub min_p: f64,
    /// Where chance starts: the same seed, scores and settings give the same tokens.
    pub seed: u64,
}
