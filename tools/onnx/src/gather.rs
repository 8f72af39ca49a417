//! Gathers bytes that lie at regular distances in a weight: the same ranges of each row of a matrix, one after another.

use crate::virtual_file::Computed;
use crate::weight_source::WeightSource;
use std::io;

/// Maximum bytes of one read that covers several ranges close together.
const SPAN_BYTES: u64 = 1 << 20;

/// A range of each row: first byte within the row, and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub start: u64,
    pub length: u64,
}

/// The same ranges of every row of a matrix.
#[derive(Clone, Debug)]
pub(crate) struct Gather {
    pub source: WeightSource,
    /// Number of rows.
    pub rows: u64,
    /// Bytes from the beginning of a row to that of the next.
    pub stride: u64,
    /// Ranges in order, none of them empty.
    pub ranges: Vec<Range>,
}

/// Bytes to copy: from the source, to the result.
struct Piece {
    from: u64,
    length: u64,
}

impl Gather {
    /// Bytes of the result.
    pub fn bytes(&self) -> u64 {
        self.rows * self.row_bytes()
    }

    fn row_bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.length).sum()
    }

    /// The pieces of the source that make up the result from `offset` on, in order.
    fn pieces(&self, offset: u64) -> impl Iterator<Item = Piece> + '_ {
        let (first_row, mut skipped) = (offset / self.row_bytes(), offset % self.row_bytes());
        let all = (first_row..self.rows).flat_map(|row| self.ranges.iter().map(move |range| (row, range)));
        all.filter_map(move |(row, range)| {
            let skip = skipped.min(range.length);
            skipped -= skip;
            let (from, length) = (row * self.stride + range.start + skip, range.length - skip);
            (length > 0).then_some(Piece { from, length })
        })
    }

    /// The first of these pieces, at least one, that lie close together, up to `length` bytes.
    fn close_pieces(&self, offset: u64, length: u64) -> Vec<Piece> {
        let (mut taken, mut pieces) = (0, Vec::<Piece>::new());
        for mut piece in self.pieces(offset) {
            piece.length = piece.length.min(length - taken);
            let start = pieces.first().map_or(piece.from, |first| first.from);
            let is_far = piece.from + piece.length - start > SPAN_BYTES;
            if piece.length == 0 || is_far && !pieces.is_empty() {
                break;
            }
            taken += piece.length;
            pieces.push(piece);
        }
        pieces
    }
}

impl Computed for Gather {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let pieces = self.close_pieces(offset, buffer.len() as u64);
        let size = |bytes: u64| usize::try_from(bytes).map_err(io::Error::other);
        let [first, .., last] = pieces.as_slice() else {
            let Some(only) = pieces.first() else { return Ok(0) };
            let length = size(only.length)?;
            self.source.read(only.from, &mut buffer[..length])?;
            return Ok(length);
        };
        let mut span = vec![0; size(last.from + last.length - first.from)?];
        self.source.read(first.from, &mut span)?;
        let mut filled = 0;
        for piece in &pieces {
            let (start, length) = (size(piece.from - first.from)?, size(piece.length)?);
            buffer[filled..filled + length].copy_from_slice(&span[start..start + length]);
            filled += length;
        }
        Ok(filled)
    }
}
