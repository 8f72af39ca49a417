//! KV pages: saves the states of a sequence page by page, and makes a sequence from saved pages.

use super::{Runtime, Sequence};
use crate::buffers::{PagePart, PageSlice};
use crate::error::EngineError;
use crate::ids::{IndexVec, StateId};
use crate::port::{Backend, MemoryId};
use crate::program::Program;

/// How a page of a plan's states is laid out.
#[derive(Clone, Debug)]
pub struct PageLayout {
    parts: IndexVec<StateId, PagePart>,
    tokens: u64,
    is_on_host: bool,
}

impl PageLayout {
    /// The layout of pages of `tokens` tokens. `None` if the plan's states cannot be saved: the caller gives one of them, or the model
    /// keeps none and computes all tokens again in each pass.
    pub(crate) fn new(program: &Program, tokens: u64) -> Option<Self> {
        if program.recomputes() || tokens == 0 {
            return None;
        }
        let parts = program.layouts.iter().map(|layout| PagePart::new(layout, program.context));
        let is_on_host = program.layouts.iter().all(|layout| layout.memory == MemoryId::HOST);
        Some(PageLayout { parts: parts.collect::<Option<_>>()?, tokens, is_on_host })
    }

    /// Tokens of a page.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Bytes of a page.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes(self.tokens)).sum()
    }

    /// Whether a page can be saved only while the sequence ends with it, because a state mixes or drops tokens.
    pub fn has_snapshots(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, PagePart::Snapshot { .. }))
    }

    /// Whether all states lie in host memory. States on a device are copied whole for each call that saves pages.
    pub fn is_on_host(&self) -> bool {
        self.is_on_host
    }

    /// Whether a sequence of `length` tokens can save the page that starts at `first`.
    fn can_save(&self, first: u64, length: u64) -> bool {
        let end = first + self.tokens;
        if self.has_snapshots() { end == length } else { end <= length }
    }
}

/// A page to be copied out of a sequence.
pub struct PageToSave<'a> {
    /// Its layout.
    pub layout: &'a PageLayout,
    /// Its first token.
    pub first: u64,
    /// Where it is copied to; has the layout's bytes.
    pub bytes: &'a mut [u8],
}

impl<B: Backend> Runtime<B> {
    /// Copies pages out of a sequence; they may overlap.
    pub fn save_pages(
        &mut self,
        program: &Program,
        sequence: &Sequence<B>,
        pages: Vec<PageToSave<'_>>,
    ) -> Result<(), EngineError> {
        check_sizes(pages.iter().map(|page| (page.layout, page.bytes.len())))?;
        let can_save = |page: &PageToSave<'_>| page.layout.can_save(page.first, sequence.length);
        if sequence.interrupted || !pages.iter().all(can_save) {
            let why = format!("a sequence of {} tokens does not hold them whole", sequence.length);
            return Err(EngineError::WrongInput { name: "KV pages".to_owned(), why });
        }
        if pages.is_empty() {
            return Ok(());
        }
        let (places, mut rests): (Vec<_>, Vec<_>) =
            pages.into_iter().map(|PageToSave { layout, first, bytes }| ((layout, first), bytes)).unzip();
        for ((state, layout), buffers) in program.layouts.entries().zip(sequence.states.iter()) {
            let mut slices = Vec::with_capacity(places.len());
            for ((page, first), rest) in places.iter().zip(&mut rests) {
                let (part, tokens) = (page.parts[state], page.tokens);
                let (bytes, after) = std::mem::take(rest).split_at_mut(part.bytes(tokens) as usize);
                *rest = after;
                slices.push(PageSlice { part, first: *first, tokens, bytes });
            }
            buffers.save_pages(layout, &self.pool, sequence.length, slices)?;
        }
        Ok(())
    }

    /// A new sequence that holds the tokens of these pages, which follow each other from its first token on.
    pub fn restore_pages(
        &mut self,
        program: &Program,
        pages: &[(&PageLayout, &[u8])],
    ) -> Result<Sequence<B>, EngineError> {
        check_sizes(pages.iter().map(|(layout, bytes)| (*layout, bytes.len())))?;
        let mut sequence = self.new_sequence(program)?;
        let length = pages.iter().map(|(layout, _)| layout.tokens).sum::<u64>();
        if length > sequence.limit {
            let why = format!("{length} tokens are more than a sequence may have: {}", sequence.limit);
            return Err(EngineError::WrongInput { name: "KV pages".to_owned(), why });
        }
        let mut rests: Vec<&[u8]> = pages.iter().map(|(_, bytes)| *bytes).collect();
        for ((state, layout), buffers) in program.layouts.entries().zip(sequence.states.iter_mut()) {
            let (mut first, mut slices) = (0, Vec::with_capacity(pages.len()));
            for ((page, _), rest) in pages.iter().zip(&mut rests) {
                let (part, tokens, whole) = (page.parts[state], page.tokens, *rest);
                let (bytes, after) = whole.split_at(part.bytes(tokens) as usize);
                *rest = after;
                slices.push(PageSlice { part, first, tokens, bytes });
                first += tokens;
            }
            buffers.restore_pages(layout, &self.pool, length, &slices)?;
        }
        sequence.length = length;
        Ok(sequence)
    }
}

/// Refuses a page whose size is not that of its layout.
fn check_sizes<'a>(pages: impl Iterator<Item = (&'a PageLayout, usize)>) -> Result<(), EngineError> {
    for (layout, size) in pages {
        let expected = layout.bytes();
        if size as u64 != expected {
            let why = format!("a page has {size} bytes instead of {expected}");
            return Err(EngineError::WrongInput { name: "KV pages".to_owned(), why });
        }
    }
    Ok(())
}
