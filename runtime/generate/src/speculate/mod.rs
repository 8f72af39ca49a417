//! Speculative decoding: drafts tokens that may come next, so that one pass verifies several. Calls no model.
//!
//! - [`Drafter`] proposes tokens; [`NgramDrafter`] takes them from the text itself.
//! - [`DraftLength`] decides how many, from the measured acceptance and the measured time of passes.
//! - [`Speculation`] is both for one text, with its counts.

mod draft_length;
mod ngram;
mod speculation;
mod suffix_automaton;

pub use draft_length::{DraftLength, MAX_DRAFT};
pub use ngram::NgramDrafter;
pub use speculation::{Speculation, SpeculationStats};

/// Proposes the next tokens of a text.
pub trait Drafter: Send {
    /// Appends tokens to the text.
    fn extend(&mut self, tokens: &[u32]);

    /// Replaces `draft` by at most `most` tokens that may come next. Returns how sure it is of them, an index below
    /// [`CONFIDENCES`]: of drafts with one index, about the same fraction of tokens is right.
    fn draft(&mut self, most: usize, draft: &mut Vec<u32>) -> usize;
}

/// Number of confidence levels.
pub const CONFIDENCES: usize = 6;
