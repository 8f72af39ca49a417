//! States of one sequence: KV caches, convolution and recurrent state, in buffers the sequence owns.
//!
//! An in-place state is one buffer bound as past and present. Appended and replaced states are two buffers that take turns,
//! so that what a run writes is never what it reads, and nothing is copied between steps. A turn is only taken when a
//! whole pass succeeded.

use crate::area::{Area, Areas, Key, about, size_of};
use crate::error::{BackendError, EngineError};
use crate::port::{Backend, Dims, MemoryId};
use crate::shape::{Vocabulary, token_axis};
use crate::tensor::{HostTensor, byte_len};
use hpp_schema::memory::state_tokens;
use hpp_schema::{DType, State, StateUpdate};

/// What the engine knows about a state before any sequence exists.
#[derive(Clone, Debug)]
pub(crate) struct StateLayout {
    pub past: String,
    pub dtype: DType,
    pub update: StateUpdate,
    /// Sizes at full capacity.
    pub full: Dims,
    /// The memory it lies in between passes.
    pub memory: MemoryId,
    /// Whether it is laid out for no more tokens than it must hold, because it is copied before and after runs. Such a state is
    /// updated in place and lies on the host.
    pub partial: bool,
    /// The rank, for states whose sizes the caller brings.
    rank: usize,
}

impl StateLayout {
    /// Lays a state out for a context. Buffers planned for the whole context follow a context that was asked for later;
    /// smaller ones are windows and keep their size.
    pub fn new(
        state: &State,
        vocabulary: &Vocabulary,
        planned: u64,
        context: u64,
        memory: MemoryId,
    ) -> Result<Self, EngineError> {
        let scale = |capacity: u64| if capacity == planned { context } else { capacity };
        let (update, capacity) = match state.update {
            StateUpdate::InPlace { axis, capacity } => {
                (StateUpdate::InPlace { axis, capacity: scale(capacity) }, scale(capacity))
            }
            StateUpdate::Append { axis, capacity } => {
                (StateUpdate::Append { axis, capacity: scale(capacity) }, scale(capacity))
            }
            other => (other, 0),
        };
        let full = match update {
            StateUpdate::ReadOnly => Some(Dims::new()),
            _ => vocabulary.state_dims(state, capacity),
        };
        let full = full.ok_or_else(|| EngineError::WrongInput {
            name: state.past.clone(),
            why: format!("the plan leaves a size of the state unknown: {:?}", state.shape),
        })?;
        let rank = state.shape.len();
        Ok(StateLayout { past: state.past.clone(), dtype: state.dtype, update, full, memory, partial: false, rank })
    }

    /// The same for a state that is copied to where stages compute on it: only what is filled, where the operator allows that.
    pub fn visiting(self, state: &State, visits: bool) -> Self {
        let in_place = matches!(self.update, StateUpdate::InPlace { .. });
        let whole_bytes = self.dtype.bytes_for(1).map(|one| 2 * one) == self.dtype.bytes_for(2);
        let partial = visits && state.any_capacity && in_place && whole_bytes && self.memory == MemoryId::HOST;
        StateLayout { partial, ..self }
    }

    /// Tokens its buffer is laid out for when it holds so many.
    fn tokens(&self, held: u64) -> u64 {
        match self.update {
            StateUpdate::InPlace { capacity, .. } if self.partial => state_tokens(held, capacity),
            StateUpdate::InPlace { capacity, .. } | StateUpdate::Append { capacity, .. } => capacity,
            StateUpdate::Replace | StateUpdate::ReadOnly => 0,
        }
    }

    /// Most tokens a sequence can have because of this state; windows set no limit.
    pub fn limit(&self, context: u64) -> u64 {
        match self.update {
            StateUpdate::Append { capacity, .. } => capacity.min(context),
            _ => context,
        }
    }

    fn dims(&self, length: u64) -> Dims {
        let mut dims = self.full.clone();
        if let Some(axis) = token_axis(self.update) {
            dims[axis] = length;
        }
        dims
    }
}

/// One state's buffers.
pub(crate) enum Store<B: Backend> {
    /// Past and present are one, laid out for so many tokens.
    Single { area: Area<B>, tokens: u64 },
    /// The area at `turn` is the past.
    Pair { areas: [Area<B>; 2], turn: usize },
    /// What the caller gave, if it did.
    Given(Option<(Area<B>, Dims)>),
}

impl<B: Backend> Store<B> {
    pub fn new(layout: &StateLayout, areas: &Areas<B>) -> Result<Self, EngineError> {
        let bytes = size_of(&layout.past, layout.dtype, &layout.full)?;
        let reserve = || areas.reserve(layout.memory, bytes).map_err(about(&layout.past));
        Ok(match layout.update {
            StateUpdate::InPlace { capacity, .. } => Store::Single { area: reserve()?, tokens: capacity },
            StateUpdate::Append { .. } | StateUpdate::Replace => {
                Store::Pair { areas: [reserve()?, reserve()?], turn: 0 }
            }
            StateUpdate::ReadOnly => Store::Given(None),
        })
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        match self {
            Store::Single { area, .. } => area.bytes,
            Store::Pair { areas, .. } => areas.iter().map(|area| area.bytes).sum(),
            Store::Given(given) => given.as_ref().map_or(0, |(area, _)| area.bytes),
        }
    }

    /// What to bind as past when the sequence has `past` tokens.
    pub fn past(&self, layout: &StateLayout, past: u64) -> Result<(&Area<B>, Key), EngineError> {
        let (area, dims) = match (self, layout.update) {
            (Store::Single { area, tokens }, _) => (area, layout.dims(*tokens)),
            (Store::Pair { areas, turn }, StateUpdate::Append { .. }) => (&areas[*turn], layout.dims(past)),
            (Store::Pair { areas, turn }, _) => (&areas[*turn], layout.full.clone()),
            (Store::Given(Some((area, dims))), _) => (area, dims.clone()),
            (Store::Given(None), _) => {
                return Err(EngineError::MissingInput { name: layout.past.clone(), dtype: layout.dtype });
            }
        };
        let serial = area.serial;
        Ok((area, Key { serial, dims }))
    }

    /// What to bind as present when the sequence will have `total` tokens; nothing for states that are only read.
    pub fn present(&self, layout: &StateLayout, total: u64) -> Option<(&Area<B>, Key)> {
        let (area, dims) = match (self, layout.update) {
            (Store::Single { area, tokens }, _) => (area, layout.dims(*tokens)),
            (Store::Pair { areas, turn }, StateUpdate::Append { .. }) => (&areas[1 - *turn], layout.dims(total)),
            (Store::Pair { areas, turn }, _) => (&areas[1 - *turn], layout.full.clone()),
            (Store::Given(_), _) => return None,
        };
        let serial = area.serial;
        Some((area, Key { serial, dims }))
    }

    /// Lays the buffer out for `total` tokens, of which it holds `past`. What is behind them is zero.
    pub fn lay_out(
        &mut self,
        layout: &StateLayout,
        areas: &Areas<B>,
        (past, total): (u64, u64),
        scratch: &mut Vec<u8>,
    ) -> Result<(), EngineError> {
        let Store::Single { area, tokens } = self else { return Ok(()) };
        let wanted = layout.tokens(total);
        if !layout.partial || (past > 0 && *tokens >= wanted) {
            return Ok(());
        }
        if past > 0 {
            spread(layout, areas, area, (past, *tokens, wanted), scratch).map_err(about(&layout.past))?;
        }
        *tokens = wanted;
        Ok(())
    }

    /// A pass succeeded: what was present is past.
    pub fn commit(&mut self) {
        if let Store::Pair { turn, .. } = self {
            *turn = 1 - *turn;
        }
    }

    /// Sets a state that is only read.
    pub fn give(&mut self, layout: &StateLayout, areas: &Areas<B>, tensor: &HostTensor) -> Result<(), EngineError> {
        let wrong = |why: String| EngineError::WrongInput { name: layout.past.clone(), why };
        let Store::Given(slot) = self else {
            return Err(wrong("the model carries this state itself".into()));
        };
        if tensor.dtype != layout.dtype || tensor.shape.len() != layout.rank {
            return Err(wrong(format!("the model wants {} with {} axes", layout.dtype, layout.rank)));
        }
        let area = upload(areas, &layout.past, tensor, layout.memory)?;
        *slot = Some((area, Dims::from_slice(&tensor.shape)));
        Ok(())
    }
}

/// Moves the `held` tokens of each row of a buffer on the host to where they are when it is laid out for `after` tokens instead of
/// `before`, which are fewer.
fn spread<B: Backend>(
    layout: &StateLayout,
    areas: &Areas<B>,
    area: &Area<B>,
    (held, before, after): (u64, u64, u64),
    scratch: &mut Vec<u8>,
) -> Result<(), BackendError> {
    let axis = token_axis(layout.update).unwrap_or(0);
    let rows: u64 = layout.full[..axis].iter().product();
    let token = byte_len(layout.dtype, &layout.full[axis + 1..]).unwrap_or(0);
    let bytes = areas.view(area, DType::Uint8, &[area.bytes])?;
    // The last row first: each goes to a place that those before it do not reach.
    for row in (0..rows).rev() {
        scratch.clear();
        scratch.resize((after * token) as usize, 0);
        areas.backend.read(&bytes, row * before * token, &mut scratch[..(held * token) as usize])?;
        areas.backend.write(&area.buffer, row * after * token, scratch)?;
    }
    Ok(())
}

/// Puts a host tensor into a memory.
pub(crate) fn upload<B: Backend>(
    areas: &Areas<B>,
    name: &str,
    tensor: &HostTensor,
    memory: MemoryId,
) -> Result<Area<B>, EngineError> {
    if let Some(why) = tensor.misfit() {
        return Err(EngineError::WrongInput { name: name.to_owned(), why });
    }
    let bytes = tensor.bytes.len() as u64;
    let host = areas.reserve(MemoryId::HOST, bytes).map_err(about(name))?;
    areas.backend.write(&host.buffer, 0, &tensor.bytes).map_err(about(name))?;
    if memory == MemoryId::HOST {
        return Ok(host);
    }
    let area = areas.reserve(memory, bytes).map_err(about(name))?;
    crate::feed::copy(areas, &host, &area, tensor.dtype, &Dims::from_slice(&tensor.shape)).map_err(about(name))?;
    Ok(area)
}
