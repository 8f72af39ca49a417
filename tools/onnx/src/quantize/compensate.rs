//! Error-compensated rounding (GPTQ, Frantar et al., arXiv 2210.17323): chooses the levels of a matrix so that its products with observed inputs
//! change least. Plain rounding changes the weights least instead.
//!
//! Let `H = X^T X` over observed inputs `X` `[positions, length]`, and `U` the upper triangular factor of `(H + damping I)^-1 = U^T U`. If rounding
//! changes weight `i` of a column by the error `e`, each weight `j > i` of that column is changed by `-e U[i][j] / U[i][i]`. Inputs are divided
//! into spans of neighbours, and errors are compensated only within a span. So memory is `depth * span` instead of `depth * depth`, and a column is
//! rounded slab by slab. Every sum has a fixed order and columns are independent, so the number of threads changes no bit.

use super::block_quantizer::{
    BlockFormat, BlockScale, Levels, NotFinite, ScaleType, compensated_scale, dequantize, pack,
};

/// The factor `U` of a span of inputs.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Factor {
    length: usize,
    /// `U` `[length, length]`, zeros below the diagonal.
    upper: Vec<f64>,
}

impl Factor {
    /// Computes the factor from symmetric second moments `[length, length]`. `None` if a moment is infinite or NaN, or `damping` is not positive.
    pub fn new(moments: &[f64], length: usize, damping: f64) -> Option<Self> {
        if !(damping.is_finite() && damping > 0.0 && moments.iter().all(|moment| moment.is_finite())) {
            return None;
        }
        // `H = R R^T` with `R` upper triangular gives `U = R^-1`.
        // R[i][j] = (H[i][j] - sum over k > j of R[i][k] R[j][k]) / R[j][j], from the last column to the first.
        let mut root = vec![0.0; length * length];
        for j in (0..length).rev() {
            let dot = |root: &[f64], i: usize| -> f64 {
                let [a, b] = [i, j].map(|row| &root[row * length + j + 1..(row + 1) * length]);
                a.iter().zip(b).map(|(a, b)| a * b).sum()
            };
            // Positive except for rounding errors, because the damped matrix is positive definite.
            let square = (moments[j * length + j] + damping - dot(&root, j)).max(damping * 1e-6);
            root[j * length + j] = square.sqrt();
            for i in 0..j {
                root[i * length + j] = (moments[i * length + j] - dot(&root, i)) / root[j * length + j];
            }
        }
        Some(Factor { length, upper: inverse(&root, length) })
    }

    /// A factor that compensates nothing.
    pub fn uncompensated(length: usize) -> Self {
        let diagonal = |at: usize| if at.is_multiple_of(length + 1) { 1.0 } else { 0.0 };
        Factor { length, upper: (0..length * length).map(diagonal).collect() }
    }

    fn pivot(&self, at: usize) -> f64 {
        self.upper[at * self.length + at]
    }

    /// What the error of a weight adds to the weights after it, per unit of `error / pivot`.
    fn shares(&self, at: usize) -> &[f64] {
        &self.upper[at * self.length + at + 1..(at + 1) * self.length]
    }
}

/// The inverse of an upper triangular matrix, from the last row up.
fn inverse(upper: &[f64], length: usize) -> Vec<f64> {
    let mut result = vec![0.0; length * length];
    for i in (0..length).rev() {
        let (before, after) = result.split_at_mut((i + 1) * length);
        let row = &mut before[i * length..];
        let pivot = upper[i * length + i];
        for k in i + 1..length {
            let share = upper[i * length + k];
            let other = &after[(k - i - 1) * length..][..length];
            row.iter_mut().zip(other).skip(k).for_each(|(value, other)| *value -= share * other);
        }
        row.iter_mut().for_each(|value| *value /= pivot);
        row[i] = 1.0 / pivot;
    }
    result
}

/// Quantizes, block by block, the weights of a column that belong to a span of inputs, and writes the levels to `out`. Calls `put` with the index
/// of each block in the span and its scale. There are at most as many `values` as the factor has inputs.
pub(super) fn quantize_span(
    values: &[f32],
    factor: &Factor,
    format: BlockFormat,
    scales: ScaleType,
    out: &mut [u8],
    mut put: impl FnMut(usize, BlockScale),
) -> Result<(), NotFinite> {
    if let Some(at) = values.iter().position(|value| !value.is_finite()) {
        return Err(NotFinite::Value(at));
    }
    let mut left: Vec<f64> = values.iter().map(|value| f64::from(*value)).collect();
    let mut levels = Vec::with_capacity(format.block_size);
    for (number, out) in out.chunks_mut(format.block_bytes()).enumerate() {
        let start = number * format.block_size;
        let end = (start + format.block_size).min(left.len());
        let block: Vec<f32> = left[start..end].iter().map(|value| *value as f32).collect();
        // The error of a weight with a small pivot costs more.
        let cost: Vec<f64> = (start..end).map(|at| factor.pivot(at).powi(-2)).collect();
        let scale = compensated_scale(&block, format, scales, &cost).map_err(|_| NotFinite::Scale)?;
        let rounding = Levels::new(scale, format.bits);
        levels.clear();
        for at in start..end {
            let level = rounding.level(left[at] as f32);
            levels.push(level);
            let error = (left[at] - f64::from(dequantize(level, scale))) / factor.pivot(at);
            left[at + 1..].iter_mut().zip(factor.shares(at)).for_each(|(value, share)| *value -= error * share);
        }
        pack(&levels, scale.zero_point, format.bits, out);
        put(number, scale);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::block_quantizer::{Bits, ScaleRule, quantize_block};
    use super::*;

    fn numbers(count: usize, mut state: u64) -> Vec<f64> {
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as f64 / (1_u64 << 31) as f64 - 0.5
        };
        (0..count).map(|_| next()).collect()
    }

    /// Inputs that depend on a few hidden numbers, `[positions, depth]`.
    fn inputs(positions: usize, depth: usize) -> Vec<f64> {
        let (hidden, mix, noise) = (numbers(positions * 6, 1), numbers(6 * depth, 2), numbers(positions * depth, 3));
        let value = |at: usize| {
            let (position, input) = (at / depth, at % depth);
            let sum: f64 = (0..6).map(|h| hidden[position * 6 + h] * mix[h * depth + input]).sum();
            sum + 0.05 * noise[at]
        };
        (0..positions * depth).map(value).collect()
    }

    fn moments(inputs: &[f64], depth: usize) -> Vec<f64> {
        let mut sums = vec![0.0; depth * depth];
        for row in inputs.chunks(depth) {
            for (i, a) in row.iter().enumerate() {
                row.iter().zip(&mut sums[i * depth..]).for_each(|(b, sum)| *sum += a * b);
            }
        }
        sums
    }

    fn restored(bytes: &[u8], scales: &[BlockScale], format: BlockFormat) -> Vec<f64> {
        let level = |at: usize| bytes[at / 2] >> (4 * (at % 2)) & 15;
        let value = |at: usize| f64::from(dequantize(level(at), scales[at / format.block_size]));
        (0..bytes.len() * 2).map(value).collect()
    }

    #[test]
    fn the_factor_is_that_of_the_damped_inverse() {
        let (length, damping) = (24, 0.3);
        let h = moments(&inputs(100, length), length);
        let u = Factor::new(&h, length, damping).unwrap().upper;
        let product = |i: usize, k: usize| (0..length).map(|r| u[r * length + i] * u[r * length + k]).sum::<f64>();
        for (i, j) in (0..length).flat_map(|i| (0..length).map(move |j| (i, j))) {
            let damped = |k: usize| h[k * length + j] + if k == j { damping } else { 0.0 };
            let one: f64 = (0..length).map(|k| product(i, k) * damped(k)).sum();
            assert!((one - f64::from(u8::from(i == j))).abs() < 1e-9, "{i} {j} {one}");
        }
    }

    #[test]
    fn products_with_the_inputs_change_less_than_when_rounding_to_the_nearest() {
        let depth = 64;
        let inputs = inputs(200, depth);
        let h = moments(&inputs, depth);
        let mean = (0..depth).map(|at| h[at * depth + at]).sum::<f64>() / depth as f64;
        let factor = Factor::new(&h, depth, 0.1 * mean).unwrap();
        for asymmetric in [false, true] {
            let format = BlockFormat { bits: Bits::Four, block_size: 32, asymmetric, scale: ScaleRule::Fitted };
            let (mut nearest, mut compensated) = (0.0, 0.0);
            for seed in 10..40 {
                let weights: Vec<f32> = numbers(depth, seed).into_iter().map(|value| value as f32).collect();
                let squared_error = |restored: &[f64]| -> f64 {
                    let difference = |(weight, restored): (&f32, &f64)| f64::from(*weight) - restored;
                    let differences: Vec<f64> = weights.iter().zip(restored).map(difference).collect();
                    let product = |row: &[f64]| row.iter().zip(&differences).map(|(x, d)| x * d).sum::<f64>();
                    inputs.chunks(depth).map(|row| product(row).powi(2)).sum()
                };
                let (mut bytes, mut scales) = (vec![0; depth / 2], vec![]);
                for (block, out) in weights.chunks(32).zip(bytes.chunks_mut(16)) {
                    scales.push(quantize_block(block, format, ScaleType::Float32, out).unwrap());
                }
                nearest += squared_error(&restored(&bytes, &scales, format));
                scales.clear();
                let put = |_, scale| scales.push(scale);
                quantize_span(&weights, &factor, format, ScaleType::Float32, &mut bytes, put).unwrap();
                compensated += squared_error(&restored(&bytes, &scales, format));
            }
            assert!(compensated < 0.5 * nearest, "{compensated} {nearest}");
        }
    }

    #[test]
    fn inputs_that_were_always_zero_change_nothing() {
        // With zero moments only the damping remains, so `U` is diagonal.
        let factor = Factor::new(&[0.0; 32 * 32], 32, 1.0).unwrap();
        let format = BlockFormat { bits: Bits::Four, block_size: 16, asymmetric: false, scale: ScaleRule::Fitted };
        let weights: Vec<f32> = numbers(27, 5).into_iter().map(|value| value as f32).collect();
        let (mut expected, mut bytes, mut scales) = (vec![0; 16], vec![0; 16], vec![]);
        for (block, out) in weights.chunks(16).zip(expected.chunks_mut(8)) {
            scales.push(quantize_block(block, format, ScaleType::Float16, out).unwrap());
        }
        let put = |number: usize, scale| assert_eq!(scales[number], scale);
        quantize_span(&weights, &factor, format, ScaleType::Float16, &mut bytes, put).unwrap();
        assert_eq!(bytes, expected, "the last block is filled with zeros");
    }

    #[test]
    fn moments_that_say_nothing_are_refused_and_bad_weights_named() {
        assert!(Factor::new(&[1.0, f64::NAN, f64::NAN, 1.0], 2, 0.1).is_none());
        assert!(Factor::new(&[0.0; 4], 2, 0.0).is_none());
        let factor = Factor::new(&[4.0, 4.0, 4.0, 4.0], 2, 0.1).unwrap();
        let format = BlockFormat { bits: Bits::Four, block_size: 16, asymmetric: false, scale: ScaleRule::Fitted };
        let bad = quantize_span(&[1.0, f32::NAN], &factor, format, ScaleType::Float32, &mut [0; 8], |_, _| {});
        assert_eq!(bad, Err(NotFinite::Value(1)));
    }
}
