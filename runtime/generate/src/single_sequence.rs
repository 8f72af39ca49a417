//! An engine with one sequence, for programs that run one request at a time.

use crate::adapt::{Adaptation, PassSize};
use crate::error::GenerateError;
use crate::input::{Input, chunk_length};
use crate::prefix_cache::{PageValue, PrefixCache};
use crate::sequence::{ModelInputs, TokenSequence, prompt_chunk};
use hpp_engine::{Backend, Engine, LogitRows, Logits};
use std::time::Instant;

/// The outcome of a prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefill {
    /// The sequence is the prompt.
    Complete {
        /// Tokens kept from the sequence before.
        reused: usize,
    },
    /// The caller or a cancel handle stopped it.
    Cancelled,
}

/// An engine with one sequence, for programs that run one request at a time.
pub struct SingleSequence<B: Backend> {
    engine: Engine<B>,
    sequence: TokenSequence<B>,
    inputs: ModelInputs,
    session: Option<SavedSession>,
    adaptation: Option<Adaptation>,
    /// Whether the engine was changed, so that passes may take another time than before.
    has_changed: bool,
}

/// Where the states of the sequence are saved, and for which conversation.
struct SavedSession {
    cache: PrefixCache,
    name: String,
    /// Bytes of RAM for its pages.
    ram: u64,
}

impl<B: Backend> SingleSequence<B> {
    /// An empty sequence on this engine.
    pub fn new(engine: Engine<B>, inputs: ModelInputs) -> Self {
        Self { engine, sequence: TokenSequence::default(), inputs, session: None, adaptation: None, has_changed: false }
    }

    /// From now on saves all states for a conversation, and starts prompts from their saved pages. Prompts must be fed in chunks
    /// of a page ([`PrefixCache::page_tokens`]). `ram`: bytes of RAM for pages.
    pub fn save_in(&mut self, cache: PrefixCache, ram: u64, session: &str) {
        self.session = Some(SavedSession { cache, name: session.to_owned(), ram });
    }

    /// Keeps the engine true to its plan from now on, between two feeds.
    pub fn adapt(&mut self, adaptation: Adaptation) {
        self.adaptation = Some(adaptation);
    }

    /// What keeps the engine true to its plan.
    pub fn adaptation(&self) -> Option<&Adaptation> {
        self.adaptation.as_ref()
    }

    /// Whether the engine was changed since the last call of this, so that passes may take another time.
    pub(crate) fn take_change(&mut self) -> bool {
        std::mem::take(&mut self.has_changed)
    }

    /// Where states are saved.
    pub fn cache(&self) -> Option<&PrefixCache> {
        self.session.as_ref().map(|session| &session.cache)
    }

    /// The engine.
    pub fn engine(&mut self) -> &mut Engine<B> {
        &mut self.engine
    }

    /// The tokens fed so far.
    pub fn tokens(&self) -> &[u32] {
        self.sequence.tokens()
    }

    /// The logits `[vocab]` after the last token fed.
    pub fn logits(&self) -> &[f32] {
        self.sequence.logits()
    }

    /// The logits `[rows, vocab]` that the last feed asked for.
    pub fn logit_rows(&self) -> &Logits {
        self.sequence.logit_rows()
    }

    /// Most tokens of the sequence.
    pub fn context(&self) -> u64 {
        self.engine.context()
    }

    /// Tokens that still fit the context.
    pub fn room(&self) -> u64 {
        self.sequence.room(&self.engine)
    }

    /// Bytes reserved for the sequence's state.
    pub fn state_bytes(&self) -> u64 {
        self.sequence.state_bytes()
    }

    /// Drops all tokens and the state.
    pub fn clear(&mut self) {
        self.sequence.clear();
    }

    /// Keeps the prefix that the sequence or the saved pages have in common with a prompt. See [`TokenSequence::keep_prefix`].
    pub fn keep_prefix(&mut self, prompt: &[u32]) -> Result<usize, GenerateError> {
        let Some(SavedSession { cache, name, .. }) = &self.session else {
            return self.sequence.keep_prefix(&mut self.engine, prompt);
        };
        let (session, page) = (Some(name.as_str()), cache.page_tokens());
        let found = cache.look_up(prompt, session);
        let kept = self.sequence.shared_prefix(prompt, session) / page;
        if found.len() > kept || (cache.has_snapshots() && !found.is_empty()) {
            let pages = cache.load_waiting(&found);
            self.sequence = cache.restore(&mut self.engine, prompt, &found, &pages)?;
        }
        self.sequence.keep_whole_chunks(&mut self.engine, prompt, session, page)
    }

    /// See [`TokenSequence::max_draft`].
    pub fn max_draft(&self) -> usize {
        self.sequence.max_draft(&self.engine)
    }

    /// See [`TokenSequence::drop_last`].
    pub fn drop_last(&mut self, count: usize) -> Result<usize, GenerateError> {
        self.sequence.drop_last(&mut self.engine, count)
    }

    /// Appends tokens and computes the logits after the last. See [`TokenSequence::feed`].
    pub fn feed(&mut self, tokens: &[u32]) -> Result<(), GenerateError> {
        self.feed_input(Input { tokens, rows: LogitRows::Last })
    }

    /// See [`TokenSequence::feed`].
    pub fn feed_input(&mut self, input: Input<'_>) -> Result<(), GenerateError> {
        let tokens = input.tokens.len() as u64;
        self.sequence.feed(&mut self.engine, &self.inputs, input)?;
        let size = PassSize { sequences: 1, tokens, context: self.sequence.tokens().len() as u64 };
        let Some(adaptation) = &mut self.adaptation else { return Ok(()) };
        let changes = adaptation.after_pass(&mut self.engine, Some(size), Instant::now())?;
        self.has_changed |= changes;
        if let (true, Some(SavedSession { cache, ram, .. })) = (changes, &self.session) {
            cache.set_ram(adaptation.share().map_or(*ram, |share| share.kv));
        }
        Ok(())
    }

    /// Saves the pages that are complete. `is_last`: see [`PrefixCache::save`]. Call it when no token will be dropped any more.
    pub fn save(&mut self, is_last: bool) {
        if let Some(SavedSession { cache, .. }) = &self.session {
            cache.save(&mut self.engine, &mut self.sequence, PageValue::default(), is_last);
        }
    }

    /// Makes the sequence equal to `prompt`, reusing their common prefix. Checks `cancelled` before each chunk.
    pub fn prefill(&mut self, prompt: &[u32], cancelled: &dyn Fn() -> bool) -> Result<Prefill, GenerateError> {
        let reused = self.keep_prefix(prompt)?;
        let chunk = prompt_chunk(&self.engine);
        let mut rest = &prompt[reused..];
        while !rest.is_empty() {
            if cancelled() {
                return Ok(Prefill::Cancelled);
            }
            let (now, later) = rest.split_at(chunk_length(rest.len(), chunk));
            match self.feed(now) {
                Err(error) if error.is_cancelled() => return Ok(Prefill::Cancelled),
                fed => fed?,
            }
            rest = later;
        }
        Ok(Prefill::Complete { reused })
    }
}
