//! KV pages: saves the states of a sequence page by page, and makes a sequence from saved pages.

use super::{Runtime, Sequence};
use crate::buffers::{PagePart, PageRange};
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

impl<B: Backend> Runtime<B> {
    /// Copies consecutive pages out of a sequence. The first starts at token `first`; each of `pages` has the layout's bytes.
    pub fn save_pages(
        &mut self,
        program: &Program,
        layout: &PageLayout,
        sequence: &Sequence<B>,
        first: u64,
        pages: &mut [&mut [u8]],
    ) -> Result<(), EngineError> {
        check_sizes(layout, pages.iter().map(|page| page.len()))?;
        let last = first + pages.len().saturating_sub(1) as u64 * layout.tokens;
        if sequence.interrupted || !layout.can_save(first, sequence.length) || !layout.can_save(last, sequence.length) {
            let why = format!("a sequence of {} tokens does not hold them whole", sequence.length);
            return Err(EngineError::WrongInput { name: "KV pages".to_owned(), why });
        }
        let mut rests: Vec<&mut [u8]> = pages.iter_mut().map(|page| &mut **page).collect();
        for ((state, part), buffers) in layout.parts.entries().zip(sequence.states.iter()) {
            let bytes = part.bytes(layout.tokens) as usize;
            let (mut parts, after): (Vec<_>, Vec<_>) = rests.into_iter().map(|rest| rest.split_at_mut(bytes)).unzip();
            rests = after;
            let range = PageRange { part: *part, first, tokens: layout.tokens, pages: &mut parts };
            buffers.save_pages(&program.layouts[state], &self.pool, sequence.length, range)?;
        }
        Ok(())
    }

    /// A new sequence that holds the tokens of these pages, which start with its first token.
    pub fn restore_pages(
        &mut self,
        program: &Program,
        layout: &PageLayout,
        pages: &[&[u8]],
    ) -> Result<Sequence<B>, EngineError> {
        check_sizes(layout, pages.iter().map(|page| page.len()))?;
        let mut sequence = self.new_sequence(program)?;
        let length = pages.len() as u64 * layout.tokens;
        if length > sequence.limit {
            let why = format!("{length} tokens are more than a sequence may have: {}", sequence.limit);
            return Err(EngineError::WrongInput { name: "KV pages".to_owned(), why });
        }
        let mut rests = pages.to_vec();
        for ((state, part), buffers) in layout.parts.entries().zip(sequence.states.iter_mut()) {
            let bytes = part.bytes(layout.tokens) as usize;
            let (mut parts, after): (Vec<_>, Vec<_>) = rests.into_iter().map(|rest| rest.split_at(bytes)).unzip();
            rests = after;
            let range = PageRange { part: *part, first: 0, tokens: layout.tokens, pages: &mut parts };
            buffers.restore_pages(&program.layouts[state], &self.pool, length, range)?;
        }
        sequence.length = length;
        Ok(sequence)
    }
}

fn check_sizes(layout: &PageLayout, mut sizes: impl Iterator<Item = usize>) -> Result<(), EngineError> {
    let expected = layout.bytes();
    match sizes.find(|size| *size as u64 != expected) {
        None => Ok(()),
        Some(size) => {
            let why = format!("a page has {size} bytes instead of {expected}");
            Err(EngineError::WrongInput { name: "KV pages".to_owned(), why })
        }
    }
}
