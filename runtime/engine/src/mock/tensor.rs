//! Bytes in numbered memories, and typed views of them.

use crate::error::BackendError;
use crate::port::{Dims, MemoryId, Tensor};
use crate::tensor::byte_len;
use hpp_schema::DType;
use std::cell::RefCell;
use std::rc::Rc;

/// Bytes in one memory.
#[derive(Clone)]
pub struct MockBuffer(Rc<Bytes>);

struct Bytes {
    memory: MemoryId,
    bytes: RefCell<Vec<u8>>,
}

impl MockBuffer {
    pub(super) fn new(memory: MemoryId, bytes: u64) -> Result<Self, BackendError> {
        let out = || BackendError::OutOfMemory { bytes, place: "mock memory".into(), cause: "too much".into() };
        let size = usize::try_from(bytes).ok().filter(|size| *size < 1 << 32).ok_or_else(out)?;
        Ok(MockBuffer(Rc::new(Bytes { memory, bytes: RefCell::new(vec![0; size]) })))
    }

    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        if self.0.memory != MemoryId::HOST {
            return Err(misfit("a write", "only host memory is written; others are copied to".into()));
        }
        let mut all = self.0.bytes.borrow_mut();
        let (start, length) = (offset as usize, all.len());
        let end = start.checked_add(bytes.len()).filter(|end| *end <= length);
        let end = end.ok_or_else(|| misfit("a write", format!("{} bytes at {offset} of {length}", bytes.len())))?;
        all[start..end].copy_from_slice(bytes);
        Ok(())
    }
}

/// A typed view of a buffer's first bytes.
#[derive(Clone)]
pub struct MockTensor {
    bytes: Rc<Bytes>,
    dtype: DType,
    dims: Dims,
}

impl MockTensor {
    pub(super) fn view(buffer: &MockBuffer, dtype: DType, shape: &[u64]) -> Result<Self, BackendError> {
        let have = buffer.0.bytes.borrow().len() as u64;
        match byte_len(dtype, shape) {
            Some(need) if need <= have => {
                Ok(MockTensor { bytes: buffer.0.clone(), dtype, dims: Dims::from_slice(shape) })
            }
            _ => Err(misfit("a view", format!("{dtype} {shape:?} of {have} bytes"))),
        }
    }

    pub(super) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        let all = self.bytes.bytes.borrow();
        let length = byte_len(self.dtype, &self.dims).unwrap_or(0);
        let end = offset.checked_add(bytes.len() as u64).filter(|end| *end <= length);
        let end = end.ok_or_else(|| misfit("a read", format!("{} bytes at {offset} of {length}", bytes.len())))?;
        bytes.copy_from_slice(&all[offset as usize..end as usize]);
        Ok(())
    }

    pub(super) fn copy_to(&self, to: &MockTensor) -> Result<(), BackendError> {
        if self.dtype != to.dtype || self.dims != to.dims || self.shares_memory_with(to) {
            return Err(misfit("a copy", format!("{:?} to {:?}", self.dims.as_slice(), to.dims.as_slice())));
        }
        let length = byte_len(self.dtype, &self.dims).unwrap_or(0) as usize;
        to.bytes.bytes.borrow_mut()[..length].copy_from_slice(&self.bytes.bytes.borrow()[..length]);
        Ok(())
    }

    /// Whether both views are of one buffer.
    pub fn shares_memory_with(&self, other: &MockTensor) -> bool {
        Rc::ptr_eq(&self.bytes, &other.bytes)
    }

    /// Element `index` of a float32 tensor.
    pub fn f32(&self, index: u64) -> f32 {
        f32::from_le_bytes(self.element(index, DType::Float32))
    }

    /// Sets element `index` of a float32 tensor.
    pub fn set_f32(&self, index: u64, value: f32) {
        assert_eq!(self.dtype, DType::Float32);
        let at = index as usize * 4;
        self.bytes.bytes.borrow_mut()[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    /// Element `index` of an int64 tensor.
    pub fn i64(&self, index: u64) -> i64 {
        i64::from_le_bytes(self.element(index, DType::Int64))
    }

    fn element<const N: usize>(&self, index: u64, dtype: DType) -> [u8; N] {
        assert_eq!(self.dtype, dtype);
        assert!(index < self.dims.iter().product(), "element {index} of {:?}", self.dims.as_slice());
        let at = index as usize * N;
        self.bytes.bytes.borrow()[at..at + N].try_into().unwrap_or([0; N])
    }
}

impl Tensor for MockTensor {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> &[u64] {
        &self.dims
    }

    fn memory(&self) -> MemoryId {
        self.bytes.memory
    }
}

pub(super) fn misfit(what: &str, why: String) -> BackendError {
    BackendError::Misfit { what: what.to_owned(), why }
}
