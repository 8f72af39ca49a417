//! KV pages: the contents of a sequence's states for a range of its tokens, copied out as one record and back in.
//!
//! A page of `n` tokens holds, for each state in the program's order, either the `n` tokens of each row, if the state has an axis of
//! tokens, or a copy of the whole state at the page's end (convolution, recurrent, a sliding window).

use super::{Buffer, BufferPool, StateBuffers, StateLayout, about, size_of};
use crate::error::{BackendError, EngineError};
use crate::port::{Backend, Dims, MemoryId};
use crate::program::token_axis;
use crate::tensor::byte_len;
use hpp_schema::{DType, StateUpdate};
use std::ops::Range;

/// The part of a page that belongs to one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PagePart {
    /// This many rows with an axis of tokens.
    Tokens { rows: u64, token_bytes: u64 },
    /// The whole state at the page's end.
    Snapshot { bytes: u64 },
}

impl PagePart {
    /// How a page holds a state; `None` if it cannot, because the caller gave the state or a token does not fill whole bytes.
    pub fn new(layout: &StateLayout, context: u64) -> Option<Self> {
        let holds_each_token = match layout.update {
            StateUpdate::InPlace { capacity, .. } => capacity >= context,
            StateUpdate::Append { .. } => true,
            StateUpdate::Sliding { .. } | StateUpdate::Replace | StateUpdate::ReadOnly => false,
        };
        match layout.update {
            StateUpdate::ReadOnly => None,
            _ if holds_each_token => {
                let axis = token_axis(layout.update)?;
                let one = byte_len(layout.dtype, &layout.full[axis + 1..])?;
                let two: Dims = std::iter::once(2).chain(layout.full[axis + 1..].iter().copied()).collect();
                let is_whole = byte_len(layout.dtype, &two)? == 2 * one;
                let rows = layout.full[..axis].iter().product();
                is_whole.then_some(PagePart::Tokens { rows, token_bytes: one })
            }
            _ => Some(PagePart::Snapshot { bytes: byte_len(layout.dtype, &layout.full)? }),
        }
    }

    /// Bytes of this part in a page of `tokens` tokens.
    pub fn bytes(self, tokens: u64) -> u64 {
        match self {
            PagePart::Tokens { rows, token_bytes } => rows * token_bytes * tokens,
            PagePart::Snapshot { bytes } => bytes,
        }
    }
}

/// What a page holds of one state.
pub(crate) struct PageSlice<T> {
    /// How the page holds it.
    pub part: PagePart,
    /// The first token of the page.
    pub first: u64,
    /// Tokens of the page.
    pub tokens: u64,
    /// The part's bytes.
    pub bytes: T,
}

impl<B: Backend> StateBuffers<B> {
    /// Copies the parts of pages out of a state whose sequence has `length` tokens.
    pub fn save_pages(
        &self,
        layout: &StateLayout,
        pool: &BufferPool<B>,
        length: u64,
        pages: Vec<PageSlice<&mut [u8]>>,
    ) -> Result<(), EngineError> {
        let (buffer, laid_out) = self.held(layout, length);
        let dims = layout.dims(laid_out);
        let host = on_host(pool, layout, buffer, &dims)?;
        let host = host.as_ref().unwrap_or(buffer);
        let state = pool.view(host, DType::Uint8, &[host.bytes]).map_err(about(&layout.past))?;
        for PageSlice { part, first, tokens, bytes } in pages {
            for (offset, place) in pieces(part, laid_out, first, tokens) {
                pool.backend.read(&state, offset, &mut bytes[place]).map_err(about(&layout.past))?;
            }
        }
        Ok(())
    }

    /// Copies the parts of all pages of a sequence of `length` tokens, in their order, into a new state.
    pub fn restore_pages(
        &mut self,
        layout: &StateLayout,
        pool: &BufferPool<B>,
        length: u64,
        pages: &[PageSlice<&[u8]>],
    ) -> Result<(), EngineError> {
        if let StateBuffers::InPlace { tokens, .. } = self {
            *tokens = layout.layout_tokens(length);
        }
        let (buffer, laid_out) = self.held(layout, length);
        let dims = layout.dims(laid_out);
        let bytes = size_of(&layout.past, layout.dtype, &dims)?;
        let staging = match buffer.memory {
            MemoryId::HOST => None,
            _ => Some(pool.reserve(MemoryId::HOST, bytes).map_err(about(&layout.past))?),
        };
        let host = staging.as_ref().unwrap_or(buffer);
        for (after, PageSlice { part, first, tokens, bytes }) in (1..).zip(pages) {
            // Only the last page's snapshot counts.
            if matches!(part, PagePart::Snapshot { .. }) && after < pages.len() {
                continue;
            }
            for (offset, place) in pieces(*part, laid_out, *first, *tokens) {
                pool.backend.write(&host.handle, offset, &bytes[place]).map_err(about(&layout.past))?;
            }
        }
        match &staging {
            Some(staging) => pool.copy(staging, buffer, layout.dtype, &dims).map_err(about(&layout.past)),
            None => Ok(()),
        }
    }

    /// The buffer that holds a sequence of `length` tokens, and the tokens for which it is copied: all it has room for, if pages hold it whole.
    fn held(&self, layout: &StateLayout, length: u64) -> (&Buffer<B>, u64) {
        match (self, layout.update) {
            (StateBuffers::InPlace { buffer, tokens, .. }, _) => (buffer, *tokens),
            (StateBuffers::Double { buffers, past }, StateUpdate::Sliding { capacity, .. }) => {
                (&buffers[*past], capacity)
            }
            (StateBuffers::Double { buffers, past }, _) => (&buffers[*past], length),
            (StateBuffers::Rows { .. } | StateBuffers::Supplied(_), _) => {
                unreachable!("pages hold neither states of several sequences nor those that the caller gives")
            }
        }
    }
}

/// A copy on the host of a buffer on a device; `None` if the buffer is on the host.
fn on_host<B: Backend>(
    pool: &BufferPool<B>,
    layout: &StateLayout,
    buffer: &Buffer<B>,
    dims: &Dims,
) -> Result<Option<Buffer<B>>, EngineError> {
    if buffer.memory == MemoryId::HOST {
        return Ok(None);
    }
    let copy = || -> Result<Buffer<B>, BackendError> {
        let host = pool.reserve(MemoryId::HOST, byte_len(layout.dtype, dims).unwrap_or(buffer.bytes))?;
        pool.backend.synchronize(buffer.memory)?;
        pool.copy(buffer, &host, layout.dtype, dims)?;
        Ok(host)
    };
    copy().map(Some).map_err(about(&layout.past))
}

/// For each piece of a page's part: where it starts in the state's buffer, which is laid out for `laid_out` tokens, and its place in the part.
fn pieces(part: PagePart, laid_out: u64, first: u64, tokens: u64) -> impl Iterator<Item = (u64, Range<usize>)> {
    let (rows, stride, start, bytes) = match part {
        PagePart::Tokens { rows, token_bytes } => {
            (rows, laid_out * token_bytes, first * token_bytes, tokens * token_bytes)
        }
        PagePart::Snapshot { bytes } => (1, 0, 0, bytes),
    };
    (0..rows).map(move |row| (row * stride + start, (row * bytes) as usize..((row + 1) * bytes) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_rows_of_the_buffer() {
        let part = PagePart::Tokens { rows: 2, token_bytes: 10 };
        assert_eq!(part.bytes(3), 60);
        let found: Vec<_> = pieces(part, 8, 3, 3).collect();
        assert_eq!(found, [(30, 0..30), (110, 30..60)]);
        assert_eq!(pieces(PagePart::Snapshot { bytes: 7 }, 8, 3, 3).collect::<Vec<_>>(), [(0, 0..7)]);
    }
}
