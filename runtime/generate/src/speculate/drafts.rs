//! How the generations of an engine draft: not at all, from their texts and each other's, or with a draft model that they share.

use super::{DraftLength, DraftModel, Drafter, ModelDrafter, NgramDrafter, Speculation, SuccessorTable};
use crate::generation::Generation;
use hpp_engine::Backend;
use std::cell::RefCell;
use std::rc::Rc;

/// Where drafts come from.
pub enum DraftOrigin<B: Backend> {
    /// Nowhere: no speculation.
    None,
    /// The text itself, and what the table knows of all texts.
    Ngram(Rc<RefCell<SuccessorTable>>),
    /// A draft model.
    Model(Rc<RefCell<DraftModel<B>>>),
}

/// Makes a drafter for each of any number of texts.
pub struct Drafts<B: Backend> {
    /// Where drafts come from.
    pub origin: DraftOrigin<B>,
    /// What is known of their length before anything is measured.
    pub length: DraftLength,
}

impl<B: Backend> Default for Drafts<B> {
    fn default() -> Self {
        Drafts { origin: DraftOrigin::None, length: DraftLength::default() }
    }
}

impl<B: Backend> Drafts<B> {
    /// Gives a generation a drafter of this origin.
    pub fn speculate(&self, generation: Generation) -> Generation
    where
        B: 'static,
    {
        let drafter: Box<dyn Drafter> = match &self.origin {
            DraftOrigin::None => return generation,
            DraftOrigin::Ngram(successors) => Box::new(NgramDrafter::new(Rc::clone(successors))),
            DraftOrigin::Model(model) => Box::new(ModelDrafter::new(Rc::clone(model))),
        };
        generation.speculate(Speculation::with_length(drafter, self.length.clone()))
    }
}
