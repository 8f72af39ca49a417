//! Rounds a weight one group of rows at a time.

use super::{RoundError, Rounding};
use crate::proto::TensorProto;
use crate::tensor::{self, TensorShape};
use half::{bf16, f16};
use hpp_schema::DType;

/// A weight as a sequence of slabs. A slab holds one group of every column: `rows * inner` contiguous elements.
pub(super) struct Slabs {
    dtype: DType,
    outer: usize,
    axis: usize,
    inner: usize,
    rounding: Rounding,
}

impl Slabs {
    /// The slabs of a float tensor, with groups along `axis`.
    pub fn of(tensor: &TensorProto, axis: usize, rounding: Rounding) -> Result<Self, RoundError> {
        let TensorShape { dtype, dims, .. } = tensor::shape_of(tensor)?;
        let no = |why: String| RoundError::Unsuitable { name: tensor.name().to_owned(), why };
        if !matches!(dtype, DType::Float32 | DType::Float16 | DType::Bfloat16) {
            return Err(no(format!("its elements are {dtype}")));
        }
        let dims: Option<Vec<usize>> = dims.iter().map(|d| usize::try_from(*d).ok()).collect();
        let dims = dims.filter(|dims| axis < dims.len()).ok_or_else(|| no(format!("it has no axis {axis}")))?;
        let product = |dims: &[usize]| dims.iter().product();
        let (outer, inner) = (product(&dims[..axis]), product(&dims[axis + 1..]));
        Ok(Slabs { dtype, outer, axis: dims[axis], inner, rounding })
    }

    /// Rounds slab by slab: `fill` reads the next bytes, `write` writes them.
    pub fn each(
        &self,
        mut fill: impl FnMut(&mut [u8]) -> Result<(), RoundError>,
        mut write: impl FnMut(&[u8]) -> Result<(), RoundError>,
    ) -> Result<(), RoundError> {
        let mut work = Work::default();
        for _ in 0..self.outer {
            let mut left = self.axis;
            while left > 0 {
                let rows = left.min(self.rounding.group);
                work.bytes.resize(rows * self.inner * element(self.dtype), 0);
                fill(&mut work.bytes)?;
                work.round(self);
                write(&work.bytes)?;
                left -= rows;
            }
        }
        Ok(())
    }

    /// Rounds a weight in memory.
    pub fn all(&self, raw: &[u8]) -> Vec<u8> {
        let mut work = Work::default();
        let mut rounded = Vec::with_capacity(raw.len());
        let column = self.inner * element(self.dtype);
        for matrix in raw.chunks((self.axis * column).max(1)) {
            for slab in matrix.chunks((self.rounding.group * column).max(1)) {
                work.bytes.clear();
                work.bytes.extend_from_slice(slab);
                work.round(self);
                rounded.extend_from_slice(&work.bytes);
            }
        }
        rounded
    }
}

fn element(dtype: DType) -> usize {
    if dtype == DType::Float32 { 4 } else { 2 }
}

/// Buffers for one slab.
#[derive(Default)]
struct Work {
    bytes: Vec<u8>,
    values: Vec<f32>,
    /// The largest magnitude of each column.
    largest: Vec<f32>,
}

impl Work {
    fn round(&mut self, slabs: &Slabs) {
        self.values.clear();
        match slabs.dtype {
            DType::Float32 => self.values.extend(self.bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
            DType::Float16 => {
                self.values.extend(self.bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()))
            }
            _ => self.values.extend(self.bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32())),
        }
        round_columns(&mut self.values, slabs.inner, slabs.rounding.bits, &mut self.largest);
        let values = self.values.iter();
        match slabs.dtype {
            DType::Float32 => {
                self.bytes.as_chunks_mut().0.iter_mut().zip(values).for_each(|(b, v)| *b = v.to_le_bytes())
            }
            DType::Float16 => {
                let bytes = self.bytes.as_chunks_mut().0.iter_mut();
                bytes.zip(values).for_each(|(b, v)| *b = f16::from_f32(*v).to_le_bytes());
            }
            _ => {
                let bytes = self.bytes.as_chunks_mut().0.iter_mut();
                bytes.zip(values).for_each(|(b, v)| *b = bf16::from_f32(*v).to_le_bytes());
            }
        }
    }
}

/// Rounds `[rows, inner]` column by column. Columns of zeros, columns with infinities, and NaNs stay unchanged.
fn round_columns(values: &mut [f32], inner: usize, bits: u32, largest: &mut Vec<f32>) {
    let levels = ((1u32 << (bits - 1)) - 1) as f32;
    largest.clear();
    largest.resize(inner, 0.0);
    for row in values.chunks_exact(inner.max(1)) {
        largest.iter_mut().zip(row).for_each(|(largest, v)| *largest = largest.max(v.abs()));
    }
    for row in values.chunks_exact_mut(inner.max(1)) {
        for (value, largest) in row.iter_mut().zip(largest.iter()) {
            let rounded = (*value * (levels / largest)).round_ties_even() * (largest / levels);
            *value = if rounded.is_finite() { rounded } else { *value };
        }
    }
}
