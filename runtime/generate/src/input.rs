//! The input of a sequence in one pass.

use hpp_engine::LogitRows;

/// The input of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Input<'a> {
    /// A chunk of the prompt; or tokens of the text that the sequence does not hold yet, usually the last one, then a draft.
    pub tokens: &'a [u32],
    /// The positions whose logits [`Generation::advance`](crate::Generation::advance) needs.
    pub rows: LogitRows,
}

/// How many of `left` prompt tokens to feed now, at most `chunk + 1`. The last chunk has at least two tokens, unless `chunk` is 1: a single
/// one would count as decoding.
pub fn chunk_length(left: usize, chunk: usize) -> usize {
    let last = if chunk > 1 { chunk.saturating_add(1) } else { chunk };
    if left <= last { left } else { chunk }
}
