//! The difference of two tensors.

use half::{bf16, f16};
use hpp_engine::HostTensor;
use hpp_schema::DType;
use serde::Serialize;

/// Largest difference allowed, relative to the size of the reference tensor (see [`Difference::max_rel`]).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Tolerance(pub f64);

/// Smallest size of a tensor for relative differences: smaller tensors count as this large.
const SMALLEST_SIZE: f64 = 1e-3;

/// The difference of two tensors.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Whether type, shape and all bits are equal.
    pub bit_identical: bool,
    /// Largest absolute difference of two elements; infinite if exactly one of them is NaN, if infinities differ, or if the
    /// shapes differ.
    #[serde(serialize_with = "finite_or_text")]
    pub max_abs: f64,
    /// `max_abs` divided by the size of the reference tensor: its largest magnitude, but at least 0.001. A smaller tensor is usually the remainder of
    /// larger numbers that cancel, and has their rounding errors.
    #[serde(serialize_with = "finite_or_text")]
    pub max_rel: f64,
}

impl Difference {
    /// No difference.
    pub const NONE: Difference = Difference { bit_identical: true, max_abs: 0.0, max_rel: 0.0 };

    /// Tensors that cannot be compared.
    pub const INFINITE: Difference =
        Difference { bit_identical: false, max_abs: f64::INFINITY, max_rel: f64::INFINITY };

    /// The difference of two rows of logits.
    pub fn of_logits(reference: &[f32], other: &[f32]) -> Self {
        let same_bits =
            reference.len() == other.len() && reference.iter().zip(other).all(|(a, b)| a.to_bits() == b.to_bits());
        if same_bits {
            return Self::NONE;
        }
        let wide = |logits: &[f32]| logits.iter().map(|s| f64::from(*s)).collect::<Vec<_>>();
        Self::of_numbers(&wide(reference), &wide(other))
    }

    /// The difference of two tensors of any type. Tensors of a type that cannot be read as numbers are equal or infinitely different.
    pub fn of_tensors(reference: &HostTensor, other: &HostTensor) -> Self {
        if reference == other {
            return Self::NONE;
        }
        if reference.dtype != other.dtype || reference.shape != other.shape {
            return Self::INFINITE;
        }
        match (numbers(reference), numbers(other)) {
            (Some(a), Some(b)) => Self::of_numbers(&a, &b),
            _ => Self::INFINITE,
        }
    }

    /// Whether it is within the tolerance.
    pub fn is_within(&self, tolerance: Tolerance) -> bool {
        self.bit_identical || self.max_rel <= tolerance.0
    }

    fn of_numbers(reference: &[f64], other: &[f64]) -> Self {
        if reference.len() != other.len() {
            return Self::INFINITE;
        }
        let apart = |(a, b): (&f64, &f64)| match () {
            () if a == b || (a.is_nan() && b.is_nan()) => 0.0,
            () if a.is_finite() && b.is_finite() => (a - b).abs(),
            () => f64::INFINITY,
        };
        let max_abs = reference.iter().zip(other).map(apart).fold(0.0, f64::max);
        let size = reference.iter().filter(|v| v.is_finite()).map(|v| v.abs()).fold(SMALLEST_SIZE, f64::max);
        Difference { bit_identical: false, max_abs, max_rel: max_abs / size }
    }
}

/// JSON has no infinity.
fn finite_or_text<S: serde::Serializer>(value: &f64, s: S) -> Result<S::Ok, S::Error> {
    if value.is_finite() { s.serialize_f64(*value) } else { s.serialize_str("infinite") }
}

fn numbers(tensor: &HostTensor) -> Option<Vec<f64>> {
    fn read<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.as_chunks::<N>().0.iter().map(|b| number(*b)).collect()
    }
    let bytes = tensor.bytes.as_slice();
    Some(match tensor.dtype {
        DType::Float32 => read(bytes, |b| f64::from(f32::from_le_bytes(b))),
        DType::Float64 => read(bytes, f64::from_le_bytes),
        DType::Float16 => read(bytes, |b| f16::from_le_bytes(b).to_f64()),
        DType::Bfloat16 => read(bytes, |b| bf16::from_le_bytes(b).to_f64()),
        DType::Int64 => read(bytes, |b| i64::from_le_bytes(b) as f64),
        DType::Int32 => read(bytes, |b| f64::from(i32::from_le_bytes(b))),
        DType::Int16 => read(bytes, |b| f64::from(i16::from_le_bytes(b))),
        DType::Int8 => read(bytes, |b| f64::from(i8::from_le_bytes(b))),
        DType::Uint64 => read(bytes, |b| u64::from_le_bytes(b) as f64),
        DType::Uint32 => read(bytes, |b| f64::from(u32::from_le_bytes(b))),
        DType::Uint16 => read(bytes, |b| f64::from(u16::from_le_bytes(b))),
        DType::Uint8 | DType::Bool => read(bytes, |b: [u8; 1]| f64::from(b[0])),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_absolute_and_relative_to_the_largest() {
        let d = Difference::of_logits(&[1.0, -4.0], &[1.5, -4.0]);
        assert_eq!(d, Difference { bit_identical: false, max_abs: 0.5, max_rel: 0.125 });
        assert!(d.is_within(Tolerance(0.125)) && !d.is_within(Tolerance(0.1)));
    }

    #[test]
    fn equal_numbers_with_different_bits_are_not_bit_identical() {
        assert_eq!(Difference::of_logits(&[0.0], &[0.0]), Difference::NONE);
        let d = Difference::of_logits(&[0.0], &[-0.0]);
        assert!(!d.bit_identical && d.max_abs == 0.0 && d.is_within(Tolerance(0.0)));
    }

    #[test]
    fn nan_and_different_lengths_are_infinitely_different() {
        assert_eq!(Difference::of_logits(&[1.0], &[f32::NAN]).max_abs, f64::INFINITY);
        assert_eq!(Difference::of_logits(&[f32::NAN], &[f32::NAN]).max_abs, 0.0);
        assert!(!Difference::of_logits(&[f32::NAN, 1.0], &[2.0, 1.0]).is_within(Tolerance(1e9)));
        assert!(!Difference::of_logits(&[1.0], &[1.0, 2.0]).is_within(Tolerance(1e9)));
        assert!(!Difference::of_logits(&[0.0], &[1.0]).is_within(Tolerance(0.5)));
    }

    #[test]
    fn rounding_errors_of_numbers_that_cancel_are_within_tolerance() {
        let noise = Difference::of_logits(&[6e-9, -3e-9], &[-4e-9, 2e-9]);
        assert!(noise.max_rel < 2e-5 && noise.is_within(Tolerance(1e-4)), "{noise:?}");
        assert!(!noise.is_within(Tolerance(0.0)));
        assert!(!Difference::of_logits(&[6e-9], &[1e-6]).is_within(Tolerance(1e-4)));
    }

    #[test]
    fn tensors_of_every_readable_type_compare() {
        let a = HostTensor::from_i64(&[2], &[1, -8]);
        let b = HostTensor::from_i64(&[2], &[3, -8]);
        assert_eq!(Difference::of_tensors(&a, &b).max_rel, 0.25);
        let c = HostTensor { shape: vec![2, 1], ..b.clone() };
        assert_eq!(Difference::of_tensors(&b, &c).max_abs, f64::INFINITY);
    }
}
