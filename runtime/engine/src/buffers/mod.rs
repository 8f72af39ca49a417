//! Tensors between runs: buffers with ids, and the model inputs, boundaries and states in them.
//!
//! The engine renews a binding only if its buffer or shape has changed ([`BindingKey`]). While decoding, only the mask and appended
//! states change their shape; all other bindings stay, and their bytes change in place.

mod boundary;
mod lane;
mod model_input;
mod state;
mod state_arena;
mod state_page;
mod state_staging;

pub(crate) use boundary::{Boundaries, BoundaryLayout};
pub(crate) use lane::Lane;
pub(crate) use model_input::{InputBuffers, PassInput, RowInput};
pub(crate) use state::{StateBuffers, StateLayout, upload};
pub(crate) use state_arena::{ArenaRow, StateArena};
pub(crate) use state_page::{PagePart, PageSlice};
pub(crate) use state_staging::{CopyIn, StateReturn, StateStaging};

use crate::error::{BackendError, EngineError};
use crate::port::{Backend, Dims, Interval, MemoryId};
use crate::telemetry::Recorder;
use crate::tensor::byte_len;
use hpp_schema::DType;
use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

/// Identifies a buffer, or a tensor that a session allocated. Never reused by an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferId(u64);

/// A backend buffer with an id.
pub(crate) struct Buffer<B: Backend> {
    pub handle: B::Buffer,
    pub id: BufferId,
    pub bytes: u64,
    pub memory: MemoryId,
}

/// The buffer that a port is bound to, and the shape of the view. Equal keys need no new binding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BindingKey {
    pub buffer: BufferId,
    pub dims: Dims,
}

/// A buffer to bind, and the shape of the view of its first bytes.
pub(crate) struct BufferView<'a, B: Backend> {
    pub buffer: &'a Buffer<B>,
    pub dims: Dims,
}

impl<B: Backend> BufferView<'_, B> {
    /// Identifies what is bound.
    pub fn key(self) -> BindingKey {
        BindingKey { buffer: self.buffer.id, dims: self.dims }
    }
}

/// Reserves buffers and assigns their ids.
pub(crate) struct BufferPool<B: Backend> {
    pub backend: B,
    next: Cell<u64>,
    /// The directory for buffers on disk.
    state_dir: PathBuf,
}

impl<B: Backend> BufferPool<B> {
    pub fn new(backend: B) -> Self {
        BufferPool { backend, next: Cell::new(0), state_dir: PathBuf::from(".") }
    }

    /// The pool, with another directory for buffers on disk than the current one.
    pub fn with_state_dir(self, state_dir: PathBuf) -> Self {
        BufferPool { state_dir, ..self }
    }

    /// An id for a tensor that is not in a buffer of this pool.
    pub fn new_id(&self) -> BufferId {
        BufferId(self.next.replace(self.next.get() + 1))
    }

    /// A new zeroed buffer of at least one byte, so that empty tensors have an address too.
    pub fn reserve(&self, memory: MemoryId, bytes: u64) -> Result<Buffer<B>, BackendError> {
        let bytes = bytes.max(1);
        Ok(Buffer { handle: self.backend.reserve(memory, bytes)?, id: self.new_id(), bytes, memory })
    }

    /// A new zeroed buffer on the host that lies on disk while it is not in use.
    pub fn reserve_on_disk(&self, bytes: u64) -> Result<Buffer<B>, BackendError> {
        let bytes = bytes.max(1);
        let handle = self.backend.reserve_on_disk(&self.state_dir, bytes)?;
        Ok(Buffer { handle, id: self.new_id(), bytes, memory: MemoryId::HOST })
    }

    /// Replaces a buffer that is too small by one at least twice as large.
    pub fn grow(&self, buffer: &mut Buffer<B>, bytes: u64) -> Result<(), BackendError> {
        if buffer.bytes < bytes {
            *buffer = self.reserve(buffer.memory, bytes.max(buffer.bytes.saturating_mul(2)))?;
        }
        Ok(())
    }

    /// Part of a buffer, with an id of its own. `None` if the backend cannot make one.
    pub fn slice(&self, buffer: &Buffer<B>, offset: u64, bytes: u64) -> Option<Buffer<B>> {
        let handle = self.backend.slice(&buffer.handle, offset, bytes)?;
        Some(Buffer { handle, id: self.new_id(), bytes, memory: buffer.memory })
    }

    /// A view of a buffer's first bytes.
    pub fn view(&self, buffer: &Buffer<B>, dtype: DType, dims: &[u64]) -> Result<B::Tensor, BackendError> {
        self.backend.view(&buffer.handle, dtype, dims)
    }

    /// Copies the first bytes of one buffer into another, as a tensor of this shape.
    pub fn copy(&self, from: &Buffer<B>, to: &Buffer<B>, dtype: DType, dims: &Dims) -> Result<(), BackendError> {
        if dims.contains(&0) {
            return Ok(());
        }
        self.backend.copy(&self.view(from, dtype, dims)?, &self.view(to, dtype, dims)?)
    }

    /// Starts to copy the first bytes of one buffer into another. `None` if nothing is left to wait for.
    pub fn copy_ahead(
        &self,
        from: &Buffer<B>,
        to: &Buffer<B>,
        dtype: DType,
        dims: &Dims,
    ) -> Result<Option<B::Upload>, BackendError> {
        if dims.contains(&0) {
            return Ok(None);
        }
        self.backend.copy_ahead(&self.view(from, dtype, dims)?, &self.view(to, dtype, dims)?)
    }

    /// Waits until the devices of two memories have finished what was started there. Returns the time at which a copy between them can start.
    pub fn synchronize(&self, from: MemoryId, to: MemoryId, recorder: &mut Recorder) -> Result<Duration, BackendError> {
        for memory in [from, to] {
            self.backend.synchronize(memory)?;
            if memory != MemoryId::HOST && recorder.is_recording() {
                self.finish_watch(memory, recorder)?;
                let start = self.backend.now();
                self.backend.synchronize_untimed(memory)?;
                recorder.synchronized(memory, Interval { start, end: self.backend.now() });
            }
        }
        Ok(self.backend.now())
    }

    /// While a timeline is recorded: starts to watch for the end of the runs on a device whose timing the backend does not report.
    pub fn watch(&self, memory: MemoryId, recorder: &mut Recorder) -> Result<(), BackendError> {
        if memory == MemoryId::HOST || !recorder.is_recording() {
            return Ok(());
        }
        self.finish_watch(memory, recorder)?;
        self.backend.watch_untimed(memory)
    }

    fn finish_watch(&self, memory: MemoryId, recorder: &mut Recorder) -> Result<(), BackendError> {
        if let Some(interval) = self.backend.finish_watch(memory)? {
            recorder.synchronized(memory, interval);
        }
        Ok(())
    }

    /// The interval from `start` to now.
    pub fn since(&self, start: Duration) -> Interval {
        Interval { start, end: self.backend.now() }
    }
}

/// Bytes of a tensor, or an error that names it.
pub(crate) fn size_of(name: &str, dtype: DType, dims: &[u64]) -> Result<u64, EngineError> {
    byte_len(dtype, dims).ok_or_else(|| EngineError::Memory {
        what: name.to_owned(),
        source: BackendError::Misfit { what: name.to_owned(), why: format!("{dtype} {dims:?} has no size in bytes") },
    })
}

/// Adds the tensor's name to a memory error.
pub(crate) fn about(name: &str) -> impl FnOnce(BackendError) -> EngineError + '_ {
    move |source| EngineError::Memory { what: name.to_owned(), source }
}
