//! Areas: numbered pieces of one memory, and the key that tells whether a binding still holds what a pass needs.

use crate::error::{BackendError, EngineError};
use crate::meter::Meter;
use crate::port::{Backend, Dims, MemoryId, Took};
use crate::tensor::byte_len;
use hpp_schema::DType;
use std::cell::Cell;
use std::time::Duration;

/// A buffer with a number that no other buffer of this engine has or had.
pub(crate) struct Area<B: Backend> {
    pub buffer: B::Buffer,
    pub serial: u64,
    pub bytes: u64,
    pub memory: MemoryId,
}

/// What a port is bound to: the area's serial and the shape of the view. Equal keys need no new binding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub serial: u64,
    pub dims: Dims,
}

/// Hands out areas and their serials.
pub(crate) struct Areas<B: Backend> {
    pub backend: B,
    next: Cell<u64>,
}

impl<B: Backend> Areas<B> {
    pub fn new(backend: B) -> Self {
        Areas { backend, next: Cell::new(1) }
    }

    /// A serial for something that is not an area but can be bound all the same.
    pub fn serial(&self) -> u64 {
        let serial = self.next.get();
        self.next.set(serial + 1);
        serial
    }

    /// A new zeroed area. Empty tensors get a byte, so that every tensor has an address.
    pub fn reserve(&self, memory: MemoryId, bytes: u64) -> Result<Area<B>, BackendError> {
        let bytes = bytes.max(1);
        Ok(Area { buffer: self.backend.reserve(memory, bytes)?, serial: self.serial(), bytes, memory })
    }

    /// Replaces an area that is too small by one at least twice as large.
    pub fn grow(&self, area: &mut Area<B>, bytes: u64) -> Result<(), BackendError> {
        if area.bytes < bytes {
            *area = self.reserve(area.memory, bytes.max(area.bytes.saturating_mul(2)))?;
        }
        Ok(())
    }

    /// Now, when all that is begun on the devices of two memories is over: what is copied between them begins.
    pub fn now_between(&self, from: MemoryId, to: MemoryId, meter: &mut Meter) -> Result<Duration, BackendError> {
        for memory in [from, to] {
            self.backend.wait_for(memory)?;
            if memory != MemoryId::HOST && meter.is_recording() {
                let from = self.backend.now();
                self.backend.drain(memory)?;
                meter.drained(memory, Took { from, to: self.backend.now() });
            }
        }
        Ok(self.backend.now())
    }

    /// A view of an area's first bytes.
    pub fn view(&self, area: &Area<B>, dtype: DType, dims: &[u64]) -> Result<B::Tensor, BackendError> {
        self.backend.view(&area.buffer, dtype, dims)
    }
}

/// Bytes of a tensor, or the error that says it cannot be held.
pub(crate) fn size_of(what: &str, dtype: DType, dims: &[u64]) -> Result<u64, EngineError> {
    byte_len(dtype, dims).ok_or_else(|| EngineError::Memory {
        what: what.to_owned(),
        source: BackendError::Misfit { what: what.to_owned(), why: format!("{dtype} {dims:?} has no size in bytes") },
    })
}

/// Names the tensor a memory error is about.
pub(crate) fn about(what: &str) -> impl FnOnce(BackendError) -> EngineError + '_ {
    move |source| EngineError::Memory { what: what.to_owned(), source }
}
