//! Boundaries: the tensors that one partition leaves for later ones, in every memory that reads them.

use super::{BindingKey, Buffer, BufferId, BufferPool, about, size_of};
use crate::error::{BackendError, EngineError};
use crate::port::{Backend, Dims, MemoryId, Tensor};
use crate::program::{PassShape, PassSizes};
use crate::telemetry::{Recorder, Transfer};
use crate::tensor::HostTensor;
use hpp_schema::DType;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// One tensor that crosses partitions.
pub(crate) struct Boundary<B: Backend> {
    pub name: String,
    pub dtype: DType,
    /// Its shape, where it is known before the run.
    shape: Option<PassShape>,
    /// The memory its producer leaves it in.
    home: MemoryId,
    /// A buffer in each memory that reads it; in the home memory only for tensors of known shape.
    buffers: BTreeMap<MemoryId, Buffer<B>>,
    /// The tensor that the producer allocated, where the shape is unknown before the run.
    allocated: Option<(BufferId, B::Tensor)>,
    /// Its shape in the current pass, once known.
    dims: Option<Dims>,
    /// The memories that hold the current pass's value.
    valid_in: Vec<MemoryId>,
}

/// The value of a boundary, as a reader binds it.
pub(crate) enum BoundaryValue<'a, B: Backend> {
    Buffer(&'a Buffer<B>),
    Allocated(&'a B::Tensor),
}

impl<B: Backend> BoundaryValue<'_, B> {
    /// Passes the value to `read` as a tensor.
    pub fn with<T>(
        &self,
        pool: &BufferPool<B>,
        dtype: DType,
        key: &BindingKey,
        read: impl FnOnce(&B::Tensor) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        match self {
            BoundaryValue::Buffer(buffer) => read(&pool.view(buffer, dtype, &key.dims)?),
            BoundaryValue::Allocated(tensor) => read(tensor),
        }
    }
}

impl<B: Backend> Boundary<B> {
    pub fn new(name: &str, dtype: DType, shape: Option<PassShape>) -> Self {
        Boundary {
            name: name.to_owned(),
            dtype,
            shape,
            home: MemoryId::HOST,
            buffers: BTreeMap::new(),
            allocated: None,
            dims: None,
            valid_in: Vec::with_capacity(2),
        }
    }

    /// A boundary for the same tensor, without buffers.
    pub fn another(&self) -> Self {
        Boundary::new(&self.name, self.dtype, self.shape.clone())
    }

    /// Invalidates the value of the last pass; `sizes` give the shape of the next.
    pub fn start_pass(&mut self, sizes: &PassSizes) {
        self.start_pass_of_unknown_shape();
        self.dims = self.shape.as_ref().and_then(|shape| shape.eval(sizes));
    }

    /// Invalidates the value of the last pass; the producer allocates the next.
    pub fn start_pass_of_unknown_shape(&mut self) {
        self.valid_in.clear();
        (self.allocated, self.dims) = (None, None);
    }

    /// Its shape in the current pass, once known.
    pub fn dims(&self) -> Option<&[u64]> {
        self.dims.as_deref()
    }

    /// The memory its producer leaves it in.
    pub fn home(&self) -> MemoryId {
        self.home
    }

    /// The buffer in `home` that the producer writes to; `None` if the shape is unknown before the run.
    pub fn output_buffer(
        &mut self,
        pool: &BufferPool<B>,
        home: MemoryId,
    ) -> Result<Option<(&Buffer<B>, BindingKey)>, EngineError> {
        self.home = home;
        let Some(dims) = self.dims.clone() else { return Ok(None) };
        let buffer = self.reserve(pool, home, &dims)?;
        let key = BindingKey { buffer: buffer.id, dims };
        Ok(Some((buffer, key)))
    }

    /// The producer has run and left the value in `home`: in the buffer, or in a tensor it `allocated`.
    pub fn produced(&mut self, pool: &BufferPool<B>, home: MemoryId, allocated: Option<B::Tensor>) {
        self.home = home;
        self.valid_in.push(home);
        if let Some(tensor) = allocated {
            self.dims = Some(Dims::from_slice(tensor.shape()));
            self.allocated = Some((pool.new_id(), tensor));
        }
    }

    /// Copies the value to a memory that does not hold it yet.
    pub fn copy_to(
        &mut self,
        pool: &BufferPool<B>,
        memory: MemoryId,
        recorder: &mut Recorder,
    ) -> Result<(), EngineError> {
        if self.valid_in.contains(&memory) || self.valid_in.is_empty() {
            return Ok(());
        }
        let Some(dims) = self.dims.clone() else { return Ok(()) };
        let start = pool.synchronize(self.home, memory, recorder).map_err(about(&self.name))?;
        self.reserve(pool, memory, &dims)?;
        let to = &self.buffers[&memory];
        let copied = match &self.allocated {
            Some(_) if dims.contains(&0) => Ok(()),
            Some((_, tensor)) => pool.view(to, self.dtype, &dims).and_then(|view| pool.backend.copy(tensor, &view)),
            None => pool.copy(&self.buffers[&self.home], to, self.dtype, &dims),
        };
        copied.map_err(about(&self.name))?;
        self.valid_in.push(memory);
        let bytes = size_of(&self.name, self.dtype, &dims)?;
        recorder.copied(&Transfer { name: &self.name, from: self.home, to: memory, bytes }, pool.since(start));
        Ok(())
    }

    /// The value in a memory that holds it.
    pub fn value(&self, memory: MemoryId) -> Option<(BoundaryValue<'_, B>, BindingKey)> {
        let dims = self.dims.clone()?;
        if let Some((id, tensor)) = self.allocated.as_ref().filter(|_| memory == self.home) {
            return Some((BoundaryValue::Allocated(tensor), BindingKey { buffer: *id, dims }));
        }
        let buffer = self.buffers.get(&memory).filter(|_| self.valid_in.contains(&memory))?;
        Some((BoundaryValue::Buffer(buffer), BindingKey { buffer: buffer.id, dims }))
    }

    /// Reads some of the value's bytes, from `offset` on, from the home memory.
    pub fn read_into(&self, pool: &BufferPool<B>, offset: u64, bytes: &mut [u8]) -> Result<(), EngineError> {
        let Some((value, key)) = self.value(self.home) else {
            return Err(EngineError::WrongOutput { name: self.name.clone(), why: "no run has produced it".into() });
        };
        if bytes.is_empty() {
            return Ok(());
        }
        let read = value.with(pool, self.dtype, &key, |tensor| pool.backend.read(tensor, offset, bytes));
        read.map_err(about(&self.name))
    }

    /// Reads the whole value.
    pub fn read(&self, pool: &BufferPool<B>) -> Result<HostTensor, EngineError> {
        let dims = self.dims.clone().unwrap_or_default();
        let size = size_of(&self.name, self.dtype, &dims)?;
        let mut bytes = vec![0; size as usize];
        self.read_into(pool, 0, &mut bytes)?;
        Ok(HostTensor { dtype: self.dtype, shape: dims.to_vec(), bytes })
    }

    /// The buffer in a memory, large enough for this shape.
    fn reserve(&mut self, pool: &BufferPool<B>, memory: MemoryId, dims: &Dims) -> Result<&Buffer<B>, EngineError> {
        let bytes = size_of(&self.name, self.dtype, dims)?;
        let buffer = match self.buffers.entry(memory) {
            Entry::Occupied(buffer) => buffer.into_mut(),
            Entry::Vacant(free) => free.insert(pool.reserve(memory, bytes).map_err(about(&self.name))?),
        };
        pool.grow(buffer, bytes).map_err(about(&self.name))?;
        Ok(buffer)
    }
}
