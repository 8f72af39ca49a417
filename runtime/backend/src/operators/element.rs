//! Numbers that HPP's operators read and write.

use super::prefetch::prefetch;
use half::f16;
use half::slice::HalfFloatSliceExt;
use ort::value::{PrimitiveTensorElementType, TensorElementType};
use std::borrow::Cow;

/// Numbers that are converted while as many are prefetched.
const CONVERTED: usize = 256;

/// An element of a tensor that is computed in float32.
pub(super) trait Element: PrimitiveTensorElementType + Copy + Send + Sync + 'static {
    const TYPE: TensorElementType;

    fn narrow(wide: f32) -> Self;

    /// Numbers in float32.
    fn wide(numbers: &[Self]) -> Cow<'_, [f32]>;

    /// Numbers in float32; `scratch` holds them if they are not stored so.
    fn wide_in<'a>(numbers: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32];

    /// Like [`Element::wide_in`], and prefetches as many numbers that are needed next.
    fn wide_prefetching<'a>(numbers: &'a [Self], next: &[Self], scratch: &'a mut Vec<f32>) -> &'a [f32];
}

impl Element for f32 {
    const TYPE: TensorElementType = TensorElementType::Float32;

    fn narrow(wide: f32) -> Self {
        wide
    }

    fn wide_in<'a>(numbers: &'a [Self], _: &'a mut Vec<f32>) -> &'a [f32] {
        numbers
    }

    fn wide_prefetching<'a>(numbers: &'a [Self], next: &[Self], _: &'a mut Vec<f32>) -> &'a [f32] {
        prefetch(next);
        numbers
    }

    fn wide(numbers: &[Self]) -> Cow<'_, [f32]> {
        Cow::Borrowed(numbers)
    }
}

impl Element for f16 {
    const TYPE: TensorElementType = TensorElementType::Float16;

    fn narrow(wide: f32) -> Self {
        f16::from_f32(wide)
    }

    fn wide_in<'a>(numbers: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32] {
        scratch.resize(numbers.len(), 0.0);
        numbers.convert_to_f32_slice(scratch);
        scratch
    }

    // A prefetch of the whole row at once would make the conversion wait.
    fn wide_prefetching<'a>(numbers: &'a [Self], next: &[Self], scratch: &'a mut Vec<f32>) -> &'a [f32] {
        scratch.resize(numbers.len(), 0.0);
        let parts = numbers.chunks(CONVERTED).zip(next.chunks(CONVERTED)).zip(scratch.chunks_mut(CONVERTED));
        for ((numbers, next), wide) in parts {
            prefetch(next);
            numbers.convert_to_f32_slice(wide);
        }
        scratch
    }

    fn wide(numbers: &[Self]) -> Cow<'_, [f32]> {
        Cow::Owned(numbers.to_f32_vec())
    }
}
