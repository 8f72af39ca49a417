//! Feeds: the model inputs the engine itself fills, from token ids to masks, in every memory that wants them.

use crate::area::{Area, Areas, about, size_of};
use crate::error::EngineError;
use crate::meter::{Meter, Moved, Took};
use crate::port::{Backend, Dims, MemoryId};
use crate::shape::Sizes;
use crate::tensor::{HostTensor, f32_to_floats, integers};
use hpp_schema::{DType, Dim, InputRole, ModelInput};
use std::collections::BTreeMap;

/// What a step brings in.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Content<'a> {
    Tokens(&'a [u32]),
    Embeddings(&'a [f32]),
}

/// One model input.
pub(crate) struct Feed<B: Backend> {
    pub name: String,
    pub role: InputRole,
    pub dtype: DType,
    rank: usize,
    /// Size of the axis before the batch (positions) or after the sequence (embeddings).
    width: Option<u64>,
    host: Area<B>,
    /// Elements of a constant fill that are already in place.
    filled: u64,
    /// Copies in other memories.
    copies: BTreeMap<MemoryId, Area<B>>,
    /// Shape in the current pass.
    pub dims: Dims,
    scratch: Vec<u8>,
}

impl<B: Backend> Feed<B> {
    pub fn new(areas: &Areas<B>, input: &ModelInput) -> Result<Self, EngineError> {
        let width = match input.role {
            InputRole::PositionIds if input.shape.len() == 3 => input.shape[0].as_fixed(),
            InputRole::Embeddings => input.shape.last().and_then(Dim::as_fixed),
            _ => None,
        };
        Ok(Feed {
            name: input.name.clone(),
            role: input.role,
            dtype: input.dtype,
            rank: input.shape.len(),
            width,
            host: areas.reserve(MemoryId::HOST, 1).map_err(about(&input.name))?,
            filled: 0,
            copies: BTreeMap::new(),
            dims: Dims::new(),
            scratch: Vec::new(),
        })
    }

    /// Reserves host room for a whole context, so that no later pass has to.
    pub fn reserve(&mut self, areas: &Areas<B>, context: u64) -> Result<(), EngineError> {
        let sizes = Sizes { batch: 1, sequence: context, past: 0, rows: context };
        let per_context = matches!(self.role, InputRole::AttentionMask | InputRole::TokenTypeIds);
        if per_context {
            let dims = self.shape(&sizes)?;
            self.make_room(areas, &dims)?;
        }
        Ok(())
    }

    /// Brings the host copy up to what this pass needs, and other copies after it.
    pub fn write(
        &mut self,
        areas: &Areas<B>,
        content: Content<'_>,
        rows_from: u64,
        sizes: &Sizes,
        extra: &BTreeMap<String, HostTensor>,
        meter: &mut Meter,
    ) -> Result<(), EngineError> {
        if self.role == InputRole::Free {
            return self.write_given(areas, extra, meter);
        }
        if let (InputRole::Embeddings, Content::Embeddings(values)) = (self.role, content) {
            self.width = Some(values.len() as u64 / sizes.sequence);
        }
        let dims = self.shape(sizes)?;
        self.make_room(areas, &dims)?;
        self.dims = dims;
        let elements: u64 = self.dims.iter().product();
        self.scratch.clear();
        let (offset, fits) = match (self.role, content) {
            (InputRole::TokenIds, Content::Tokens(ids)) => {
                (0, integers(self.dtype, ids.iter().map(|id| u64::from(*id)), &mut self.scratch))
            }
            (InputRole::Embeddings, Content::Embeddings(values)) => {
                (0, f32_to_floats(self.dtype, values, &mut self.scratch))
            }
            (InputRole::TokenIds | InputRole::Embeddings, _) => return Err(self.missing()),
            (InputRole::AttentionMask, _) => self.fill(1, elements),
            (InputRole::UseCacheBranch, _) => self.fill(1, elements),
            (InputRole::TokenTypeIds, _) => self.fill(0, elements),
            (InputRole::PositionIds, _) => {
                let axes = self.width.unwrap_or(1) * sizes.batch;
                let positions = (0..axes).flat_map(|_| sizes.past..sizes.total());
                (0, integers(self.dtype, positions, &mut self.scratch))
            }
            (InputRole::LogitPositions, _) => {
                (0, integers(self.dtype, rows_from..rows_from + sizes.rows, &mut self.scratch))
            }
            (InputRole::Free, _) => (0, true),
        };
        if !fits {
            return Err(self.wrong(format!("its type is {}", self.dtype)));
        }
        self.store(areas, offset, meter)
    }

    /// Elements of a constant fill that are not in place yet: those past `filled`.
    fn fill(&mut self, value: u64, elements: u64) -> (u64, bool) {
        let from = self.filled.min(elements);
        let offset = self.dtype.bytes_for(from).unwrap_or(0);
        self.filled = self.filled.max(elements);
        (offset, integers(self.dtype, (from..elements).map(|_| value), &mut self.scratch))
    }

    fn write_given(
        &mut self,
        areas: &Areas<B>,
        extra: &BTreeMap<String, HostTensor>,
        meter: &mut Meter,
    ) -> Result<(), EngineError> {
        let tensor = extra.get(&self.name).ok_or_else(|| self.missing())?;
        if tensor.dtype != self.dtype || tensor.shape.len() != self.rank {
            return Err(self.wrong(format!(
                "the model wants {} with {} axes, not {} {:?}",
                self.dtype, self.rank, tensor.dtype, tensor.shape
            )));
        }
        if let Some(why) = tensor.misfit() {
            return Err(self.wrong(why));
        }
        let dims = Dims::from_slice(&tensor.shape);
        self.make_room(areas, &dims)?;
        self.dims = dims;
        self.scratch.clear();
        self.scratch.extend_from_slice(&tensor.bytes);
        self.store(areas, 0, meter)
    }

    /// The shape of this pass, by role.
    fn shape(&self, sizes: &Sizes) -> Result<Dims, EngineError> {
        let Sizes { batch, sequence, rows, .. } = *sizes;
        let last = match self.role {
            InputRole::AttentionMask => sizes.total(),
            InputRole::LogitPositions => rows,
            InputRole::UseCacheBranch => 1,
            _ => sequence,
        };
        let dims: Dims = match (self.role, self.rank) {
            (InputRole::UseCacheBranch, 0) => Dims::new(),
            (InputRole::Embeddings, 3) => {
                let width = self.width.ok_or_else(|| self.wrong("its width is not known".into()))?;
                [batch, sequence, width].into_iter().collect()
            }
            (InputRole::PositionIds, 3) => {
                let axes = self.width.ok_or_else(|| self.wrong("its number of position axes is not known".into()))?;
                [axes, batch, sequence].into_iter().collect()
            }
            (InputRole::Embeddings, _) => return Err(self.wrong(format!("it has {} axes, not 3", self.rank))),
            (_, 1) => [last].into_iter().collect(),
            (_, 2) => [batch, last].into_iter().collect(),
            (_, rank) => return Err(self.wrong(format!("the engine cannot fill {rank} axes"))),
        };
        Ok(dims)
    }

    fn make_room(&mut self, areas: &Areas<B>, dims: &Dims) -> Result<(), EngineError> {
        let bytes = size_of(&self.name, self.dtype, dims)?;
        let serial = self.host.serial;
        areas.grow(&mut self.host, bytes).map_err(about(&self.name))?;
        if self.host.serial != serial {
            self.filled = 0;
        }
        Ok(())
    }

    /// Writes the scratch bytes to the host copy and refreshes the others.
    fn store(&mut self, areas: &Areas<B>, offset: u64, meter: &mut Meter) -> Result<(), EngineError> {
        let Feed { name, dtype, host, copies, dims, scratch, .. } = self;
        let changed = !scratch.is_empty();
        if changed {
            areas.backend.write(&host.buffer, offset, scratch).map_err(about(name))?;
        }
        let bytes = size_of(name, *dtype, dims)?;
        for area in copies.values_mut() {
            let serial = area.serial;
            areas.grow(area, bytes).map_err(about(name))?;
            if changed || area.serial != serial {
                let from = areas.backend.now();
                copy(areas, host, area, *dtype, dims).map_err(about(name))?;
                let moved = Moved { name, from: MemoryId::HOST, to: area.memory, bytes };
                meter.moved(&moved, Took { from, to: areas.backend.now() });
            }
        }
        Ok(())
    }

    /// Announces a memory that wants this input.
    pub fn wanted_in(&mut self, areas: &Areas<B>, memory: MemoryId) -> Result<(), EngineError> {
        if memory != MemoryId::HOST && !self.copies.contains_key(&memory) {
            let area = areas.reserve(memory, 1).map_err(about(&self.name))?;
            self.copies.insert(memory, area);
        }
        Ok(())
    }

    /// The copy in a memory that was announced.
    pub fn area(&self, memory: MemoryId) -> &Area<B> {
        if memory == MemoryId::HOST { &self.host } else { &self.copies[&memory] }
    }

    fn missing(&self) -> EngineError {
        EngineError::MissingInput { name: self.name.clone(), dtype: self.dtype }
    }

    fn wrong(&self, why: String) -> EngineError {
        EngineError::WrongInput { name: self.name.clone(), why }
    }
}

/// Copies the first bytes of one area into another, as a tensor of this shape.
pub(crate) fn copy<B: Backend>(
    areas: &Areas<B>,
    from: &Area<B>,
    to: &Area<B>,
    dtype: DType,
    dims: &Dims,
) -> Result<(), crate::error::BackendError> {
    if dims.contains(&0) {
        return Ok(());
    }
    areas.backend.copy(&areas.view(from, dtype, dims)?, &areas.view(to, dtype, dims)?)
}
