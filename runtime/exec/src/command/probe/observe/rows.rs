//! Tapped tensors as rows of numbers, one row per token. If the model recomputes the whole text, only the rows of new tokens are read.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use hpp_engine::{EngineError, HostTensor};
use hpp_schema::DType;

/// Rows of float32 numbers, in buffers that are reused between passes.
#[derive(Default)]
pub(super) struct Rows {
    /// `width` numbers for each row.
    pub values: Vec<f32>,
    /// Numbers in a row.
    pub width: usize,
    half: Vec<u16>,
}

impl Rows {
    /// The rows of the last `tokens` tokens of `[..., width]`, of float32, float16 or bfloat16.
    pub fn read(&mut self, name: &str, tensor: &HostTensor, tokens: usize) -> Result<(), EngineError> {
        let width = last(name, tensor)?;
        let bytes = last_rows(name, tensor, width, tokens)?;
        self.width = width;
        self.values.clear();
        self.decode(name, tensor.dtype, bytes)
    }

    /// All numbers of a tensor, in rows as long as its last axis.
    pub fn read_all(&mut self, name: &str, tensor: &HostTensor) -> Result<(), EngineError> {
        self.width = last(name, tensor)?;
        self.values.clear();
        self.decode(name, tensor.dtype, &tensor.bytes)
    }

    /// The rows.
    pub fn iter(&self) -> std::slice::ChunksExact<'_, f32> {
        self.values.chunks_exact(self.width)
    }

    /// Adds other rows of the same shape element by element.
    pub fn add(&mut self, name: &str, other: &Rows) -> Result<(), EngineError> {
        if (self.width, self.values.len()) != (other.width, other.values.len()) {
            return Err(wrong(name, "the tensors that carry the hidden state have different shapes".into()));
        }
        self.values.iter_mut().zip(&other.values).for_each(|(a, b)| *a += b);
        Ok(())
    }

    fn decode(&mut self, name: &str, dtype: DType, bytes: &[u8]) -> Result<(), EngineError> {
        match dtype {
            DType::Float32 => self.values.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))),
            DType::Float16 | DType::Bfloat16 => {
                self.half.clear();
                self.half.extend(bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)));
                self.values.resize(self.half.len(), 0.0);
                widen(dtype, &self.half, &mut self.values);
            }
            other => return Err(wrong(name, format!("its element type {other} is not supported"))),
        }
        Ok(())
    }
}

/// Converts 16-bit floats to float32, with the processor's instructions if it has them.
fn widen(dtype: DType, half: &[u16], values: &mut [f32]) {
    use half::slice::HalfBitsSliceExt;
    if dtype == DType::Float16 {
        half.reinterpret_cast::<f16>().convert_to_f32_slice(values);
    } else {
        half.reinterpret_cast::<bf16>().convert_to_f32_slice(values);
    }
}

/// Indices of the last `tokens` tokens of `[..., width]`, of int32 or int64.
pub(super) fn indices(name: &str, tensor: &HostTensor, tokens: usize) -> Result<(Vec<i64>, usize), EngineError> {
    let width = last(name, tensor)?;
    let bytes = last_rows(name, tensor, width, tokens)?;
    let indices = match tensor.dtype {
        DType::Int64 => bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        DType::Int32 => bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
        other => return Err(wrong(name, format!("its element type {other} is not one of indices"))),
    };
    Ok((indices, width))
}

/// The error for a tapped tensor that does not fit its tap.
pub(super) fn wrong(name: &str, why: String) -> EngineError {
    EngineError::WrongOutput { name: name.to_owned(), why }
}

fn last(name: &str, tensor: &HostTensor) -> Result<usize, EngineError> {
    let size = tensor.shape.last().and_then(|size| usize::try_from(*size).ok()).filter(|size| *size > 0);
    size.ok_or_else(|| wrong(name, format!("its shape {:?} has no rows", tensor.shape)))
}

fn last_rows<'a>(name: &str, tensor: &'a HostTensor, width: usize, tokens: usize) -> Result<&'a [u8], EngineError> {
    let row = tensor.dtype.bytes_for(width as u64).and_then(|bytes| usize::try_from(bytes).ok()).filter(|row| *row > 0);
    let wanted = row.and_then(|row| row.checked_mul(tokens));
    let start = wanted.and_then(|wanted| tensor.bytes.len().checked_sub(wanted));
    let few = || wrong(name, format!("its shape {:?} has fewer than {tokens} tokens", tensor.shape));
    Ok(&tensor.bytes[start.ok_or_else(few)?..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_tokens_are_read_from_every_float_type() {
        let floats = [1.0f32, -2.0, 0.5, 3.0, f32::INFINITY, 0.0];
        let tensor = |dtype, bytes| HostTensor { dtype, shape: vec![1, 3, 2], bytes };
        let wide = tensor(DType::Float32, floats.iter().flat_map(|f| f.to_le_bytes()).collect());
        let f16s = tensor(DType::Float16, floats.iter().flat_map(|f| f16::from_f32(*f).to_le_bytes()).collect());
        let bf16s = tensor(DType::Bfloat16, floats.iter().flat_map(|f| bf16::from_f32(*f).to_le_bytes()).collect());
        for tensor in [wide, f16s, bf16s] {
            let mut rows = Rows::default();
            rows.read("t", &tensor, 2).unwrap();
            assert_eq!((rows.width, &rows.values[..]), (2, &floats[2..]), "{}", tensor.dtype);
            rows.read("t", &tensor, 3).unwrap();
            assert_eq!(rows.iter().len(), 3);
            assert!(rows.read("t", &tensor, 4).is_err());
        }
    }

    #[test]
    fn indices_have_two_widths() {
        let wide = HostTensor::from_i64(&[2, 2], &[1, 2, 3, -1]);
        assert_eq!(indices("i", &wide, 1).unwrap(), (vec![3, -1], 2));
        let bytes = [7i32, 8].iter().flat_map(|i| i.to_le_bytes()).collect();
        assert_eq!(indices("i", &HostTensor { dtype: DType::Int32, shape: vec![2], bytes }, 1).unwrap().0, [7, 8]);
        assert!(indices("i", &HostTensor::from_f32(&[1], &[0.0]), 1).is_err());
    }
}
