//! Block-quantized integers as ONNX Runtime's kernels pack them: after the integers follow one sum and one scale per block. A sum is its
//! scale times the zero point, which all blocks share, so it need not be stored.
//!
//! The packed layout (`PackedQuantBDataStruct` and `ComputePackBlkSum` in ONNX Runtime's `mlas/lib`) of N columns of K blocks:
//!
//! 1. the integers, N K blocks;
//! 2. from the next multiple of 64 bytes on, the sums: column n and block k at `(n/16 K + k) 16 + n mod 16`;
//! 3. the scales, in groups of four columns. Within a group, r blocks of the first column are followed by the same r blocks of the
//!    second, third and fourth, then by the next r blocks. Blocks after the last whole run of r alternate one by one. r depends on the
//!    processor;
//! 4. up to 126 unused bytes.
//!
//! Nothing relies on this layout being right: every region is decompressed and compared with the original when it is written.

use super::Damaged;
use super::words::{Wide, Word};
use std::ops::Range;

/// Columns whose sums are interleaved.
pub(super) const TILE: usize = 16;
/// Columns whose scales are interleaved.
const FOUR: usize = 4;
/// Bytes of the integers of one block: 16 to 256 of 4 bits, or of 8.
const INTEGERS: [usize; 6] = [8, 16, 32, 64, 128, 256];
/// Unused bytes at the end.
const SLACK: usize = 126;
const LINE: usize = 64;

/// The arrangement of sums and scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SumLayout {
    /// Columns over 16.
    pub tiles: usize,
    /// Blocks per column.
    pub blocks: usize,
    /// Consecutive blocks of a column whose scales are adjacent.
    pub run: usize,
    /// The ratio of a sum to its scale.
    pub factor: f32,
}

/// The possible (offset, number) of the sums in a packed weight of `length` bytes.
pub(super) fn candidates(length: usize) -> impl Iterator<Item = (usize, usize)> {
    INTEGERS.into_iter().filter_map(move |integers| {
        let (each, used) = (integers + 2 * size_of::<Wide>(), length.checked_sub(SLACK)?);
        let count = used / each;
        (used.is_multiple_of(each) && count > 0 && count.is_multiple_of(TILE))
            .then(|| ((count * integers).next_multiple_of(LINE), count))
    })
}

impl SumLayout {
    /// The layout of `count` sums and scales that explains the first tile. `sums` and `scales` begin at the first tile and may be a prefix.
    pub fn find(count: usize, sums: &[Wide], scales: &[Wide]) -> Option<SumLayout> {
        let number = |words: &[Wide]| words.first().map(|word| f32::from_le_bytes(*word));
        let factor = (number(sums)? / number(scales)?).round();
        let tiles_and_blocks = count / TILE;
        let may_be =
            |blocks: &usize| tiles_and_blocks.is_multiple_of(*blocks) && sums.len().min(scales.len()) >= blocks * TILE;
        let runs = |blocks: usize| [1, 2, 4, 8, blocks].map(|run| (blocks, run.min(blocks)));
        (1..=tiles_and_blocks).filter(may_be).flat_map(runs).find_map(|(blocks, run)| {
            let layout = SumLayout { tiles: tiles_and_blocks / blocks, blocks, run, factor };
            let sum_of = |at: usize, column, block| sums[block * TILE + column] == layout.sum(scales[at]);
            layout.scales().zip(0..).all(|((column, block), at)| sum_of(at, column, block)).then_some(layout)
        })
    }

    /// The number of scales in a tile.
    pub fn tile(&self) -> usize {
        TILE * self.blocks
    }

    fn sum(&self, scale: Wide) -> Wide {
        (self.factor * f32::from_le_bytes(scale)).to_le_bytes()
    }

    /// Column and block of each scale of a tile, in storage order.
    fn scales(&self) -> impl Iterator<Item = (usize, usize)> {
        let SumLayout { blocks, run, .. } = *self;
        let whole = blocks / run * run;
        (0..TILE / FOUR).flat_map(move |four| {
            let column = move |one: usize| four * FOUR + one;
            let runs = (0..whole).step_by(run);
            let in_runs = runs
                .flat_map(move |from| (0..FOUR).flat_map(move |one| (from..from + run).map(move |k| (column(one), k))));
            let one_by_one = (whole..blocks).flat_map(move |k| (0..FOUR).map(move |one| (column(one), k)));
            in_runs.chain(one_by_one)
        })
    }

    /// Stores the scales of whole tiles, in the order of the sums.
    pub fn store(&self, word: Word, scales: &[Wide], out: &mut Vec<u8>) {
        let mut ordered = vec![[0; 4]; self.tile()];
        for tile in scales.chunks_exact(self.tile()) {
            for ((column, block), scale) in self.scales().zip(tile) {
                ordered[block * TILE + column] = *scale;
            }
            ordered.iter().for_each(|scale| word.put(*scale, out));
        }
    }

    /// Computes the sums and the scales of whole tiles from the stored scales; an error if they are not as many as `sums`.
    pub fn decompress(&self, word: Word, stored: &[u8], sums: &mut [Wide], scales: &mut [Wide]) -> Result<(), Damaged> {
        let tile = self.tile();
        if stored.len() != sums.len() * word.bytes() || sums.len() != scales.len() {
            return Err(Damaged);
        }
        let tiles = stored.chunks_exact(tile * word.bytes()).zip(sums.chunks_exact_mut(tile));
        for ((stored, sums), scales) in tiles.zip(scales.chunks_exact_mut(tile)) {
            word.widen(stored, sums)?;
            self.order(sums, scales);
            sums.iter_mut().for_each(|scale| *scale = self.sum(*scale));
        }
        Ok(())
    }

    /// Copies a tile's numbers from the order of sums to the order of scales.
    fn order(&self, ordered: &[Wide], scales: &mut [Wide]) {
        let SumLayout { blocks, run, .. } = *self;
        let whole = blocks / run * run;
        let (rows, _) = ordered.as_chunks::<TILE>();
        let in_runs = match run {
            1 => in_runs::<1>,
            2 => in_runs::<2>,
            4 => in_runs::<4>,
            8 => in_runs::<8>,
            _ => in_long_runs,
        };
        for (four, scales) in scales.chunks_exact_mut(FOUR * blocks).enumerate() {
            let (whole_runs, one_by_one) = scales.split_at_mut(whole * FOUR);
            in_runs(run, four * FOUR, &rows[..whole], whole_runs);
            self::in_runs::<1>(1, four * FOUR, &rows[whole..], one_by_one);
        }
    }

    /// The byte range of these tiles.
    pub fn bytes(&self, tiles: &Range<usize>) -> Range<usize> {
        let tile = self.tile() * size_of::<Wide>();
        tiles.start * tile..tiles.end * tile
    }
}

/// Copies the scales of four columns from `first` on, in runs of a constant length.
fn in_runs<const RUN: usize>(_: usize, first: usize, rows: &[[Wide; TILE]], scales: &mut [Wide]) {
    let (rows, _) = rows.as_chunks::<RUN>();
    for (scales, rows) in scales.chunks_exact_mut(FOUR * RUN).zip(rows) {
        for one in 0..FOUR {
            for (block, row) in rows.iter().enumerate() {
                scales[one * RUN + block] = row[first + one];
            }
        }
    }
}

/// As [`in_runs`], in runs of any length.
fn in_long_runs(run: usize, first: usize, rows: &[[Wide; TILE]], scales: &mut [Wide]) {
    for (scales, rows) in scales.chunks_exact_mut(FOUR * run).zip(rows.chunks_exact(run)) {
        for (one, scales) in scales.chunks_exact_mut(run).enumerate() {
            scales.iter_mut().zip(rows).for_each(|(scale, row)| *scale = row[first + one]);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Sums and scales packed as in ONNX Runtime's source, from the scale of each column and block.
    pub fn packed(
        columns: usize,
        blocks: usize,
        run: usize,
        factor: f32,
        scale: impl Fn(usize, usize) -> f32,
    ) -> [Vec<Wide>; 2] {
        let (mut sums, mut scales) = (vec![[0; 4]; columns * blocks], vec![[0; 4]; columns * blocks]);
        for n in 0..columns {
            for k in 0..blocks {
                let value = scale(n, k);
                sums[((n / 16) * blocks + k) * 16 + n % 16] = (factor * value).to_le_bytes();
                let (sub, inside) = (k / run, k % run);
                let at = match sub == blocks / run {
                    true => sub * run * 4 + inside * 4 + n % 4,
                    false => sub * run * 4 + (n % 4) * run + inside,
                };
                scales[(n / 4) * 4 * blocks + at] = value.to_le_bytes();
            }
        }
        [sums, scales]
    }

    fn scale(n: usize, k: usize) -> f32 {
        f32::from_bits((0.01 + (n * 131 + k * 17) as f32 / 1e4).to_bits() & 0xffff_0000)
    }

    #[test]
    fn layouts_are_found_and_decompress_to_the_original() {
        for (columns, blocks, run, factor) in [
            (64, 64, 2, -8.0),
            (32, 7, 4, -8.0),
            (16, 3, 1, -128.0),
            (48, 64, 1, -8.0),
            (32, 24, 24, -2.0),
            (16, 1, 1, -8.0),
        ] {
            let [sums, scales] = packed(columns, blocks, run, factor, scale);
            let layout = SumLayout::find(columns * blocks, &sums, &scales).unwrap();
            assert_eq!((layout.blocks, layout.factor), (blocks, factor), "{columns} columns");
            for word in [Word::Full, Word::Bfloat] {
                let mut stored = Vec::new();
                layout.store(word, &scales, &mut stored);
                assert_eq!(stored.len(), columns * blocks * word.bytes());
                let mut made = [vec![[1; 4]; sums.len()], vec![[1; 4]; sums.len()]];
                let [of_sums, of_scales] = &mut made;
                layout.decompress(word, &stored, of_sums, of_scales).unwrap();
                let short = layout.decompress(word, &stored[4..], &mut of_sums.clone(), &mut of_scales.clone());
                assert_eq!(short, Err(Damaged));
                assert!(made == [sums.clone(), scales.clone()], "{columns} columns of {blocks} blocks, runs of {run}");
            }
        }
    }

    #[test]
    fn sums_with_different_zero_points_have_no_layout() {
        let [mut sums, scales] = packed(32, 16, 2, -8.0, scale);
        sums[7] = (-5.0 * scale(7, 0)).to_le_bytes();
        assert_eq!(SumLayout::find(32 * 16, &sums, &scales), None);
        assert_eq!(SumLayout::find(0, &[], &[]), None);
    }

    #[test]
    fn candidates_follow_from_the_length() {
        // 2048 columns of 64 blocks of 32 4-bit integers.
        let count = 2048 * 64;
        assert!(candidates(count * 24 + 126).any(|found| found == (count * 16, count)));
        assert_eq!(candidates(100).count(), 0);
    }
}
