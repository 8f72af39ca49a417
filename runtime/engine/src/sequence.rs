//! Sequences: a text in progress, which owns its state and what it has bound.

use crate::port::Backend;
use crate::stage::Bound;
use crate::state::Store;

/// A text in progress. Made by [`Engine::new_sequence`](crate::Engine::new_sequence); any number may exist side by side.
pub struct Sequence<B: Backend> {
    pub(crate) length: u64,
    pub(crate) limit: u64,
    pub(crate) stores: Vec<Store<B>>,
    pub(crate) bound: Vec<Bound<B>>,
    /// Which set of taps the bindings were made for.
    pub(crate) taps: u64,
    /// What a decoder without cache computes again each step.
    pub(crate) history: History,
    pub(crate) interrupted: bool,
}

/// Everything a sequence was fed, where the model must be fed it again.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub tokens: Vec<u32>,
    pub embeddings: Vec<f32>,
}

impl<B: Backend> Sequence<B> {
    /// Tokens taken in so far.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether nothing was taken in yet.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Tokens that still fit.
    pub fn room(&self) -> u64 {
        self.limit.saturating_sub(self.length)
    }

    /// Bytes reserved for its state.
    pub fn state_bytes(&self) -> u64 {
        self.stores.iter().map(Store::bytes).sum()
    }
}

impl<B: Backend> std::fmt::Debug for Sequence<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sequence").field("length", &self.length).field("limit", &self.limit).finish_non_exhaustive()
    }
}
