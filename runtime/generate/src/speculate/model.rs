//! The model drafter: a smaller model with the same tokens, on an engine of its own.

use super::Drafter;
use crate::error::GenerateError;
use crate::sampling::top_probability;
use crate::sequence::{ModelInputs, TokenSequence};
use hpp_engine::{Backend, Engine, LogitRows};
use std::cell::RefCell;
use std::rc::Rc;

/// A draft ends where the product of the probabilities of its tokens falls below this.
const LEAST_PROBABILITY: f64 = 0.1;

/// A draft model: its engine, and the sequences of texts that it drafts for.
pub struct DraftModel<B: Backend> {
    engine: Engine<B>,
    inputs: ModelInputs,
    /// Sequences that no text uses now. The next text may begin like one of them.
    idle: Vec<TokenSequence<B>>,
    /// Sequences in use.
    used: usize,
    most: usize,
}

impl<B: Backend> DraftModel<B> {
    /// A draft model for at most `most` texts at once.
    pub fn new(engine: Engine<B>, most: usize) -> Self {
        Self { engine, inputs: ModelInputs::default(), idle: Vec::new(), used: 0, most }
    }

    /// A sequence for a text: the idle one that has most in common with it, else a new one. `None` if all are in use.
    fn take(&mut self, text: &[u32]) -> Option<TokenSequence<B>> {
        let closest = (0..self.idle.len()).max_by_key(|at| self.idle[*at].common_prefix(text));
        let sequence = match closest {
            Some(at) => self.idle.swap_remove(at),
            None if self.used < self.most => TokenSequence::default(),
            None => return None,
        };
        self.used += 1;
        Some(sequence)
    }

    fn give_back(&mut self, sequence: TokenSequence<B>) {
        self.used -= 1;
        self.idle.push(sequence);
    }
}

/// Drafts the tokens that another model finds most likely.
pub struct ModelDrafter<B: Backend> {
    model: Rc<RefCell<DraftModel<B>>>,
    /// Taken from the model for the first draft.
    sequence: Option<TokenSequence<B>>,
    text: Vec<u32>,
}

impl<B: Backend> ModelDrafter<B> {
    /// A drafter on a sequence of the draft model.
    pub fn new(model: Rc<RefCell<DraftModel<B>>>) -> Self {
        Self { model, sequence: None, text: Vec::new() }
    }
}

impl<B: Backend> Drop for ModelDrafter<B> {
    fn drop(&mut self) {
        if let (Some(sequence), Ok(mut model)) = (self.sequence.take(), self.model.try_borrow_mut()) {
            model.give_back(sequence);
        }
    }
}

impl<B: Backend> Drafter for ModelDrafter<B> {
    fn extend(&mut self, tokens: &[u32]) {
        self.text.extend_from_slice(tokens);
    }

    /// Always the same level, because the probabilities of its tokens end a draft.
    fn confidence(&self) -> Option<usize> {
        let fits = (self.text.len() as u64) < self.model.borrow().engine.context();
        fits.then_some(super::MOST_CONFIDENT)
    }

    fn is_free(&self) -> bool {
        false
    }

    fn draft(&mut self, most: usize, draft_tokens: &mut Vec<u32>) -> Result<(), GenerateError> {
        draft_tokens.clear();
        if most == 0 {
            return Ok(());
        }
        let mut model = self.model.borrow_mut();
        if self.sequence.is_none() {
            self.sequence = model.take(&self.text);
        }
        let Some(sequence) = &mut self.sequence else { return Ok(()) };
        let DraftModel { engine, inputs, most: texts, .. } = &mut *model;
        // The next pass of other texts waits for this draft, so it reads one chunk at most.
        let most_chunks = if *texts > 1 { 1 } else { usize::MAX };
        if !sequence.read(engine, inputs, &self.text, most_chunks)? {
            return Ok(());
        }
        let mut probability = 1.0;
        while let Some((token, likely)) = top_probability(sequence.logits()) {
            probability *= likely;
            if probability < LEAST_PROBABILITY {
                break;
            }
            draft_tokens.push(token);
            if draft_tokens.len() == most || sequence.room(engine) == 0 {
                break;
            }
            sequence.feed(engine, inputs, crate::input::Input { tokens: &[token], rows: LogitRows::Last })?;
        }
        Ok(())
    }
}
