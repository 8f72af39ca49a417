//! Speculative decoding: drafts tokens that may come next, so that one pass verifies several.
//!
//! - [`Drafter`] proposes tokens; [`NgramDrafter`] takes them from the text itself and from other texts of the engine, [`ModelDrafter`]
//!   from a smaller model.
//! - [`DraftLength`] decides how many, from the measured acceptance and the measured time of passes.
//! - [`Speculation`] is both for one text, with its counts; [`Drafts`] makes them for the texts of an engine.

mod draft_length;
mod drafts;
mod model;
mod ngram;
mod speculation;
mod successors;
mod suffix_automaton;

pub use draft_length::{DraftLength, MAX_DRAFT};
pub use drafts::{DraftOrigin, Drafts};
pub use model::{DraftModel, ModelDrafter};
pub use ngram::NgramDrafter;
pub use speculation::{Speculation, SpeculationStats};
pub use successors::SuccessorTable;

use crate::error::GenerateError;

/// Number of confidence levels.
pub const CONFIDENCES: usize = 7;
/// The highest level of drafts from the text itself, whose level rises with the length of the repeated suffix; also the level of draft
/// models.
const MOST_CONFIDENT: usize = 5;
/// The level of drafts from other texts.
const FROM_OTHER_TEXTS: usize = 6;

/// Proposes the next tokens of a text.
pub trait Drafter {
    /// Appends tokens to the text.
    fn extend(&mut self, tokens: &[u32]);

    /// The confidence level of what it would draft now, below [`CONFIDENCES`]. In drafts of the same level, about the same fraction of
    /// tokens is right. `None` if it has no draft.
    fn confidence(&self) -> Option<usize>;

    /// Whether drafting takes no time to speak of.
    fn is_free(&self) -> bool;

    /// Replaces `draft_tokens` by at most `most` tokens that may come next.
    fn draft(&mut self, most: usize, draft_tokens: &mut Vec<u32>) -> Result<(), GenerateError>;
}
