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

/// [`hpp_schema::chunk_length`] for lengths in memory.
pub fn chunk_length(left: usize, chunk: usize) -> usize {
    hpp_schema::chunk_length(left as u64, chunk as u64) as usize
}
