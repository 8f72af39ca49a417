//! Numbers that HPP's operators read and write.

use half::f16;
use half::slice::HalfFloatSliceExt;
use ort::value::{PrimitiveTensorElementType, TensorElementType};
use std::borrow::Cow;

/// An element of a tensor that is computed in float32.
pub(super) trait Element: PrimitiveTensorElementType + Copy + Send + Sync + 'static {
    const TYPE: TensorElementType;

    fn narrow(wide: f32) -> Self;

    /// Numbers in float32.
    fn wide(numbers: &[Self]) -> Cow<'_, [f32]>;

    /// Numbers in float32; `scratch` holds them if they are not stored so.
    fn wide_in<'a>(numbers: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32];
}

impl Element for f32 {
    const TYPE: TensorElementType = TensorElementType::Float32;

    fn narrow(wide: f32) -> Self {
        wide
    }

    fn wide_in<'a>(numbers: &'a [Self], _: &'a mut Vec<f32>) -> &'a [f32] {
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

    fn wide(numbers: &[Self]) -> Cow<'_, [f32]> {
        Cow::Owned(numbers.to_f32_vec())
    }
}
