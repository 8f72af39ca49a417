//! Boundaries: the tensors one partition leaves for later ones, in every memory that wants them.

use crate::area::{Area, Areas, Key, about, size_of};
use crate::error::{BackendError, EngineError};
use crate::feed::copy;
use crate::meter::{Meter, Moved, Took};
use crate::port::{Backend, Dims, MemoryId, Tensor};
use crate::shape::{PassShape, Sizes};
use crate::tensor::HostTensor;
use hpp_schema::DType;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// One tensor that crosses.
pub(crate) struct Boundary<B: Backend> {
    pub name: String,
    pub dtype: DType,
    /// Its shape, where a pass can know it before.
    pub shape: Option<PassShape>,
    /// The memory its producer in this pass leaves it in.
    home: MemoryId,
    /// Room in each memory that wants it, the home's only for tensors of known shape.
    areas: BTreeMap<MemoryId, Area<B>>,
    /// What the producer allocated, for tensors of unknown shape.
    taken: Option<(u64, B::Tensor)>,
    /// Shape in the current pass, once known.
    pub dims: Option<Dims>,
    /// Memories that hold this pass's value.
    current: Vec<MemoryId>,
}

/// What a consumer binds.
pub(crate) enum Source<'a, B: Backend> {
    Area(&'a Area<B>),
    Taken(&'a B::Tensor),
}

impl<B: Backend> Source<'_, B> {
    /// Lends the value as a tensor.
    pub fn with<T>(
        &self,
        areas: &Areas<B>,
        dtype: DType,
        key: &Key,
        act: impl FnOnce(&B::Tensor) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        match self {
            Source::Area(area) => act(&areas.view(area, dtype, &key.dims)?),
            Source::Taken(tensor) => act(tensor),
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
            areas: BTreeMap::new(),
            taken: None,
            dims: None,
            current: Vec::with_capacity(2),
        }
    }

    /// Forgets the value of the pass before.
    pub fn begin(&mut self, sizes: &Sizes) {
        self.current.clear();
        self.taken = None;
        self.dims = self.shape.as_ref().and_then(|shape| shape.eval(sizes));
    }

    /// Forgets the value before; whoever produces the next one allocates it.
    pub fn begin_unknown(&mut self) {
        self.current.clear();
        (self.taken, self.dims) = (None, None);
    }

    /// Room in its memory for the producer to write to; `None` where the shape is not known before the run.
    pub fn room(&mut self, areas: &Areas<B>, home: MemoryId) -> Result<Option<(&Area<B>, Key)>, EngineError> {
        self.home = home;
        let Some(dims) = self.dims.clone() else { return Ok(None) };
        let area = room_in(&mut self.areas, areas, &self.name, self.dtype, self.home, &dims)?;
        let serial = area.serial;
        Ok(Some((area, Key { serial, dims })))
    }

    /// The producer has run; `taken` is what it allocated itself.
    pub fn produced(&mut self, areas: &Areas<B>, home: MemoryId, taken: Option<B::Tensor>) {
        self.home = home;
        self.current.push(home);
        if let Some(tensor) = taken {
            self.dims = Some(Dims::from_slice(tensor.shape()));
            self.taken = Some((areas.serial(), tensor));
        }
    }

    /// Makes this pass's value present in a memory.
    pub fn ensure(&mut self, areas: &Areas<B>, memory: MemoryId, meter: &mut Meter) -> Result<(), EngineError> {
        if self.current.contains(&memory) || self.current.is_empty() {
            return Ok(());
        }
        let Some(dims) = self.dims.clone() else { return Ok(()) };
        let from = areas.now_between(self.home, memory, meter).map_err(about(&self.name))?;
        room_in(&mut self.areas, areas, &self.name, self.dtype, memory, &dims)?;
        let to = &self.areas[&memory];
        match &self.taken {
            Some((_, tensor)) if !dims.contains(&0) => areas
                .view(to, self.dtype, &dims)
                .and_then(|view| areas.backend.copy(tensor, &view))
                .map_err(about(&self.name))?,
            Some(_) => {}
            None => copy(areas, &self.areas[&self.home], to, self.dtype, &dims).map_err(about(&self.name))?,
        }
        self.current.push(memory);
        let bytes = size_of(&self.name, self.dtype, &dims)?;
        let moved = Moved { name: &self.name, from: self.home, to: memory, bytes };
        meter.moved(&moved, Took { from, to: areas.backend.now() });
        Ok(())
    }

    /// This pass's value in a memory where it is present.
    pub fn source(&self, memory: MemoryId) -> Option<(Source<'_, B>, Key)> {
        let dims = self.dims.clone()?;
        match &self.taken {
            Some((serial, tensor)) if memory == self.home => {
                Some((Source::Taken(tensor), Key { serial: *serial, dims }))
            }
            _ => {
                let area = self.areas.get(&memory).filter(|_| self.current.contains(&memory))?;
                Some((Source::Area(area), Key { serial: area.serial, dims }))
            }
        }
    }

    /// This pass's value where its producer left it.
    pub fn home(&self) -> Option<(Source<'_, B>, Key)> {
        self.source(self.home)
    }
}

fn room_in<'a, B: Backend>(
    rooms: &'a mut BTreeMap<MemoryId, Area<B>>,
    areas: &Areas<B>,
    name: &str,
    dtype: DType,
    memory: MemoryId,
    dims: &Dims,
) -> Result<&'a Area<B>, EngineError> {
    let bytes = size_of(name, dtype, dims)?;
    let area = match rooms.entry(memory) {
        Entry::Occupied(room) => room.into_mut(),
        Entry::Vacant(room) => room.insert(areas.reserve(memory, bytes).map_err(about(name))?),
    };
    areas.grow(area, bytes).map_err(about(name))?;
    Ok(area)
}

impl<B: Backend> Boundary<B> {
    /// The memory its producer leaves it in.
    pub fn home_memory(&self) -> MemoryId {
        self.home
    }

    /// Some of this pass's bytes, from `offset` on, where the producer left them.
    pub fn read_into(&self, areas: &Areas<B>, offset: u64, bytes: &mut [u8]) -> Result<(), EngineError> {
        let Some((source, key)) = self.home() else {
            return Err(EngineError::WrongOutput { name: self.name.clone(), why: "no run has produced it".into() });
        };
        if bytes.is_empty() {
            return Ok(());
        }
        let read = source.with(areas, self.dtype, &key, |tensor| areas.backend.read(tensor, offset, bytes));
        read.map_err(about(&self.name))
    }

    /// All of this pass's value.
    pub fn read(&self, areas: &Areas<B>) -> Result<HostTensor, EngineError> {
        let dims = self.dims.clone().unwrap_or_default();
        let size = size_of(&self.name, self.dtype, &dims)?;
        let mut bytes = vec![0; size as usize];
        self.read_into(areas, 0, &mut bytes)?;
        Ok(HostTensor { dtype: self.dtype, shape: dims.to_vec(), bytes })
    }
}
