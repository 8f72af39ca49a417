//! Staging of states that lie in one memory and are updated in another: a copy to a staging buffer before a run, and back after it.
//!
//! If both phases update a state away from its home memory, all stages share the staging buffers, so the device holds the states of
//! one stage at a time. If only one phase does, each state has a staging buffer of its own and is copied there and back once for all
//! passes of a prompt.

use super::{Buffer, BufferPool, BufferView, StateLayout, about, size_of};
use crate::error::EngineError;
use crate::ids::{IndexVec, StageId, StateId};
use crate::port::{Backend, MemoryId};
use crate::program::Stage;
use crate::telemetry::{Recorder, TensorCopy};
use hpp_schema::StateUpdate;
use std::collections::BTreeMap;

/// Staging buffers, and which of them each state uses.
pub(crate) struct StateStaging<B: Backend> {
    assigned: BTreeMap<(StageId, StateId), Assignment>,
    buffers: Vec<Buffer<B>>,
}

/// Indices of the staging buffers of a state's past and present: the same for a state updated in place.
#[derive(Clone, Copy, Debug)]
struct Assignment {
    past: usize,
    present: usize,
    /// Whether no other state uses them.
    exclusive: bool,
}

/// A staging buffer to be reserved.
struct PlannedBuffer {
    memory: MemoryId,
    bytes: u64,
    exclusive: bool,
}

/// When a state is copied to a stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateArrival {
    /// Whether this is the first pass of a step.
    pub first_pass: bool,
    /// Tokens it holds.
    pub length: u64,
}

/// When a state is copied back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateReturn {
    AfterRun,
    AfterLastPass,
}

impl<B: Backend> StateStaging<B> {
    /// Reserves staging buffers for the states that need them.
    pub fn new(
        pool: &BufferPool<B>,
        layouts: &IndexVec<StateId, StateLayout>,
        stages: &IndexVec<StageId, Stage>,
    ) -> Result<Self, EngineError> {
        let mut assigned = BTreeMap::new();
        let mut planned: Vec<PlannedBuffer> = Vec::new();
        for (stage_id, stage) in stages.entries() {
            let mut taken = Vec::new();
            for state in stage.states() {
                let layout = &layouts[state];
                let Some(memory) = stage.memory_of_state(state).filter(|memory| *memory != layout.memory) else {
                    continue;
                };
                let bytes = size_of(&layout.past, layout.dtype, &layout.full)?;
                let in_place = matches!(layout.update, StateUpdate::InPlace { .. });
                // Appended states change their shape from pass to pass and are double-buffered, so they cannot stay here.
                let exclusive =
                    in_place && stages.iter().any(|other| other.memory_of_state(state) == Some(layout.memory));
                let past = assign(&mut planned, &mut taken, PlannedBuffer { memory, bytes, exclusive });
                let present = match in_place {
                    true => past,
                    false => assign(&mut planned, &mut taken, PlannedBuffer { memory, bytes, exclusive }),
                };
                assigned.insert((stage_id, state), Assignment { past, present, exclusive });
            }
        }
        let reserve = |buffer: &PlannedBuffer| {
            pool.reserve(buffer.memory, buffer.bytes).map_err(about("staging buffers for states"))
        };
        Ok(StateStaging { assigned, buffers: planned.iter().map(reserve).collect::<Result<_, _>>()? })
    }

    /// The past of a state as a stage reads it: its home buffer, or a staging buffer to which it is copied.
    pub fn past<'a>(
        &'a self,
        pool: &BufferPool<B>,
        at: (StageId, StateId),
        layout: &StateLayout,
        home: BufferView<'a, B>,
        arrival: StateArrival,
        recorder: &mut Recorder,
    ) -> Result<BufferView<'a, B>, EngineError> {
        let Some(assignment) = self.assigned.get(&at) else { return Ok(home) };
        let staging = &self.buffers[assignment.past];
        // An empty state is not read, and an exclusive buffer still holds the state of the pass before.
        if !assignment.exclusive || arrival.first_pass && arrival.length > 0 {
            copy(pool, layout, &home, staging, recorder)?;
        }
        Ok(BufferView { buffer: staging, dims: home.dims })
    }

    /// Where a stage's run writes the present of a state: its home buffer, or a staging buffer.
    pub fn present<'a>(&'a self, at: (StageId, StateId), home: BufferView<'a, B>) -> BufferView<'a, B> {
        let Some(assignment) = self.assigned.get(&at) else { return home };
        let staging = &self.buffers[assignment.present];
        BufferView { buffer: staging, dims: home.dims }
    }

    /// Copies the present of a state home: from a shared staging buffer after the run, from an exclusive one after the last pass.
    pub fn return_home(
        &self,
        pool: &BufferPool<B>,
        at: (StageId, StateId),
        layout: &StateLayout,
        home: BufferView<'_, B>,
        when: StateReturn,
        recorder: &mut Recorder,
    ) -> Result<(), EngineError> {
        match self.assigned.get(&at) {
            Some(assignment) if assignment.exclusive == (when == StateReturn::AfterLastPass) => {
                let staging = BufferView { buffer: &self.buffers[assignment.present], dims: home.dims };
                copy(pool, layout, &staging, home.buffer, recorder)
            }
            _ => Ok(()),
        }
    }

    /// Whether a stage has states that are copied to a staging buffer for its runs.
    pub fn has_states_of(&self, stage: StageId) -> bool {
        self.assigned.keys().any(|(other, _)| *other == stage)
    }

    /// Whether any state has a staging buffer of its own.
    pub fn any_exclusive(&self) -> bool {
        self.assigned.values().any(|assignment| assignment.exclusive)
    }
}

/// The index of a shared buffer of this memory that the stage has not taken, enlarged where it is too small; or of a new one.
fn assign(planned: &mut Vec<PlannedBuffer>, taken: &mut Vec<usize>, wanted: PlannedBuffer) -> usize {
    let is_shared = |buffer: &PlannedBuffer| buffer.memory == wanted.memory && !buffer.exclusive && !wanted.exclusive;
    let free = (0..planned.len()).find(|index| is_shared(&planned[*index]) && !taken.contains(index));
    let index = free.unwrap_or(planned.len());
    match planned.get_mut(index) {
        Some(buffer) => buffer.bytes = buffer.bytes.max(wanted.bytes),
        None => planned.push(wanted),
    }
    taken.push(index);
    index
}

fn copy<B: Backend>(
    pool: &BufferPool<B>,
    layout: &StateLayout,
    from: &BufferView<'_, B>,
    to: &Buffer<B>,
    recorder: &mut Recorder,
) -> Result<(), EngineError> {
    let BufferView { buffer: from, dims } = from;
    let start = pool.synchronize(from.memory, to.memory, recorder).map_err(about(&layout.past))?;
    pool.copy(from, to, layout.dtype, dims).map_err(about(&layout.past))?;
    let bytes = size_of(&layout.past, layout.dtype, dims)?;
    let transfer = TensorCopy { name: &layout.past, from: from.memory, to: to.memory, bytes };
    recorder.copied(&transfer, pool.since(start));
    Ok(())
}
