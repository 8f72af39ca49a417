//! The arithmetic of block quantization: rounds a block of numbers to integers of 4 or 8 bits with one scale.
//!
//! The rule and the byte order are those of ONNX Runtime's own quantizer (MLAS, `BlockwiseQuantizer` in `q4_dq.cpp`), so
//! that the same weights give the same bytes. With `top = 2^bits - 1` and `half = 2^(bits-1)`:
//!
//! - symmetric: `scale = -v / half`, where `v` is the value of largest magnitude, and the zero point is `half`;
//! - asymmetric: `scale = (max - min) / top` with 0 between `min` and `max`, and the zero point is `round(-min / scale)`.
//!
//! A number becomes `round(number / scale + zero point)`, limited to `0..=top`; halves are rounded away from zero. Does not
//! know matrices, files or graphs.

use half::f16;

/// Bits of a quantized number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Bits {
    /// Two numbers in a byte, the first one in the low half.
    Four,
    /// One number in a byte.
    Eight,
}

impl Bits {
    /// The number of bits.
    pub fn count(self) -> usize {
        match self {
            Bits::Four => 4,
            Bits::Eight => 8,
        }
    }

    /// The largest quantized number.
    pub(super) fn top(self) -> f32 {
        match self {
            Bits::Four => 15.0,
            Bits::Eight => 255.0,
        }
    }

    /// The zero point of symmetric blocks.
    fn symmetric_zero_point(self) -> u8 {
        match self {
            Bits::Four => 8,
            Bits::Eight => 128,
        }
    }
}

/// How the scale of a block follows from its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ScaleRule {
    /// From the extremes, as ONNX Runtime's own quantizer does.
    Extremes,
    /// The scale with the least squared error among some scales around that of the extremes.
    Fitted,
}

/// How a matrix is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockFormat {
    /// Bits of a number.
    pub bits: Bits,
    /// Numbers that share a scale: a power of 2, 16 or more.
    pub block_size: usize,
    /// Whether each block has a zero point of its own.
    pub asymmetric: bool,
    /// How scales are chosen. [`ScaleRule::Fitted`] is for symmetric blocks.
    pub scale: ScaleRule,
}

impl BlockFormat {
    /// Bytes of the numbers of a block.
    pub fn block_bytes(self) -> usize {
        self.block_size * self.bits.count() / 8
    }

    /// Whether scales are searched for instead of computed from the extremes.
    pub(super) fn fits_scales(self) -> bool {
        self.scale == ScaleRule::Fitted && !self.asymmetric
    }
}

/// The element type of scales, which is that of the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ScaleType {
    Float32,
    Float16,
}

impl ScaleType {
    /// Bytes of a scale.
    pub fn bytes(self) -> usize {
        match self {
            ScaleType::Float32 => 4,
            ScaleType::Float16 => 2,
        }
    }

    /// Rounds a scale as it is rounded when it is stored.
    pub fn round(self, scale: f32) -> f32 {
        match self {
            ScaleType::Float32 => scale,
            ScaleType::Float16 => f16::from_f32(scale).to_f32(),
        }
    }

    /// Writes a scale.
    pub fn write(self, scale: f32, to: &mut [u8]) {
        match self {
            ScaleType::Float32 => to.copy_from_slice(&scale.to_le_bytes()),
            ScaleType::Float16 => to.copy_from_slice(&f16::from_f32(scale).to_le_bytes()),
        }
    }
}

/// Scale and zero point of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct BlockScale {
    pub scale: f32,
    pub zero_point: u8,
}

/// What is infinite or NaN in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotFinite {
    /// The number at this position.
    Value(usize),
    /// The scale, although all numbers are finite.
    Scale,
}

impl NotFinite {
    /// The position to report, in a block of `length` numbers. For a scale it is the last one.
    pub fn position(self, length: usize) -> usize {
        match self {
            NotFinite::Value(at) => at,
            NotFinite::Scale => length.saturating_sub(1),
        }
    }
}

/// Numbers that are rounded together before they are packed, so that both loops are vectorized.
const AT_ONCE: usize = 64;

/// Quantizes a block. The last block of a row may be shorter than `format.block_size`; it is padded with zeros.
pub(super) fn quantize_block(
    values: &[f32],
    format: BlockFormat,
    scales: ScaleType,
    out: &mut [u8],
) -> Result<BlockScale, NotFinite> {
    let scale = block_scale(values, format, scales, format.fits_scales().then_some(|_| 1.0))?;
    let rounding = Levels::new(scale, format.bits);
    out.fill(if format.bits == Bits::Four { scale.zero_point | scale.zero_point << 4 } else { scale.zero_point });
    let mut levels = [0; AT_ONCE];
    for (values, out) in values.chunks(AT_ONCE).zip(out.chunks_mut(AT_ONCE * format.bits.count() / 8)) {
        let levels = &mut levels[..values.len()];
        levels.iter_mut().zip(values).for_each(|(level, value)| *level = rounding.level(*value));
        pack(levels, scale.zero_point, format.bits, out);
    }
    Ok(scale)
}

/// The scale of a block in which the squared error of the number at each position counts `cost` times. Symmetric scales are fitted.
pub(super) fn compensated_scale(
    values: &[f32],
    format: BlockFormat,
    scales: ScaleType,
    cost: &[f64],
) -> Result<BlockScale, NotFinite> {
    block_scale(values, format, scales, (!format.asymmetric).then_some(|at: usize| cost[at]))
}

/// The scale of a block as it is stored: computed from the extremes, or fitted if there is a `cost`.
fn block_scale(
    values: &[f32],
    format: BlockFormat,
    scales: ScaleType,
    cost: Option<impl Fn(usize) -> f64>,
) -> Result<BlockScale, NotFinite> {
    let (min, max) = range(values)?;
    let BlockScale { scale, zero_point } = scale_of(min, max, format);
    let scale = scales.round(scale);
    if !scale.is_finite() {
        return Err(NotFinite::Scale);
    }
    let scale = cost.map_or(scale, |cost| fitted(values, scale, format.bits, scales, cost));
    Ok(BlockScale { scale, zero_point })
}

/// Rounds the numbers of a block to levels.
pub(super) struct Levels {
    inverse: f32,
    zero: f32,
    top: f32,
}

impl Levels {
    /// Levels for a block with this scale.
    pub fn new(scale: BlockScale, bits: Bits) -> Self {
        // Where the scale is so small that its inverse is infinite, all numbers become zeros.
        let inverse = Some(1.0 / scale.scale).filter(|inverse| inverse.is_finite()).unwrap_or(0.0);
        Levels { inverse, zero: f32::from(scale.zero_point), top: bits.top() }
    }

    /// Factor and summand: `number * factor + summand` is rounded to the number's level.
    pub fn line(&self) -> (f32, f32) {
        (self.inverse, self.zero)
    }

    /// The level of a number.
    pub fn level(&self, value: f32) -> u8 {
        level(value * self.inverse + self.zero, self.top)
    }
}

/// Writes levels, padded with the level of zero.
pub(super) fn pack(levels: &[u8], zero_point: u8, bits: Bits, out: &mut [u8]) {
    match bits {
        Bits::Four => {
            out.fill(zero_point | zero_point << 4);
            for (byte, pair) in out.iter_mut().zip(levels.chunks(2)) {
                *byte = pair[0] | pair.get(1).unwrap_or(&zero_point) << 4;
            }
        }
        Bits::Eight => {
            out.fill(zero_point);
            out.iter_mut().zip(levels).for_each(|(byte, level)| *byte = *level);
        }
    }
}

/// How many scales are tried on each side of the scale of the extremes. A step from one to the next is a tenth of a level.
const STEPS: i8 = 9;

/// The scale with the least squared error. Candidates are `first`, and for each of up to [`STEPS`] steps up and down the scale that fits, by least
/// squares, the levels which the stepped scale gives. Never worse than `first`. The squared error of the number at each position counts `cost`
/// times.
fn fitted(values: &[f32], first: f32, bits: Bits, scales: ScaleType, cost: impl Fn(usize) -> f64) -> f32 {
    let (half, top) = (f32::from(bits.symmetric_zero_point()), bits.top());
    let level_of = |value: f32, inverse: f32| f32::from(level(value * inverse + half, top)) - half;
    let error = |scale: f32| {
        let inverse = Some(1.0 / scale).filter(|inverse| inverse.is_finite()).unwrap_or(0.0);
        let difference = |value: &f32| f64::from(level_of(*value, inverse) * scale - value);
        values.iter().enumerate().map(|(at, value)| cost(at) * difference(value).powi(2)).sum::<f64>()
    };
    let (mut best, mut least) = (first, error(first));
    for step in -STEPS..=STEPS {
        let inverse = (1.0 / first) * (1.0 + 0.1 * f32::from(step) / half);
        if !inverse.is_finite() {
            continue;
        }
        let (mut product, mut square) = (0.0f64, 0.0f64);
        for (at, value) in values.iter().enumerate() {
            let level = f64::from(level_of(*value, inverse));
            product += cost(at) * level * f64::from(*value);
            square += cost(at) * level * level;
        }
        let scale = scales.round((product / square) as f32);
        let is_better = scale.is_finite() && scale != 0.0;
        if let Some(error) = is_better.then(|| error(scale)).filter(|error| *error < least) {
            (best, least) = (scale, error);
        }
    }
    best
}

/// The number that a level stands for.
pub(super) fn dequantize(level: u8, BlockScale { scale, zero_point }: BlockScale) -> f32 {
    (f32::from(level) - f32::from(zero_point)) * scale
}

const LANES: usize = 8;

/// The smallest and the largest number.
fn range(values: &[f32]) -> Result<(f32, f32), NotFinite> {
    // Several lanes at a time: in a single chain, each comparison would wait for the one before.
    let (mut mins, mut maxs, mut are_finite) = ([f32::MAX; LANES], [f32::MIN; LANES], [true; LANES]);
    for values in values.chunks(LANES) {
        for (lane, value) in values.iter().enumerate() {
            mins[lane] = if *value < mins[lane] { *value } else { mins[lane] };
            maxs[lane] = if *value > maxs[lane] { *value } else { maxs[lane] };
            are_finite[lane] &= value.is_finite();
        }
    }
    if are_finite.contains(&false)
        && let Some(at) = values.iter().position(|value| !value.is_finite())
    {
        return Err(NotFinite::Value(at));
    }
    let min = mins.into_iter().fold(f32::MAX, |least, min| if min < least { min } else { least });
    let max = maxs.into_iter().fold(f32::MIN, |most, max| if max > most { max } else { most });
    match values {
        // If all numbers are zeros, the first one's sign becomes the sign of the scale.
        [first, ..] if min == 0.0 && max == 0.0 => Ok((*first, *first)),
        _ => Ok((min, max)),
    }
}

/// Scale and zero point of a block with these extremes. The scale is not yet rounded to its stored type.
pub(super) fn scale_of(min: f32, max: f32, format: BlockFormat) -> BlockScale {
    let top = format.bits.top();
    if !format.asymmetric {
        let zero_point = format.bits.symmetric_zero_point();
        let largest = if max.abs() > min.abs() { max } else { min };
        return BlockScale { scale: -largest / f32::from(zero_point), zero_point };
    }
    let (min, max) = (min.min(0.0), max.max(0.0));
    let scale = (max - min) / top;
    let zero_point = if scale == 0.0 { 0 } else { level(-min / scale, top) };
    BlockScale { scale, zero_point }
}

/// Rounds to `0..=top`, halves away from zero. `f32::round` is a function call on x86-64 without SSE 4.1; this is a few instructions that
/// vectorize. It is exact for numbers of this size: adding 2^23 rounds to a whole number (halves to an even one), which the lowest bits then hold.
pub(super) fn level(value: f32, top: f32) -> u8 {
    const WHOLE: f32 = 8_388_608.0;
    let limited = value.clamp(0.0, top);
    let shifted = limited + WHOLE;
    (shifted.to_bits() as u8) + u8::from(limited - (shifted - WHOLE) >= 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn format(bits: Bits, block_size: usize, asymmetric: bool) -> BlockFormat {
        BlockFormat { bits, block_size, asymmetric, scale: ScaleRule::Extremes }
    }

    fn quantize(values: &[f32], format: BlockFormat) -> (Vec<u8>, BlockScale) {
        let mut out = vec![0xaa; format.block_bytes()];
        let scale = quantize_block(values, format, ScaleType::Float32, &mut out).unwrap();
        (out, scale)
    }

    fn levels(bytes: &[u8], bits: Bits) -> Vec<u8> {
        match bits {
            Bits::Four => bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect(),
            Bits::Eight => bytes.to_vec(),
        }
    }

    #[test]
    fn levels_are_rounded_halves_away_from_zero() {
        for step in 0..=(260 * 64) {
            let value = step as f32 / 64.0 - 2.0;
            assert_eq!(level(value, 255.0), value.round().clamp(0.0, 255.0) as u8, "{value}");
            assert_eq!(level(value, 15.0), value.round().clamp(0.0, 15.0) as u8, "{value}");
        }
        for value in [f32::NAN, f32::NEG_INFINITY, 0.499_999_97, 254.499_98] {
            assert_eq!(level(value, 255.0), value.round().clamp(0.0, 255.0) as u8, "{value}");
        }
        assert_eq!(level(f32::INFINITY, 255.0), 255);
    }

    #[test]
    fn the_first_of_only_zeros_has_the_sign_of_the_scale() {
        let mut zeros = [0.0f32; 32];
        for first in [0.0, -0.0f32] {
            zeros[0] = first;
            zeros[9] = -first;
            let (_, scale) = quantize(&zeros, format(Bits::Four, 32, false));
            assert_eq!(scale.scale.to_bits(), (-first / 8.0).to_bits());
        }
    }

    #[test]
    fn the_largest_magnitude_becomes_the_lowest_level() {
        let (bytes, scale) = quantize(&[0.0, 8.0, -7.0, 3.5], format(Bits::Four, 16, false));
        assert_eq!(scale, BlockScale { scale: -1.0, zero_point: 8 });
        // 3.5 is -3.5 steps: 4.5 is rounded away from zero. The rest of the block is filled with zeros.
        assert_eq!(levels(&bytes, Bits::Four)[..6], [8, 0, 15, 5, 8, 8]);
        let (_, tie) = quantize(&[-2.0, 2.0], format(Bits::Four, 16, false));
        assert_eq!(tie.scale, 0.25, "of equal magnitudes the negative one is taken");
    }

    #[test]
    fn a_fitted_scale_gives_up_a_lonely_extreme() {
        let mut values = [1.5f32; 32];
        values.iter_mut().step_by(2).for_each(|value| *value = -1.5);
        values[7] = 8.0;
        let error = |scale| {
            let format = BlockFormat { scale, ..format(Bits::Four, 32, false) };
            let (bytes, scale) = quantize(&values, format);
            let differences = levels(&bytes, Bits::Four).into_iter().zip(values).map(|(l, v)| dequantize(l, scale) - v);
            differences.map(|difference| difference * difference).sum::<f32>()
        };
        assert!(error(ScaleRule::Fitted) < 0.5 * error(ScaleRule::Extremes));
    }

    #[test]
    fn zero_is_exact_in_asymmetric_blocks() {
        let (bytes, scale) = quantize(&[1.0, 16.0, 0.0], format(Bits::Four, 16, true));
        assert_eq!((scale.zero_point, levels(&bytes, Bits::Four)[2]), (0, 0));
        let (bytes, scale) = quantize(&[-5.0, 10.0, 0.0], format(Bits::Four, 16, true));
        assert_eq!(scale, BlockScale { scale: 1.0, zero_point: 5 });
        assert_eq!(levels(&bytes, Bits::Four)[..4], [0, 15, 5, 5]);
    }

    #[test]
    fn blocks_of_zeros_and_of_tiny_numbers_become_zeros() {
        for values in [[0.0f32; 32], [-0.0; 32], [1e-44; 32]] {
            for asymmetric in [false, true] {
                for bits in [Bits::Four, Bits::Eight] {
                    let (bytes, scale) = quantize(&values, format(bits, 32, asymmetric));
                    assert!(levels(&bytes, bits).iter().all(|level| dequantize(*level, scale).abs() <= 1e-44));
                }
            }
        }
        let mut out = [0; 16];
        let scale = quantize_block(&[1e-9; 32], format(Bits::Four, 32, false), ScaleType::Float16, &mut out).unwrap();
        assert_eq!((scale.scale, out), (0.0, [0x88; 16]), "below the smallest float16");
    }

    #[test]
    fn numbers_that_are_not_finite_are_refused_with_their_position() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for asymmetric in [false, true] {
                let mut values = [1.0; 32];
                values[17] = bad;
                let result =
                    quantize_block(&values, format(Bits::Four, 32, asymmetric), ScaleType::Float32, &mut [0; 16]);
                assert_eq!(result, Err(NotFinite::Value(17)));
            }
        }
        let far_apart = [f32::MAX, f32::MIN];
        let result = quantize_block(&far_apart, format(Bits::Four, 16, true), ScaleType::Float32, &mut [0; 8]);
        assert_eq!(result, Err(NotFinite::Scale), "a range beyond float32");
        let beyond_half = quantize_block(&[1e6], format(Bits::Four, 16, false), ScaleType::Float16, &mut [0; 8]);
        assert_eq!(beyond_half, Err(NotFinite::Scale));
    }

    proptest! {
        #[test]
        fn fitted_scales_have_no_larger_error(values in proptest::collection::vec(-1e3..1e3f32, 1..=32), half: bool) {
            let error = |scale| {
                let format = BlockFormat { scale, ..format(Bits::Four, 32, false) };
                let (mut out, scales) = ([0; 16], if half { ScaleType::Float16 } else { ScaleType::Float32 });
                let scale = quantize_block(&values, format, scales, &mut out).unwrap();
                let differences = levels(&out, Bits::Four).into_iter().zip(&values).map(|(l, v)| dequantize(l, scale) - v);
                differences.map(|difference| f64::from(difference).powi(2)).sum::<f64>()
            };
            prop_assert!(error(ScaleRule::Fitted) <= error(ScaleRule::Extremes) * (1.0 + 1e-12));
        }

        #[test]
        fn halves_are_rounded_away_from_zero(value in -3.0..300.0f32) {
            prop_assert_eq!(f32::from(level(value, 255.0)), value.round().clamp(0.0, 255.0));
        }

        #[test]
        fn the_error_is_at_most_half_a_step_or_a_step_at_the_far_end(
            values in proptest::collection::vec(-1e3..1e3f32, 1..=32), asymmetric: bool, eight: bool
        ) {
            let bits = if eight { Bits::Eight } else { Bits::Four };
            let (bytes, scale) = quantize(&values, format(bits, 32, asymmetric));
            for (level, value) in levels(&bytes, bits).iter().zip(&values) {
                let error = (dequantize(*level, scale) - value).abs();
                // A symmetric block has one level fewer on one side of zero. A rounded zero point moves all levels by up to half a step.
                prop_assert!(error <= scale.scale.abs() * 1.001, "{} of {}", error, scale.scale);
            }
        }
    }
}
