//! Bytes in numbered memories, and typed views of them.

use crate::error::BackendError;
use crate::port::{Dims, MemoryId, Tensor};
use crate::tensor::byte_len;
use hpp_schema::DType;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Bytes in one memory: a whole block, or part of one.
#[derive(Clone)]
pub struct MockBuffer {
    block: Rc<Bytes>,
    start: usize,
    length: usize,
}

struct Bytes {
    memory: MemoryId,
    bytes: RefCell<Vec<u8>>,
    /// Copies that overwrite it and have not been waited for.
    coming: Cell<u32>,
    /// Until when runs on an asynchronous device use it.
    used_until: Cell<Duration>,
    /// The free bytes of its memory, if that is limited.
    account: Option<Rc<Cell<u64>>>,
}

impl Drop for Bytes {
    fn drop(&mut self) {
        if let Some(left) = &self.account {
            left.set(left.get() + self.bytes.borrow().len() as u64);
        }
    }
}

impl MockBuffer {
    pub(super) fn new(memory: MemoryId, bytes: u64) -> Result<Self, BackendError> {
        Self::of(memory, bytes, None)
    }

    /// A block that reduces the free bytes of its memory until it is dropped.
    pub(super) fn of(memory: MemoryId, bytes: u64, account: Option<Rc<Cell<u64>>>) -> Result<Self, BackendError> {
        let out = || BackendError::OutOfMemory { bytes, place: "mock memory".into(), cause: "too much".into() };
        let size = usize::try_from(bytes).ok().filter(|size| *size < 1 << 32).ok_or_else(out)?;
        let block = Bytes {
            memory,
            bytes: RefCell::new(vec![0; size]),
            coming: Cell::new(0),
            used_until: Cell::default(),
            account,
        };
        Ok(MockBuffer { block: Rc::new(block), start: 0, length: size })
    }

    /// Part of a buffer.
    pub(super) fn slice(&self, offset: u64, bytes: u64) -> Option<Self> {
        let (offset, length) = (offset as usize, bytes as usize);
        let fits = offset + length <= self.length;
        fits.then(|| MockBuffer { block: Rc::clone(&self.block), start: self.start + offset, length })
    }

    pub(super) fn memory(&self) -> MemoryId {
        self.block.memory
    }

    /// Whether both are in one block.
    pub(super) fn is_same(&self, other: &MockBuffer) -> bool {
        Rc::ptr_eq(&self.block, &other.block)
    }

    /// A copy of this many bytes begins: fills the bytes with NaNs.
    pub(super) fn overwrite(&self, length: usize) -> Result<(), BackendError> {
        let mut all = self.block.bytes.borrow_mut();
        if length > all.len() {
            return Err(misfit("a weight", format!("{length} bytes go to a buffer of {}", all.len())));
        }
        all.fill(0xff);
        self.block.coming.set(self.block.coming.get() + 1);
        Ok(())
    }

    /// The copy has finished.
    pub(super) fn deliver(&self, bytes: &[u8]) -> Result<(), BackendError> {
        self.block.coming.set(self.block.coming.get().saturating_sub(1));
        self.block.bytes.borrow_mut()[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        if self.block.memory != MemoryId::HOST {
            return Err(misfit("a write", "only host memory is written; others are copied to".into()));
        }
        let end = (offset as usize).checked_add(bytes.len()).filter(|end| *end <= self.length);
        let out = || misfit("a write", format!("{} bytes at {offset} of {}", bytes.len(), self.length));
        let end = self.start + end.ok_or_else(out)?;
        self.block.bytes.borrow_mut()[end - bytes.len()..end].copy_from_slice(bytes);
        Ok(())
    }
}

/// A typed view of a buffer's first bytes.
#[derive(Clone)]
pub struct MockTensor {
    bytes: Rc<Bytes>,
    /// The offset in `bytes` of its first byte.
    start: usize,
    dtype: DType,
    dims: Dims,
}

impl MockTensor {
    pub(super) fn view(buffer: &MockBuffer, dtype: DType, shape: &[u64]) -> Result<Self, BackendError> {
        let have = buffer.length as u64;
        match byte_len(dtype, shape) {
            Some(need) if need <= have => Ok(MockTensor {
                bytes: Rc::clone(&buffer.block),
                start: buffer.start,
                dtype,
                dims: Dims::from_slice(shape),
            }),
            _ => Err(misfit("a view", format!("{dtype} {shape:?} of {have} bytes"))),
        }
    }

    pub(super) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        let all = self.bytes.bytes.borrow();
        let length = byte_len(self.dtype, &self.dims).unwrap_or(0);
        let end = offset.checked_add(bytes.len() as u64).filter(|end| *end <= length);
        let end = end.ok_or_else(|| misfit("a read", format!("{} bytes at {offset} of {length}", bytes.len())))?;
        bytes.copy_from_slice(&all[self.start + offset as usize..self.start + end as usize]);
        Ok(())
    }

    pub(super) fn copy_to(&self, to: &MockTensor) -> Result<(), BackendError> {
        if self.dtype != to.dtype || self.dims != to.dims || self.shares_memory_with(to) {
            return Err(misfit("a copy", format!("{:?} to {:?}", self.dims.as_slice(), to.dims.as_slice())));
        }
        if self.is_coming() || to.is_coming() {
            return Err(misfit("a copy", "another copy that was not waited for overwrites one of its sides".into()));
        }
        let length = byte_len(self.dtype, &self.dims).unwrap_or(0) as usize;
        let copied = self.bytes.bytes.borrow()[self.start..self.start + length].to_vec();
        to.bytes.bytes.borrow_mut()[to.start..to.start + length].copy_from_slice(&copied);
        Ok(())
    }

    /// Its bytes.
    pub(super) fn contents(&self) -> Vec<u8> {
        let length = byte_len(self.dtype, &self.dims).unwrap_or(0) as usize;
        self.bytes.bytes.borrow()[self.start..self.start + length].to_vec()
    }

    /// The block it lies in, of which it must be the first bytes.
    pub(super) fn whole_block(&self) -> Result<MockBuffer, BackendError> {
        if self.start > 0 {
            return Err(misfit("a copy ahead", "its target is a part of a buffer".into()));
        }
        let length = self.bytes.bytes.borrow().len();
        Ok(MockBuffer { block: Rc::clone(&self.bytes), start: 0, length })
    }

    /// A run uses it until `end`.
    pub(super) fn use_until(&self, end: Duration) {
        self.bytes.used_until.set(self.bytes.used_until.get().max(end));
    }

    /// Whether a run uses it at this time.
    pub(super) fn is_used(&self, now: Duration) -> bool {
        self.bytes.used_until.get() > now
    }

    /// Whether a copy overwrites it at present.
    pub(super) fn is_coming(&self) -> bool {
        self.bytes.coming.get() > 0
    }

    /// Whether both views are of one buffer.
    pub fn shares_memory_with(&self, other: &MockTensor) -> bool {
        Rc::ptr_eq(&self.bytes, &other.bytes) && self.start == other.start
    }

    /// Element `index` of a float32 tensor.
    pub fn f32(&self, index: u64) -> f32 {
        f32::from_le_bytes(self.element(index, DType::Float32))
    }

    /// Sets element `index` of a float32 tensor.
    pub fn set_f32(&self, index: u64, value: f32) {
        assert_eq!(self.dtype, DType::Float32);
        let at = self.start + index as usize * 4;
        self.bytes.bytes.borrow_mut()[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    /// Element `index` of an int64 tensor.
    pub fn i64(&self, index: u64) -> i64 {
        i64::from_le_bytes(self.element(index, DType::Int64))
    }

    fn element<const N: usize>(&self, index: u64, dtype: DType) -> [u8; N] {
        assert_eq!(self.dtype, dtype);
        assert!(index < self.dims.iter().product(), "element {index} of {:?}", self.dims.as_slice());
        let at = self.start + index as usize * N;
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
