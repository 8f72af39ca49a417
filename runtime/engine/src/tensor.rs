//! Host tensors: the inputs and outputs of the engine in plain memory.

use half::{bf16, f16};
use hpp_schema::DType;

/// A tensor in host memory: little-endian elements in row-major order, sub-byte types packed.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    /// Element type; never [`DType::String`].
    pub dtype: DType,
    /// Sizes.
    pub shape: Vec<u64>,
    /// The elements.
    pub bytes: Vec<u8>,
}

impl HostTensor {
    /// A float32 tensor.
    pub fn from_f32(shape: &[u64], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        HostTensor { dtype: DType::Float32, shape: shape.to_vec(), bytes }
    }

    /// An int64 tensor.
    pub fn from_i64(shape: &[u64], values: &[i64]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        HostTensor { dtype: DType::Int64, shape: shape.to_vec(), bytes }
    }

    /// Number of elements; `None` where the product leaves 64 bits.
    pub fn elements(&self) -> Option<u64> {
        elements(&self.shape)
    }

    /// Why the bytes do not fit the type and shape, if they do not.
    pub fn misfit(&self) -> Option<String> {
        match byte_len(self.dtype, &self.shape) {
            None => Some(format!("{} tensors of shape {:?} cannot be held", self.dtype, self.shape)),
            Some(want) if want != self.bytes.len() as u64 => {
                Some(format!("{} bytes for {} {:?}, which takes {want}", self.bytes.len(), self.dtype, self.shape))
            }
            Some(_) => None,
        }
    }

    /// Whether an element is this number; false for types that are not int32 or int64.
    pub(crate) fn holds(&self, number: i64) -> bool {
        match self.dtype {
            DType::Int64 => self.bytes.chunks_exact(8).any(|bytes| bytes == number.to_le_bytes()),
            DType::Int32 => i32::try_from(number)
                .is_ok_and(|number| self.bytes.chunks_exact(4).any(|bytes| bytes == number.to_le_bytes())),
            _ => false,
        }
    }

    /// The elements as f32, for floating-point tensors.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        let mut out = Vec::new();
        floats_to_f32(self.dtype, &self.bytes, &mut out).then_some(out)
    }
}

/// Next-token logits: `rows` rows of `vocab` numbers. A value that is reused from step to step avoids allocations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logits {
    /// Positions.
    pub rows: usize,
    /// Logits per position.
    pub vocab: usize,
    /// `rows * vocab` logits.
    pub data: Vec<f32>,
}

impl Logits {
    /// The logits at one position.
    pub fn row(&self, index: usize) -> &[f32] {
        &self.data[index * self.vocab..(index + 1) * self.vocab]
    }

    /// The logits at the last position; empty if there are none.
    pub fn last(&self) -> &[f32] {
        if self.rows == 0 { &[] } else { self.row(self.rows - 1) }
    }
}

/// Product of the sizes.
pub(crate) fn elements(shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size))
}

/// Bytes a tensor occupies.
pub(crate) fn byte_len(dtype: DType, shape: &[u64]) -> Option<u64> {
    dtype.bytes_for(elements(shape)?)
}

/// Appends floating-point elements as f32; false for types that are not f16, bf16, f32 or f64.
pub(crate) fn floats_to_f32(dtype: DType, bytes: &[u8], out: &mut Vec<f32>) -> bool {
    match dtype {
        DType::Float32 => out.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        DType::Float16 => out.extend(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())),
        DType::Bfloat16 => out.extend(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())),
        DType::Float64 => out.extend(
            bytes.chunks_exact(8).map(|b| f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]) as f32),
        ),
        _ => return false,
    }
    true
}

/// Appends f32 values as floating-point elements; false for types that are not f16, bf16, f32 or f64.
pub(crate) fn f32_to_floats(dtype: DType, values: &[f32], out: &mut Vec<u8>) -> bool {
    match dtype {
        DType::Float32 => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        DType::Float16 => out.extend(values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes())),
        DType::Bfloat16 => out.extend(values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes())),
        DType::Float64 => out.extend(values.iter().flat_map(|v| f64::from(*v).to_le_bytes())),
        _ => return false,
    }
    true
}

/// Appends small non-negative integers as elements of any ordinary number type; false for other types.
pub(crate) fn integers(dtype: DType, values: impl Iterator<Item = u64>, out: &mut Vec<u8>) -> bool {
    match dtype {
        DType::Int64 | DType::Uint64 => out.extend(values.flat_map(u64::to_le_bytes)),
        DType::Int32 | DType::Uint32 => out.extend(values.flat_map(|v| (v as u32).to_le_bytes())),
        DType::Int16 | DType::Uint16 => out.extend(values.flat_map(|v| (v as u16).to_le_bytes())),
        DType::Int8 | DType::Uint8 => out.extend(values.map(|v| v as u8)),
        DType::Bool => out.extend(values.map(|v| u8::from(v != 0))),
        DType::Float32 => out.extend(values.flat_map(|v| (v as f32).to_le_bytes())),
        DType::Float16 => out.extend(values.flat_map(|v| f16::from_f32(v as f32).to_le_bytes())),
        DType::Bfloat16 => out.extend(values.flat_map(|v| bf16::from_f32(v as f32).to_le_bytes())),
        DType::Float64 => out.extend(values.flat_map(|v| (v as f64).to_le_bytes())),
        _ => return false,
    }
    true
}
