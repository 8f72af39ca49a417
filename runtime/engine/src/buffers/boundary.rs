//! Boundaries: the tensors that one partition produces for later ones, with a buffer in every memory that reads them. Boundaries that are
//! never live at the same time share buffers.

use super::{BindingKey, Buffer, BufferId, BufferPool, BufferView, about, size_of};
use crate::error::{BackendError, EngineError};
use crate::ids::{BoundaryId, IndexVec};
use crate::port::{Backend, Dims, MemoryId, Tensor};
use crate::program::{PassShape, PassSizes};
use crate::telemetry::{Recorder, TensorCopy};
use crate::tensor::HostTensor;
use hpp_schema::DType;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// The part of a boundary that is known before a pass.
#[derive(Clone, Debug)]
pub(crate) struct BoundaryLayout {
    pub name: String,
    pub dtype: DType,
    /// Its shape, where it is known before the run.
    pub shape: Option<PassShape>,
    /// The index of its buffers; boundaries with one index are never needed at the same time.
    pub buffers: usize,
}

impl BoundaryLayout {
    /// Its bytes in a pass of these sizes; 0 where its shape is known only after the run.
    fn bytes(&self, sizes: &PassSizes) -> u64 {
        let dims = self.shape.as_ref().and_then(|shape| shape.eval(sizes));
        dims.and_then(|dims| size_of(&self.name, self.dtype, &dims).ok()).unwrap_or(0)
    }
}

/// The boundaries of one lane.
pub(crate) struct Boundaries<B: Backend> {
    values: IndexVec<BoundaryId, Boundary<B>>,
    buffers: Vec<SharedBuffers<B>>,
}

/// A buffer in each memory in which some boundary is read. A boundary whose shape is unknown before the run has none in its home memory.
struct SharedBuffers<B: Backend> {
    /// The boundary whose value they hold.
    holder: Option<BoundaryId>,
    by_memory: BTreeMap<MemoryId, Buffer<B>>,
}

/// One tensor that crosses partitions.
struct Boundary<B: Backend> {
    layout: BoundaryLayout,
    /// The memory its producer leaves it in.
    home: MemoryId,
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

impl<B: Backend> SharedBuffers<B> {
    /// The buffer in a memory, large enough for this shape of the boundary.
    fn reserve(
        &mut self,
        pool: &BufferPool<B>,
        memory: MemoryId,
        layout: &BoundaryLayout,
        dims: &Dims,
    ) -> Result<&Buffer<B>, EngineError> {
        let bytes = size_of(&layout.name, layout.dtype, dims)?;
        let buffer = match self.by_memory.entry(memory) {
            Entry::Occupied(buffer) => buffer.into_mut(),
            Entry::Vacant(free) => free.insert(pool.reserve(memory, bytes).map_err(about(&layout.name))?),
        };
        pool.grow(buffer, bytes).map_err(about(&layout.name))?;
        Ok(buffer)
    }
}

impl<B: Backend> Boundary<B> {
    fn new(layout: BoundaryLayout) -> Self {
        let valid_in = Vec::with_capacity(2);
        Boundary { layout, home: MemoryId::HOST, allocated: None, dims: None, valid_in }
    }
}

impl<B: Backend> Boundaries<B> {
    pub fn new(layouts: impl IntoIterator<Item = BoundaryLayout>) -> Self {
        let values: IndexVec<BoundaryId, Boundary<B>> = layouts.into_iter().map(Boundary::new).collect();
        let count = values.iter().map(|boundary| boundary.layout.buffers + 1).max().unwrap_or(0);
        let free = || SharedBuffers { holder: None, by_memory: BTreeMap::new() };
        Boundaries { values, buffers: (0..count).map(|_| free()).collect() }
    }

    /// New boundaries with the same layouts, without buffers.
    pub fn another(&self) -> Self {
        Boundaries::new(self.values.iter().map(|boundary| boundary.layout.clone()))
    }

    /// Bytes of the buffers for a pass of these sizes, of the boundaries that `is_on_host` says are in host memory.
    pub fn host_bytes(&self, sizes: &PassSizes, is_on_host: impl Fn(BoundaryId) -> bool) -> u64 {
        let mut largest = vec![0; self.buffers.len()];
        for (_, boundary) in self.values.entries().filter(|(id, _)| is_on_host(*id)) {
            let buffer = &mut largest[boundary.layout.buffers];
            *buffer = boundary.layout.bytes(sizes).max(*buffer);
        }
        largest.into_iter().fold(0, u64::saturating_add)
    }

    /// The boundary of this name.
    pub fn find(&self, name: &str) -> Option<BoundaryId> {
        self.values.position(|boundary| boundary.layout.name == name)
    }

    pub fn name(&self, id: BoundaryId) -> &str {
        &self.values[id].layout.name
    }

    pub fn dtype(&self, id: BoundaryId) -> DType {
        self.values[id].layout.dtype
    }

    /// Invalidates the values of the last pass; `sizes` give the shapes of the next.
    pub fn start_pass(&mut self, sizes: &PassSizes) {
        self.start_pass_of_unknown_shape();
        for boundary in self.values.iter_mut() {
            boundary.dims = boundary.layout.shape.as_ref().and_then(|shape| shape.eval(sizes));
        }
    }

    /// Invalidates the values of the last pass; the producers allocate the next.
    pub fn start_pass_of_unknown_shape(&mut self) {
        for boundary in self.values.iter_mut() {
            boundary.valid_in.clear();
            (boundary.allocated, boundary.dims) = (None, None);
        }
    }

    /// A boundary's shape in the current pass, once known.
    pub fn dims(&self, id: BoundaryId) -> Option<&[u64]> {
        self.values[id].dims.as_deref()
    }

    /// The memory its producer leaves it in.
    pub fn home(&self, id: BoundaryId) -> MemoryId {
        self.values[id].home
    }

    /// The buffer in `home` that the producer writes to; `None` if the shape is unknown before the run.
    pub fn output_buffer(
        &mut self,
        id: BoundaryId,
        pool: &BufferPool<B>,
        home: MemoryId,
    ) -> Result<Option<BufferView<'_, B>>, EngineError> {
        let boundary = &mut self.values[id];
        boundary.home = home;
        let Some(dims) = boundary.dims.clone() else { return Ok(None) };
        let shared = &mut self.buffers[boundary.layout.buffers];
        shared.holder = Some(id);
        let buffer = shared.reserve(pool, home, &boundary.layout, &dims)?;
        Ok(Some(BufferView { buffer, dims }))
    }

    /// The producer has run and left the value in `home`: in the buffer, or in a tensor it `allocated`.
    pub fn produced(&mut self, id: BoundaryId, pool: &BufferPool<B>, home: MemoryId, allocated: Option<B::Tensor>) {
        let boundary = &mut self.values[id];
        boundary.home = home;
        boundary.valid_in.push(home);
        if let Some(tensor) = allocated {
            boundary.dims = Some(Dims::from_slice(tensor.shape()));
            boundary.allocated = Some((pool.new_id(), tensor));
            self.buffers[boundary.layout.buffers].holder = Some(id);
        }
    }

    /// Copies the value to a memory that does not hold it yet.
    pub fn copy_to(
        &mut self,
        id: BoundaryId,
        pool: &BufferPool<B>,
        memory: MemoryId,
        recorder: &mut Recorder,
    ) -> Result<(), EngineError> {
        let boundary = &mut self.values[id];
        let shared = &mut self.buffers[boundary.layout.buffers];
        let BoundaryLayout { name, dtype, .. } = &boundary.layout;
        if boundary.valid_in.contains(&memory) || boundary.valid_in.is_empty() || shared.holder != Some(id) {
            return Ok(());
        }
        let Some(dims) = boundary.dims.clone() else { return Ok(()) };
        let start = pool.synchronize(boundary.home, memory, recorder).map_err(about(name))?;
        shared.reserve(pool, memory, &boundary.layout, &dims)?;
        let to = &shared.by_memory[&memory];
        let copied = match &boundary.allocated {
            Some(_) if dims.contains(&0) => Ok(()),
            Some((_, tensor)) => pool.view(to, *dtype, &dims).and_then(|view| pool.backend.copy(tensor, &view)),
            None => pool.copy(&shared.by_memory[&boundary.home], to, *dtype, &dims),
        };
        copied.map_err(about(name))?;
        boundary.valid_in.push(memory);
        let bytes = size_of(name, *dtype, &dims)?;
        recorder.copied(&TensorCopy { name, from: boundary.home, to: memory, bytes }, pool.since(start));
        Ok(())
    }

    /// The value in a memory that holds it.
    pub fn value(&self, id: BoundaryId, memory: MemoryId) -> Option<(BoundaryValue<'_, B>, BindingKey)> {
        let boundary = &self.values[id];
        let dims = boundary.dims.clone()?;
        if let Some((buffer, tensor)) = boundary.allocated.as_ref().filter(|_| memory == boundary.home) {
            return Some((BoundaryValue::Allocated(tensor), BindingKey { buffer: *buffer, dims }));
        }
        let shared = &self.buffers[boundary.layout.buffers];
        let holds = shared.holder == Some(id) && boundary.valid_in.contains(&memory);
        let buffer = shared.by_memory.get(&memory).filter(|_| holds)?;
        Some((BoundaryValue::Buffer(buffer), BindingKey { buffer: buffer.id, dims }))
    }

    /// Reads some of the value's bytes, from `offset` on, from the home memory.
    pub fn read_into(
        &self,
        id: BoundaryId,
        pool: &BufferPool<B>,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), EngineError> {
        let BoundaryLayout { name, dtype, .. } = &self.values[id].layout;
        let Some((value, key)) = self.value(id, self.home(id)) else {
            return Err(EngineError::WrongOutput { name: name.clone(), why: "no run has produced it".into() });
        };
        if bytes.is_empty() {
            return Ok(());
        }
        let read = value.with(pool, *dtype, &key, |tensor| pool.backend.read(tensor, offset, bytes));
        read.map_err(about(name))
    }

    /// Reads the whole value.
    pub fn read(&self, id: BoundaryId, pool: &BufferPool<B>) -> Result<HostTensor, EngineError> {
        let (BoundaryLayout { name, dtype, .. }, dims) = (&self.values[id].layout, self.values[id].dims.clone());
        let dims = dims.unwrap_or_default();
        let size = size_of(name, *dtype, &dims)?;
        let mut bytes = vec![0; size as usize];
        self.read_into(id, pool, 0, &mut bytes)?;
        Ok(HostTensor { dtype: *dtype, shape: dims.to_vec(), bytes })
    }
}
