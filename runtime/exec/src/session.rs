//! A text in progress on an engine: what it was fed, and what of it can be kept when the text changes.

use crate::embeddings::Embeddings;
use crate::error::ExecError;
use crate::interrupt::Interrupt;
use hpp_engine::{Backend, Engine, EngineError, LogitRows, Logits, NamedTensors, Sequence, StepInput};

/// Tokens fed between two looks at Ctrl-C while a long prompt goes in piece by piece.
const PIECE: usize = 64;

/// An engine with one sequence.
pub struct Session<B: Backend> {
    engine: Engine<B>,
    sequence: Option<Sequence<B>>,
    /// Every token of the sequence, in order.
    fed: Vec<u32>,
    embeddings: Option<Embeddings>,
    extra: NamedTensors,
    logits: Logits,
}

/// How a prompt went in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fed {
    /// All of it; this many of its tokens were there already.
    Whole {
        /// Tokens kept from before.
        reused: usize,
    },
    /// Ctrl-C came first.
    Interrupted,
}

impl<B: Backend> Session<B> {
    /// A session without a text yet.
    pub fn new(engine: Engine<B>, embeddings: Option<Embeddings>, extra: NamedTensors) -> Self {
        Self { engine, sequence: None, fed: Vec::new(), embeddings, extra, logits: Logits::default() }
    }

    /// The engine.
    pub fn engine(&mut self) -> &mut Engine<B> {
        &mut self.engine
    }

    /// Tokens of the text so far.
    pub fn tokens(&self) -> &[u32] {
        &self.fed
    }

    /// Tokens that still fit.
    pub fn room(&self) -> u64 {
        self.sequence.as_ref().map_or(self.engine.context(), Sequence::room)
    }

    /// Bytes reserved for the text's state.
    pub fn state_bytes(&self) -> u64 {
        self.sequence.as_ref().map_or(0, Sequence::state_bytes)
    }

    /// Scores after the last token fed.
    pub fn scores(&self) -> &[f32] {
        self.logits.last()
    }

    /// Forgets the text.
    pub fn reset(&mut self) {
        self.sequence = None;
        self.fed.clear();
    }

    /// Makes the text exactly `prompt`, keeping what it has in common with the text before.
    pub fn begin(&mut self, prompt: &[u32], interrupt: &Interrupt) -> Result<Fed, ExecError> {
        let reused = self.keep(prompt)?;
        let mut rest = &prompt[reused..];
        while !rest.is_empty() {
            if interrupt.asked() {
                return Ok(Fed::Interrupted);
            }
            let (now, later) = rest.split_at(self.piece(rest.len()));
            match self.feed(now) {
                Err(error) if error.is_cancelled() => return Ok(Fed::Interrupted),
                fed => fed?,
            }
            rest = later;
        }
        Ok(Fed::Whole { reused })
    }

    /// Adds tokens to the text and computes the scores after them. Where that is cancelled the text is forgotten: its state is that
    /// of half a pass.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<(), ExecError> {
        let sequence = match &mut self.sequence {
            Some(sequence) => sequence,
            slot => slot.insert(self.engine.new_sequence()?),
        };
        let rows;
        let input = match &self.embeddings {
            None => StepInput::Tokens(tokens),
            Some(table) => {
                rows = table.rows(tokens)?;
                StepInput::Embeddings { tokens: tokens.len(), data: &rows }
            }
        };
        let step = self.engine.step_with(sequence, input, LogitRows::Last, &self.extra, &mut self.logits);
        if matches!(step, Err(EngineError::Cancelled)) {
            self.reset();
        }
        step?;
        self.fed.extend_from_slice(tokens);
        Ok(())
    }

    /// Goes back to the longest common beginning the states allow, and leaves at least one token of `prompt` to feed.
    fn keep(&mut self, prompt: &[u32]) -> Result<usize, ExecError> {
        let common = self.fed.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let wanted = common.min(prompt.len().saturating_sub(1));
        let went_back = match &mut self.sequence {
            Some(sequence) => wanted > 0 && self.engine.truncate(sequence, wanted as u64),
            None => false,
        };
        let kept = if went_back { wanted } else { 0 };
        if kept == 0 {
            self.reset();
        }
        self.fed.truncate(kept);
        Ok(kept)
    }

    /// How many of `left` tokens to feed at once: all, unless the plan takes them in small pieces anyway.
    fn piece(&self, left: usize) -> usize {
        let Some(chunk) = self.engine.plan().schedule.prefill_chunk else { return left };
        let chunk = usize::try_from(chunk).unwrap_or(left).max(1);
        let piece = PIECE.next_multiple_of(chunk);
        // A single token at the end would count as decoding.
        if left <= piece + 1 { left } else { piece }
    }
}
