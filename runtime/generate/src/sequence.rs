//! Token sequences on an engine: feeds tokens, keeps the common prefix of two prompts, holds the logits after the last token.
//!
//! The only file of this crate that calls an engine.

use crate::embedding_table::EmbeddingTable;
use crate::error::GenerateError;
use hpp_engine::{Backend, Engine, EngineError, LogitRows, Logits, NamedTensors, Sequence, StepInput};

/// Prompt tokens between two checks for cancellation, if the plan feeds prompts in chunks.
const CHUNK: usize = 64;

/// What the model reads besides tokens; all sequences of one engine may share it.
#[derive(Default)]
pub struct ModelInputs {
    /// For a model that takes embeddings instead of token ids.
    pub embeddings: Option<EmbeddingTable>,
    /// Further inputs by name.
    pub extra: NamedTensors,
}

/// Tokens, their state on an engine, and the logits after the last of them. Must be used with one engine only.
pub struct TokenSequence<B: Backend> {
    /// Made by the first feed.
    sequence: Option<Sequence<B>>,
    tokens: Vec<u32>,
    logits: Logits,
    /// Buffer for embeddings.
    embedding_rows: Vec<f32>,
}

impl<B: Backend> Default for TokenSequence<B> {
    fn default() -> Self {
        Self { sequence: None, tokens: Vec::new(), logits: Logits::default(), embedding_rows: Vec::new() }
    }
}

impl<B: Backend> TokenSequence<B> {
    /// The tokens fed so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The logits `[vocab]` after the last token fed.
    pub fn logits(&self) -> &[f32] {
        self.logits.last()
    }

    /// Tokens that still fit the context.
    pub fn room(&self, engine: &Engine<B>) -> u64 {
        self.sequence.as_ref().map_or(engine.context(), Sequence::room)
    }

    /// Bytes reserved for its state.
    pub fn state_bytes(&self) -> u64 {
        self.sequence.as_ref().map_or(0, Sequence::state_bytes)
    }

    /// Drops all tokens and the state.
    pub fn clear(&mut self) {
        self.sequence = None;
        self.tokens.clear();
    }

    /// Truncates the sequence to the longest prefix that it shares with `prompt` and that its states can go back to. Returns the
    /// length kept, which is less than the prompt's, so that at least one token remains to be fed.
    pub fn keep_prefix(&mut self, engine: &mut Engine<B>, prompt: &[u32]) -> Result<usize, GenerateError> {
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let wanted = common.min(prompt.len().saturating_sub(1));
        let left = match &mut self.sequence {
            Some(sequence) if wanted > 0 => engine.truncate(sequence, wanted as u64)?.unwrap_or(0),
            _ => 0,
        };
        if left == 0 {
            self.clear();
        }
        self.tokens.truncate(left as usize);
        Ok(left as usize)
    }

    /// Appends tokens and computes the logits after the last. A cancelled pass leaves half a pass's state, so it clears the sequence.
    pub fn feed(&mut self, engine: &mut Engine<B>, inputs: &ModelInputs, tokens: &[u32]) -> Result<(), GenerateError> {
        let sequence = match &mut self.sequence {
            Some(sequence) => sequence,
            empty => empty.insert(engine.new_sequence()?),
        };
        let input = match &inputs.embeddings {
            None => StepInput::Tokens(tokens),
            Some(table) => {
                table.read_rows(tokens, &mut self.embedding_rows)?;
                StepInput::Embeddings { tokens: tokens.len(), data: &self.embedding_rows }
            }
        };
        let step = engine.step_with(sequence, input, LogitRows::Last, &inputs.extra, &mut self.logits);
        if matches!(step, Err(EngineError::Cancelled)) {
            self.clear();
        }
        step?;
        self.tokens.extend_from_slice(tokens);
        Ok(())
    }
}

/// The most tokens of a prompt to feed in one step: all of them, unless the plan splits prompts into chunks (`prefill_chunk`). Then a
/// multiple of its chunk, so that a caller can check for cancellation between steps.
pub fn prompt_chunk<B: Backend>(engine: &Engine<B>) -> usize {
    let chunk = engine.plan().schedule.prefill_chunk.and_then(|chunk| usize::try_from(chunk).ok());
    chunk.map_or(usize::MAX, |chunk| CHUNK.next_multiple_of(chunk.max(1)))
}

/// How many of `left` prompt tokens to feed now. The last chunk has at least two tokens: a single one would count as decoding.
pub(crate) fn chunk_length(left: usize, chunk: usize) -> usize {
    if left <= chunk.saturating_add(1) { left } else { chunk }
}

/// How a prefill ended.
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
}

impl<B: Backend> SingleSequence<B> {
    /// An empty sequence on this engine.
    pub fn new(engine: Engine<B>, inputs: ModelInputs) -> Self {
        Self { engine, sequence: TokenSequence::default(), inputs }
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

    /// See [`TokenSequence::keep_prefix`].
    pub fn keep_prefix(&mut self, prompt: &[u32]) -> Result<usize, GenerateError> {
        self.sequence.keep_prefix(&mut self.engine, prompt)
    }

    /// See [`TokenSequence::feed`].
    pub fn feed(&mut self, tokens: &[u32]) -> Result<(), GenerateError> {
        self.sequence.feed(&mut self.engine, &self.inputs, tokens)
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
