//! States of one sequence: KV caches, convolution and recurrent state, in buffers the sequence owns.
//!
//! An in-place state is one buffer, bound as past and present. Appended, sliding and replaced states are double-buffered, so that a run
//! never writes what it reads and nothing is copied between steps. The two buffers swap only after a whole pass has succeeded.

use super::{Buffer, BufferPool, BufferView, about, size_of};
use crate::error::{BackendError, EngineError};
use crate::port::{Backend, Dims, MemoryId};
use crate::program::{SymbolTable, token_axis};
use crate::tensor::{HostTensor, byte_len};
use hpp_schema::memory::state_tokens;
use hpp_schema::{DType, State, StateUpdate};

/// Type, shape and place of a state, the same for all sequences.
#[derive(Clone, Debug)]
pub(crate) struct StateLayout {
    pub past: String,
    pub dtype: DType,
    pub update: StateUpdate,
    /// Sizes at full capacity.
    pub full: Dims,
    /// The memory it lies in between passes.
    pub memory: MemoryId,
    /// Whether its buffer is laid out for the tokens it holds, not for the full capacity, because it is copied before and after
    /// runs. Invariant: such a state is updated in place and lies on the host.
    pub partial: bool,
    /// Whether its buffers lie on disk between the runs that use them. Invariant: such a state lies on the host.
    pub on_disk: bool,
    /// The number of axes, for states that the caller supplies.
    rank: usize,
}

impl StateLayout {
    /// The layout for a context of `context` tokens where the plan was made for `planned` ([`StateUpdate::for_context`]).
    pub fn new(
        state: &State,
        symbols: &SymbolTable,
        planned: u64,
        context: u64,
        memory: MemoryId,
    ) -> Result<Self, EngineError> {
        let update = state.update.for_context(planned, context);
        let capacity = update.tokens().map_or(0, |(_, capacity)| capacity);
        let full = match update {
            StateUpdate::ReadOnly => Some(Dims::new()),
            _ => symbols.state_dims(state, capacity),
        };
        let full = full.ok_or_else(|| EngineError::WrongInput {
            name: state.past.clone(),
            why: format!("the plan leaves a size of the state unknown: {:?}", state.shape),
        })?;
        let rank = state.shape.len();
        Ok(StateLayout {
            past: state.past.clone(),
            dtype: state.dtype,
            update,
            full,
            memory,
            partial: false,
            on_disk: false,
            rank,
        })
    }

    /// The layout if the plan keeps the state on disk, which it does only for states on the host.
    pub fn kept_on_disk(self, on_disk: bool) -> Self {
        StateLayout { on_disk: on_disk && self.memory == MemoryId::HOST, ..self }
    }

    /// The layout if the state is staged: copied to the memory of the stage that updates it. Then only the filled part is laid out
    /// and copied, where the operator accepts any capacity.
    pub fn staged(self, state: &State, is_staged: bool) -> Self {
        let in_place = matches!(self.update, StateUpdate::InPlace { .. });
        let is_copied_in_parts = state.any_capacity && in_place && self.has_whole_byte_elements();
        let partial = is_staged && is_copied_in_parts && self.memory == MemoryId::HOST;
        StateLayout { partial, ..self }
    }

    /// Whether an element takes whole bytes; else elements share bytes.
    fn has_whole_byte_elements(&self) -> bool {
        self.dtype.bytes_for(1).map(|one| 2 * one) == self.dtype.bytes_for(2)
    }

    /// Tokens its buffer is laid out for when it holds `held`.
    pub(super) fn layout_tokens(&self, held: u64) -> u64 {
        match self.update {
            StateUpdate::InPlace { capacity, .. } if self.partial => state_tokens(held, capacity),
            other => other.tokens().map_or(0, |(_, capacity)| capacity),
        }
    }

    /// Most tokens a sequence can have because of this state; sliding windows set no limit.
    pub fn limit(&self, context: u64) -> u64 {
        match self.update {
            StateUpdate::Append { capacity, .. } => capacity.min(context),
            _ => context,
        }
    }

    /// Whether a sequence of `length` tokens has dropped some from it: a sliding window that was full.
    pub fn has_dropped(&self, length: u64) -> bool {
        match self.update {
            StateUpdate::InPlace { capacity, .. } | StateUpdate::Sliding { capacity, .. } => length > capacity,
            StateUpdate::Append { .. } | StateUpdate::Replace | StateUpdate::ReadOnly => false,
        }
    }

    /// Bytes that a sequence reserves for it.
    pub fn bytes(&self) -> u64 {
        let one = byte_len(self.dtype, &self.full).unwrap_or(u64::MAX);
        match self.update {
            StateUpdate::InPlace { .. } => one,
            StateUpdate::Append { .. } | StateUpdate::Sliding { .. } | StateUpdate::Replace => one.saturating_mul(2),
            StateUpdate::ReadOnly => 0,
        }
    }

    /// Its sizes when it holds the tokens of a sequence of `length` tokens, or when an in-place buffer is laid out for that many.
    pub(super) fn dims(&self, length: u64) -> Dims {
        let mut dims = self.full.clone();
        match self.update {
            StateUpdate::Sliding { axis, capacity } => dims[axis] = length.min(capacity),
            StateUpdate::InPlace { axis, .. } | StateUpdate::Append { axis, .. } => dims[axis] = length,
            StateUpdate::Replace | StateUpdate::ReadOnly => {}
        }
        dims
    }
}

/// The buffers of one state of one sequence.
pub(crate) enum StateBuffers<B: Backend> {
    /// Updated in place, laid out for `tokens` tokens; with a copy of its contents before the last pass, if that may be undone.
    InPlace { buffer: Buffer<B>, tokens: u64, snapshot: Option<Buffer<B>> },
    /// Double-buffered: the buffer at `past` is read, the other one written.
    Double { buffers: [Buffer<B>; 2], past: usize },
    /// Updated in place: the states of several sequences in one buffer. `dims` begins with the number of sequences.
    Rows { buffer: Buffer<B>, dims: Dims },
    /// Supplied by the caller; `None` before that.
    Supplied(Option<(Buffer<B>, Dims)>),
}

impl<B: Backend> StateBuffers<B> {
    pub fn new(layout: &StateLayout, pool: &BufferPool<B>) -> Result<Self, EngineError> {
        let bytes = size_of(&layout.past, layout.dtype, &layout.full)?;
        let reserve = || {
            let reserved = match layout.on_disk {
                true => pool.reserve_on_disk(bytes),
                false => pool.reserve(layout.memory, bytes),
            };
            reserved.map_err(about(&layout.past))
        };
        Ok(match layout.update {
            StateUpdate::InPlace { .. } => StateBuffers::in_place(layout, reserve()?),
            StateUpdate::Append { .. } | StateUpdate::Sliding { .. } | StateUpdate::Replace => {
                StateBuffers::Double { buffers: [reserve()?, reserve()?], past: 0 }
            }
            StateUpdate::ReadOnly => StateBuffers::Supplied(None),
        })
    }

    /// The buffers of a state that is updated in place in `buffer`.
    pub fn in_place(layout: &StateLayout, buffer: Buffer<B>) -> Self {
        let tokens = token_axis(layout.update).map_or(0, |axis| layout.full[axis]);
        StateBuffers::InPlace { buffer, tokens, snapshot: None }
    }

    /// Bytes reserved; 0 for rows, which belong to their sequences.
    pub fn bytes(&self) -> u64 {
        match self {
            StateBuffers::Rows { .. } => 0,
            StateBuffers::InPlace { buffer, snapshot, .. } => {
                buffer.bytes + snapshot.as_ref().map_or(0, |snapshot| snapshot.bytes)
            }
            StateBuffers::Double { buffers, .. } => buffers.iter().map(|buffer| buffer.bytes).sum(),
            StateBuffers::Supplied(supplied) => supplied.as_ref().map_or(0, |(buffer, _)| buffer.bytes),
        }
    }

    /// The buffer and shape to bind as past when the sequence has `length` tokens.
    pub fn past(&self, layout: &StateLayout, length: u64) -> Result<BufferView<'_, B>, EngineError> {
        let (buffer, dims) = match (self, layout.update) {
            (StateBuffers::InPlace { buffer, tokens, .. }, _) => (buffer, layout.dims(*tokens)),
            (StateBuffers::Rows { buffer, dims }, _) => (buffer, dims.clone()),
            (StateBuffers::Double { buffers, past }, _) => (&buffers[*past], layout.dims(length)),
            (StateBuffers::Supplied(Some((buffer, dims))), _) => (buffer, dims.clone()),
            (StateBuffers::Supplied(None), _) => {
                return Err(EngineError::MissingInput { name: layout.past.clone(), dtype: layout.dtype });
            }
        };
        Ok(BufferView { buffer, dims })
    }

    /// The buffer and shape to bind as present when the sequence will have `total` tokens; `None` for read-only states.
    pub fn present(&self, layout: &StateLayout, total: u64) -> Option<BufferView<'_, B>> {
        let (buffer, dims) = match (self, layout.update) {
            (StateBuffers::InPlace { buffer, tokens, .. }, _) => (buffer, layout.dims(*tokens)),
            (StateBuffers::Rows { buffer, dims }, _) => (buffer, dims.clone()),
            (StateBuffers::Double { buffers, past }, _) => (&buffers[1 - *past], layout.dims(total)),
            (StateBuffers::Supplied(_), _) => return None,
        };
        Some(BufferView { buffer, dims })
    }

    /// Makes room for `total` tokens in a partial layout; the sequence has `length` now. The elements that are added behind its tokens are zero.
    pub fn make_room(
        &mut self,
        layout: &StateLayout,
        pool: &BufferPool<B>,
        length: u64,
        total: u64,
        scratch: &mut Vec<u8>,
    ) -> Result<(), EngineError> {
        let StateBuffers::InPlace { buffer, tokens, .. } = self else { return Ok(()) };
        let wanted = layout.layout_tokens(total);
        if !layout.partial || (length > 0 && *tokens >= wanted) {
            return Ok(());
        }
        if length > 0 {
            let change = LayoutChange { held: length, before: *tokens, after: wanted };
            change.apply(layout, pool, buffer, scratch).map_err(about(&layout.past))?;
        }
        *tokens = wanted;
        Ok(())
    }

    /// Copies the contents of a buffer on the host before a pass that may be undone.
    pub fn take_snapshot(&mut self, layout: &StateLayout, pool: &BufferPool<B>) -> Result<(), EngineError> {
        let StateBuffers::InPlace { buffer, snapshot, .. } = self else { return Ok(()) };
        let reserved = match snapshot.take() {
            Some(reserved) => Ok(reserved),
            None => pool.reserve(buffer.memory, buffer.bytes),
        };
        let snapshot = snapshot.insert(reserved.map_err(about(&layout.past))?);
        pool.copy(buffer, snapshot, layout.dtype, &layout.full).map_err(about(&layout.past))
    }

    /// Goes back from `before` to `after` tokens. `is_last_pass`: the last pass started with `after` tokens, so that the other buffer of a
    /// double-buffered state still holds them.
    pub fn truncate(
        &mut self,
        layout: &StateLayout,
        pool: &BufferPool<B>,
        (before, after): (u64, u64),
        is_last_pass: bool,
        scratch: &mut Vec<u8>,
    ) -> Result<(), EngineError> {
        let (buffers, past) = match self {
            StateBuffers::Double { buffers, past } => (buffers, past),
            StateBuffers::InPlace { buffer, snapshot: Some(snapshot), .. } if layout.has_dropped(before) => {
                std::mem::swap(buffer, snapshot);
                return Ok(());
            }
            _ => return Ok(()),
        };
        if is_last_pass {
            *past = 1 - *past;
            return Ok(());
        }
        let has_rows = matches!(layout.update, StateUpdate::Append { .. } | StateUpdate::Sliding { .. });
        if after == 0 || !has_rows {
            return Ok(());
        }
        debug_assert!(!layout.has_dropped(before), "a sequence goes back from a full window only by its last pass");
        let (change, buffer) = (LayoutChange { held: after, before, after }, &buffers[*past]);
        let changed = match buffer.memory {
            MemoryId::HOST => change.apply(layout, pool, buffer, scratch),
            memory => {
                pool.backend.synchronize(memory).and_then(|()| change.apply_on_device(layout, pool, buffer, scratch))
            }
        };
        changed.map_err(about(&layout.past))
    }

    /// Starts to read what a sequence of `length` tokens holds of a state on disk.
    pub fn prefetch(&self, layout: &StateLayout, pool: &BufferPool<B>, length: u64) {
        match self {
            StateBuffers::InPlace { buffer, tokens, .. } => {
                let change = LayoutChange { held: length.min(*tokens), before: *tokens, after: *tokens };
                let (slices, token_bytes) = change.slices(layout);
                for slice in 0..slices {
                    pool.backend.prefetch(&buffer.handle, slice * *tokens * token_bytes, change.held * token_bytes);
                }
            }
            StateBuffers::Double { buffers, past } => {
                let held = byte_len(layout.dtype, &layout.dims(length)).unwrap_or(0);
                pool.backend.prefetch(&buffers[*past].handle, 0, held);
            }
            StateBuffers::Rows { .. } | StateBuffers::Supplied(_) => {}
        }
    }

    /// Its buffers.
    pub fn buffers(&self) -> &[Buffer<B>] {
        match self {
            StateBuffers::InPlace { buffer, .. } => std::slice::from_ref(buffer),
            StateBuffers::Double { buffers, .. } => buffers,
            StateBuffers::Rows { .. } | StateBuffers::Supplied(_) => &[],
        }
    }

    /// A pass has succeeded: swaps a double-buffered state.
    pub fn commit(&mut self) {
        if let StateBuffers::Double { past, .. } = self {
            *past = 1 - *past;
        }
    }

    /// Sets a read-only state.
    pub fn set_read_only(
        &mut self,
        layout: &StateLayout,
        pool: &BufferPool<B>,
        tensor: &HostTensor,
    ) -> Result<(), EngineError> {
        let wrong = |why: String| EngineError::WrongInput { name: layout.past.clone(), why };
        let StateBuffers::Supplied(slot) = self else {
            return Err(wrong("the model computes this state; only read-only states can be set".into()));
        };
        if tensor.dtype != layout.dtype || tensor.shape.len() != layout.rank {
            return Err(wrong(format!("the model wants {} with {} axes", layout.dtype, layout.rank)));
        }
        let buffer = upload(pool, &layout.past, tensor, layout.memory)?;
        *slot = Some((buffer, Dims::from_slice(&tensor.shape)));
        Ok(())
    }
}

/// A change of the number of tokens that a buffer is laid out for. The buffer consists of slices, one for each index of the axes before the token
/// axis; each slice has room for that many tokens.
struct LayoutChange {
    /// Tokens it holds.
    held: u64,
    /// Tokens it was laid out for.
    before: u64,
    /// Tokens it will be laid out for.
    after: u64,
}

impl LayoutChange {
    /// Moves each slice of a buffer on the host to its new place.
    fn apply<B: Backend>(
        &self,
        layout: &StateLayout,
        pool: &BufferPool<B>,
        buffer: &Buffer<B>,
        scratch: &mut Vec<u8>,
    ) -> Result<(), BackendError> {
        let (slices, _) = self.slices(layout);
        // If slices grow, they move up, and the last one moves first; else they move down, and the first one moves first. So no slice is written
        // over one that has not moved yet.
        let grows = self.after > self.before;
        (0..slices)
            .map(|slice| if grows { slices - 1 - slice } else { slice })
            .try_for_each(|slice| self.move_slice(layout, pool, buffer, buffer, slice, scratch))
    }

    /// Like [`apply`](Self::apply), but for a buffer on a device, through one on the host.
    fn apply_on_device<B: Backend>(
        &self,
        layout: &StateLayout,
        pool: &BufferPool<B>,
        buffer: &Buffer<B>,
        scratch: &mut Vec<u8>,
    ) -> Result<(), BackendError> {
        let (slices, token_bytes) = self.slices(layout);
        let host = pool.reserve(MemoryId::HOST, slices * self.after * token_bytes)?;
        (0..slices).try_for_each(|slice| self.move_slice(layout, pool, buffer, &host, slice, scratch))?;
        pool.copy(&host, buffer, layout.dtype, &layout.dims(self.after))
    }

    /// The number of slices, and the bytes of one token in a slice.
    fn slices(&self, layout: &StateLayout) -> (u64, u64) {
        let axis = token_axis(layout.update).unwrap_or(0);
        (layout.full[..axis].iter().product(), byte_len(layout.dtype, &layout.full[axis + 1..]).unwrap_or(0))
    }

    /// Copies the tokens that a slice holds to its new place and fills the rest of the slice with zeros.
    fn move_slice<B: Backend>(
        &self,
        layout: &StateLayout,
        pool: &BufferPool<B>,
        from: &Buffer<B>,
        to: &Buffer<B>,
        slice: u64,
        scratch: &mut Vec<u8>,
    ) -> Result<(), BackendError> {
        let (_, token_bytes) = self.slices(layout);
        let bytes = pool.view(from, DType::Uint8, &[from.bytes])?;
        scratch.clear();
        scratch.resize((self.after * token_bytes) as usize, 0);
        let held = &mut scratch[..(self.held * token_bytes) as usize];
        pool.backend.read(&bytes, slice * self.before * token_bytes, held)?;
        pool.backend.write(&to.handle, slice * self.after * token_bytes, scratch)
    }
}

/// Copies a host tensor into a new buffer in a memory.
pub(crate) fn upload<B: Backend>(
    pool: &BufferPool<B>,
    name: &str,
    tensor: &HostTensor,
    memory: MemoryId,
) -> Result<Buffer<B>, EngineError> {
    if let Some(why) = tensor.misfit() {
        return Err(EngineError::WrongInput { name: name.to_owned(), why });
    }
    let bytes = tensor.bytes.len() as u64;
    let host = pool.reserve(MemoryId::HOST, bytes).map_err(about(name))?;
    pool.backend.write(&host.handle, 0, &tensor.bytes).map_err(about(name))?;
    if memory == MemoryId::HOST {
        return Ok(host);
    }
    let buffer = pool.reserve(memory, bytes).map_err(about(name))?;
    pool.copy(&host, &buffer, tensor.dtype, &Dims::from_slice(&tensor.shape)).map_err(about(name))?;
    Ok(buffer)
}
