//! States of one sequence: KV caches, convolution and recurrent state, in buffers the sequence owns.
//!
//! An in-place state is one buffer bound as past and present. Appended and replaced states are two buffers that take turns,
//! so that what a run writes is never what it reads, and nothing is copied between steps. A turn is only taken when a
//! whole pass succeeded.

use crate::area::{Area, Areas, Key, about, size_of};
use crate::error::EngineError;
use crate::port::{Backend, Dims, MemoryId};
use crate::shape::{Vocabulary, token_axis};
use crate::tensor::HostTensor;
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
        Ok(StateLayout { past: state.past.clone(), dtype: state.dtype, update, full, memory, rank })
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
    /// Past and present are one.
    Single(Area<B>),
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
            StateUpdate::InPlace { .. } => Store::Single(reserve()?),
            StateUpdate::Append { .. } | StateUpdate::Replace => {
                Store::Pair { areas: [reserve()?, reserve()?], turn: 0 }
            }
            StateUpdate::ReadOnly => Store::Given(None),
        })
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        match self {
            Store::Single(area) => area.bytes,
            Store::Pair { areas, .. } => areas.iter().map(|area| area.bytes).sum(),
            Store::Given(given) => given.as_ref().map_or(0, |(area, _)| area.bytes),
        }
    }

    /// What to bind as past when the sequence has `past` tokens.
    pub fn past(&self, layout: &StateLayout, past: u64) -> Result<(&Area<B>, Key), EngineError> {
        let (area, dims) = match (self, layout.update) {
            (Store::Single(area), _) => (area, layout.full.clone()),
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
            (Store::Single(area), _) => (area, layout.full.clone()),
            (Store::Pair { areas, turn }, StateUpdate::Append { .. }) => (&areas[1 - *turn], layout.dims(total)),
            (Store::Pair { areas, turn }, _) => (&areas[1 - *turn], layout.full.clone()),
            (Store::Given(_), _) => return None,
        };
        let serial = area.serial;
        Some((area, Key { serial, dims }))
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
