//! The model drafter: a smaller model with the same tokens, on an engine of its own.

use super::Drafter;
use crate::error::GenerateError;
use crate::sampling::top_probability;
use crate::single_sequence::{Prefill, SingleSequence};
use hpp_engine::Backend;
use std::cell::RefCell;
use std::rc::Rc;

/// A draft ends where its tokens are together less likely than this.
const LEAST_PROBABILITY: f64 = 0.1;

/// Drafts the tokens that another model finds most likely.
pub struct ModelDrafter<B: Backend> {
    /// Shared, so that the next text of a conversation finds what this one has computed.
    sequence: Rc<RefCell<SingleSequence<B>>>,
    text: Vec<u32>,
}

impl<B: Backend> ModelDrafter<B> {
    /// A drafter on a sequence of the draft model's engine.
    pub fn new(sequence: Rc<RefCell<SingleSequence<B>>>) -> Self {
        Self { sequence, text: Vec::new() }
    }
}

impl<B: Backend> Drafter for ModelDrafter<B> {
    fn extend(&mut self, tokens: &[u32]) {
        self.text.extend_from_slice(tokens);
    }

    /// One level: the draft's own probabilities end it.
    fn confidence(&self) -> Option<usize> {
        let fits = (self.text.len() as u64) < self.sequence.borrow().context();
        fits.then_some(super::CONFIDENCES - 1)
    }

    fn is_free(&self) -> bool {
        false
    }

    fn draft(&mut self, most: usize, draft_tokens: &mut Vec<u32>) -> Result<(), GenerateError> {
        draft_tokens.clear();
        let mut sequence = self.sequence.borrow_mut();
        if most == 0 || !matches!(sequence.prefill(&self.text, &|| false)?, Prefill::Complete { .. }) {
            return Ok(());
        }
        let mut probability = 1.0;
        while let Some((token, likely)) = top_probability(sequence.logits()) {
            probability *= likely;
            if probability < LEAST_PROBABILITY {
                break;
            }
            draft_tokens.push(token);
            if draft_tokens.len() == most || sequence.room() == 0 {
                break;
            }
            sequence.feed(&[token])?;
        }
        Ok(())
    }
}
