//! The buffers of a model input, which the engine fills for each pass: token ids, positions, masks, in every memory that reads them.

use super::{Buffer, BufferPool, about, size_of};
use crate::error::EngineError;
use crate::port::{Backend, Dims, MemoryId};
use crate::program::PassSizes;
use crate::telemetry::{Recorder, TensorCopy};
use crate::tensor::{HostTensor, f32_to_floats, integers};
use hpp_schema::{DType, Dim, InputRole, ModelInput};
use std::collections::BTreeMap;

/// The tokens of a pass, as ids or as embeddings.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PassInput<'a> {
    Tokens(&'a [u32]),
    Embeddings(&'a [f32]),
    /// A token for each of several sequences.
    Rows(RowInput<'a>),
}

/// The next token of each of several sequences.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowInput<'a> {
    pub ids: &'a [u32],
    /// Tokens that each sequence has before.
    pub lengths: &'a [u64],
}

/// One model input.
pub(crate) struct InputBuffers<B: Backend> {
    pub name: String,
    pub role: InputRole,
    pub dtype: DType,
    rank: usize,
    /// The sizes that the model declares.
    declared: Vec<Option<u64>>,
    /// Size of the axis before the batch (positions) or after the sequence (embeddings).
    width: Option<u64>,
    host: Buffer<B>,
    /// Elements of a constant input that are already written.
    filled: u64,
    /// Copies in other memories.
    copies: BTreeMap<MemoryId, Buffer<B>>,
    /// Shape in the current pass.
    pub dims: Dims,
    scratch: Vec<u8>,
}

impl<B: Backend> InputBuffers<B> {
    pub fn new(pool: &BufferPool<B>, input: &ModelInput) -> Result<Self, EngineError> {
        let width = match input.role {
            InputRole::PositionIds if input.shape.len() == 3 => input.shape[0].as_fixed(),
            InputRole::Embeddings => input.shape.last().and_then(Dim::as_fixed),
            _ => None,
        };
        Ok(InputBuffers {
            name: input.name.clone(),
            role: input.role,
            dtype: input.dtype,
            rank: input.shape.len(),
            declared: input.shape.iter().map(Dim::as_fixed).collect(),
            width,
            host: pool.reserve(MemoryId::HOST, 1).map_err(about(&input.name))?,
            filled: 0,
            copies: BTreeMap::new(),
            dims: Dims::new(),
            scratch: Vec::new(),
        })
    }

    /// Buffers for the same input, in the same memories.
    pub fn another(&self, pool: &BufferPool<B>, context: u64) -> Result<Self, EngineError> {
        let mut other = InputBuffers {
            name: self.name.clone(),
            role: self.role,
            dtype: self.dtype,
            rank: self.rank,
            declared: self.declared.clone(),
            width: self.width,
            host: pool.reserve(MemoryId::HOST, 1).map_err(about(&self.name))?,
            filled: 0,
            copies: BTreeMap::new(),
            dims: Dims::new(),
            scratch: Vec::new(),
        };
        self.copies.keys().try_for_each(|memory| other.add_memory(pool, *memory))?;
        other.reserve(pool, context)?;
        Ok(other)
    }

    /// Reserves host memory for a whole context, so that no later pass has to.
    pub fn reserve(&mut self, pool: &BufferPool<B>, context: u64) -> Result<(), EngineError> {
        let sizes = PassSizes { batch: 1, sequence: context, past: 0, rows: context };
        if matches!(self.role, InputRole::AttentionMask | InputRole::TokenTypeIds) {
            let dims = self.shape(&sizes)?;
            self.reserve_host(pool, &dims)?;
        }
        Ok(())
    }

    /// Its bytes in a pass of these sizes; 0 for an input that the caller gives.
    pub fn bytes(&self, sizes: &PassSizes) -> u64 {
        let dims = self.shape(sizes).ok();
        dims.and_then(|dims| size_of(&self.name, self.dtype, &dims).ok()).unwrap_or(0)
    }

    /// Writes the input's values for a pass. `rows_from` is the index in the pass of the first position whose logits are computed.
    pub fn write(
        &mut self,
        pool: &BufferPool<B>,
        input: PassInput<'_>,
        rows_from: u64,
        sizes: &PassSizes,
        extra: &BTreeMap<String, HostTensor>,
        recorder: &mut Recorder,
    ) -> Result<(), EngineError> {
        if self.role == InputRole::Free {
            return self.write_given(pool, extra, recorder);
        }
        if let (InputRole::Embeddings, PassInput::Embeddings(values)) = (self.role, input) {
            self.width = Some(values.len() as u64 / sizes.sequence);
        }
        let dims = self.shape(sizes)?;
        self.reserve_host(pool, &dims)?;
        self.dims = dims;
        let elements: u64 = self.dims.iter().product();
        self.scratch.clear();
        let (offset, fits) = match (self.role, input) {
            (InputRole::TokenIds, PassInput::Rows(RowInput { ids, .. }) | PassInput::Tokens(ids)) => {
                (0, integers(self.dtype, ids.iter().map(|id| u64::from(*id)), &mut self.scratch))
            }
            (InputRole::Embeddings, PassInput::Embeddings(values)) => {
                (0, f32_to_floats(self.dtype, values, &mut self.scratch))
            }
            (InputRole::TokenIds | InputRole::Embeddings, _) => return Err(self.missing()),
            (InputRole::AttentionMask, PassInput::Rows(rows)) => {
                // The mask of a row covers its own tokens, including the new one. The next pass of one sequence fills the mask again.
                self.filled = 0;
                let mask = |length: u64| (0..sizes.total()).map(move |at| u64::from(at <= length));
                (0, integers(self.dtype, rows.lengths.iter().copied().flat_map(mask), &mut self.scratch))
            }
            (InputRole::AttentionMask, _) => self.fill(1, elements),
            (InputRole::UseCacheBranch, _) => self.fill(1, elements),
            (InputRole::TokenTypeIds, _) => self.fill(0, elements),
            (InputRole::Zeros, _) => {
                self.scratch.resize(size_of(&self.name, self.dtype, &self.dims)? as usize, 0);
                (0, true)
            }
            (InputRole::PositionIds, PassInput::Rows(rows)) => {
                let positions = (0..self.width.unwrap_or(1)).flat_map(|_| rows.lengths.iter().copied());
                (0, integers(self.dtype, positions, &mut self.scratch))
            }
            (InputRole::PositionIds, _) => {
                let axes = self.width.unwrap_or(1) * sizes.batch;
                let positions = (0..axes).flat_map(|_| sizes.past..sizes.total());
                (0, integers(self.dtype, positions, &mut self.scratch))
            }
            (InputRole::PastLengths | InputRole::TotalLengths, _) => {
                let length = if self.role == InputRole::PastLengths { sizes.past } else { sizes.total() };
                (0, integers(self.dtype, (0..sizes.batch).map(|_| length), &mut self.scratch))
            }
            (InputRole::LogitPositions, _) => {
                (0, integers(self.dtype, rows_from..rows_from + sizes.rows, &mut self.scratch))
            }
            (InputRole::Free, _) => (0, true),
        };
        if !fits {
            return Err(self.wrong(format!("its type is {}", self.dtype)));
        }
        self.store(pool, offset, recorder)
    }

    /// Encodes the elements of a constant input that are not written yet: those past `filled`.
    fn fill(&mut self, value: u64, elements: u64) -> (u64, bool) {
        let from = self.filled.min(elements);
        let offset = self.dtype.bytes_for(from).unwrap_or(0);
        self.filled = self.filled.max(elements);
        (offset, integers(self.dtype, (from..elements).map(|_| value), &mut self.scratch))
    }

    fn write_given(
        &mut self,
        pool: &BufferPool<B>,
        extra: &BTreeMap<String, HostTensor>,
        recorder: &mut Recorder,
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
        self.reserve_host(pool, &dims)?;
        self.dims = dims;
        self.scratch.clear();
        self.scratch.extend_from_slice(&tensor.bytes);
        self.store(pool, 0, recorder)
    }

    /// The shape in a pass, by role.
    fn shape(&self, sizes: &PassSizes) -> Result<Dims, EngineError> {
        let PassSizes { batch, sequence, rows, .. } = *sizes;
        let last = match self.role {
            InputRole::AttentionMask => sizes.total(),
            InputRole::LogitPositions => rows,
            InputRole::UseCacheBranch => 1,
            InputRole::PastLengths | InputRole::TotalLengths => batch,
            _ => sequence,
        };
        let dims: Dims = match (self.role, self.rank) {
            (InputRole::UseCacheBranch, 0) => Dims::new(),
            (InputRole::Zeros, _) => self.declared.iter().map(|size| size.unwrap_or(1)).collect(),
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

    fn reserve_host(&mut self, pool: &BufferPool<B>, dims: &Dims) -> Result<(), EngineError> {
        let bytes = size_of(&self.name, self.dtype, dims)?;
        let before = self.host.id;
        pool.grow(&mut self.host, bytes).map_err(about(&self.name))?;
        if self.host.id != before {
            self.filled = 0;
        }
        Ok(())
    }

    /// Writes the encoded bytes to the host buffer and updates the copies.
    fn store(&mut self, pool: &BufferPool<B>, offset: u64, recorder: &mut Recorder) -> Result<(), EngineError> {
        let InputBuffers { name, dtype, host, copies, dims, scratch, .. } = self;
        let changed = !scratch.is_empty();
        if changed {
            pool.backend.write(&host.handle, offset, scratch).map_err(about(name))?;
        }
        let bytes = size_of(name, *dtype, dims)?;
        for buffer in copies.values_mut() {
            let before = buffer.id;
            pool.grow(buffer, bytes).map_err(about(name))?;
            if changed || buffer.id != before {
                let start = pool.backend.now();
                pool.copy(host, buffer, *dtype, dims).map_err(about(name))?;
                let transfer = TensorCopy { name, from: MemoryId::HOST, to: buffer.memory, bytes };
                recorder.copied(&transfer, pool.since(start));
            }
        }
        Ok(())
    }

    /// Adds a memory in which a stage reads this input.
    pub fn add_memory(&mut self, pool: &BufferPool<B>, memory: MemoryId) -> Result<(), EngineError> {
        if memory != MemoryId::HOST && !self.copies.contains_key(&memory) {
            let buffer = pool.reserve(memory, 1).map_err(about(&self.name))?;
            self.copies.insert(memory, buffer);
        }
        Ok(())
    }

    /// The buffer in a memory that was added.
    pub fn buffer(&self, memory: MemoryId) -> &Buffer<B> {
        if memory == MemoryId::HOST { &self.host } else { &self.copies[&memory] }
    }

    fn missing(&self) -> EngineError {
        EngineError::MissingInput { name: self.name.clone(), dtype: self.dtype }
    }

    fn wrong(&self, why: String) -> EngineError {
        EngineError::WrongInput { name: self.name.clone(), why }
    }
}
