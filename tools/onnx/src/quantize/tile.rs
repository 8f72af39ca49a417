//! Quantizes neighbouring columns of a matrix that is stored row by row, without transposing it. [`super::block_quantizer`] loops over the numbers
//! of a block; this module loops over the numbers of a row, which are neighbours in memory, so the loops are vectorized. The bytes are the same.
//! Scales are computed from the extremes.

use super::block_quantizer::{Bits, BlockFormat, BlockScale, Levels, ScaleType, level, scale_of};

/// Maximum columns of a tile: enough for whole cache lines of a row.
pub(super) const WIDTH: usize = 64;

/// One block of each of up to [`WIDTH`] columns.
pub(super) struct Tile {
    /// Row by row, each of [`WIDTH`] numbers.
    rows: Vec<[f32; WIDTH]>,
    columns: usize,
}

/// The scales of a tile, by column.
pub(super) struct TileScales {
    scales: [BlockScale; WIDTH],
    inverse: [f32; WIDTH],
    zero: [f32; WIDTH],
}

impl Tile {
    /// A tile of this many columns.
    pub fn new(columns: usize) -> Self {
        assert!(columns <= WIDTH, "a tile has at most {WIDTH} columns");
        Tile { rows: vec![], columns }
    }

    /// Replaces the numbers by those of `rows` rows. `fill` gets the index of a row and writes its columns.
    pub fn fill(&mut self, rows: usize, mut fill: impl FnMut(usize, &mut [f32])) {
        self.rows.resize(rows, [0.0; WIDTH]);
        self.rows.iter_mut().enumerate().for_each(|(index, row)| fill(index, &mut row[..self.columns]));
    }

    /// The scale of each column. `None` if a number or a scale is infinite or NaN.
    pub fn scales(&self, format: BlockFormat, types: ScaleType) -> Option<TileScales> {
        let (mut mins, mut maxs, mut are_finite) = ([f32::MAX; WIDTH], [f32::MIN; WIDTH], true);
        for row in &self.rows {
            for ((value, min), max) in row.iter().zip(&mut mins).zip(&mut maxs) {
                *min = if *value < *min { *value } else { *min };
                *max = if *value > *max { *value } else { *max };
                are_finite &= value.is_finite();
            }
        }
        let mut found = TileScales {
            scales: [BlockScale { scale: 0.0, zero_point: 0 }; WIDTH],
            inverse: [0.0; WIDTH],
            zero: [0.0; WIDTH],
        };
        for column in 0..self.columns {
            // Where all numbers are zeros, min and max are the first zero, whose sign becomes that of the scale.
            let BlockScale { scale, zero_point } = scale_of(mins[column], maxs[column], format);
            let scale = BlockScale { scale: types.round(scale), zero_point };
            are_finite &= scale.scale.is_finite();
            found.scales[column] = scale;
            (found.inverse[column], found.zero[column]) = Levels::new(scale, format.bits).line();
        }
        are_finite.then_some(found)
    }

    /// Writes the numbers of each column to its block of bytes. The rest of a block is filled with the level of zero.
    pub fn quantize<'a>(&self, scales: &TileScales, bits: Bits, blocks: impl Iterator<Item = &'a mut [u8]>) {
        let packed: Vec<[u8; WIDTH]> = match bits {
            Bits::Four => self.rows.chunks(2).map(|pair| self.pair(pair, scales)).collect(),
            Bits::Eight => self.rows.iter().map(|row| scales.levels(row, bits)).collect(),
        };
        for (column, block) in blocks.take(self.columns).enumerate() {
            let zero_point = scales.scales[column].zero_point;
            let (written, rest) = block.split_at_mut(packed.len());
            written.iter_mut().zip(&packed).for_each(|(byte, row)| *byte = row[column]);
            rest.fill(if bits == Bits::Four { zero_point | zero_point << 4 } else { zero_point });
        }
    }

    /// The bytes of two rows of 4-bit numbers. If the second row is missing, the level of zero takes its place.
    fn pair(&self, pair: &[[f32; WIDTH]], scales: &TileScales) -> [u8; WIDTH] {
        let mut bytes = scales.levels(&pair[0], Bits::Four);
        match pair.get(1) {
            Some(second) => {
                let second = scales.levels(second, Bits::Four);
                bytes.iter_mut().zip(second).for_each(|(byte, level)| *byte |= level << 4);
            }
            None => bytes.iter_mut().zip(&scales.scales).for_each(|(byte, scale)| *byte |= scale.zero_point << 4),
        }
        bytes
    }
}

impl TileScales {
    /// Scale and zero point of a column.
    pub fn of(&self, column: usize) -> BlockScale {
        self.scales[column]
    }

    fn levels(&self, row: &[f32; WIDTH], bits: Bits) -> [u8; WIDTH] {
        let (top, mut levels) = (bits.top(), [0; WIDTH]);
        for (((to, value), inverse), zero) in levels.iter_mut().zip(row).zip(&self.inverse).zip(&self.zero) {
            *to = level(value * inverse + zero, top);
        }
        levels
    }
}
