//! Staging of states that lie in one memory and are updated in another: a copy to a staging buffer before a run, and back after it.
//!
//! If both phases update a state away from its home memory, all stages share the staging buffers of its device. There are two sets of them, used in
//! turn: while one stage runs, the states of the next stage are copied from the host to the other set. So the device holds the states of two stages
//! at a time; or of one stage, if no second stage of a pass needs staging buffers or the device has no room for a second set. A *turn* is the run
//! of one item at one stage.
//!
//! If only one phase updates a state away from its home, each state has a staging buffer of its own and is copied there and back once for
//! all passes of a prompt.

use super::{Buffer, BufferPool, BufferView, StateLayout, about, size_of};
use crate::error::EngineError;
use crate::ids::{IndexVec, StageId, StateId};
use crate::port::{Backend, MemoryId, Timing, Uploaded};
use crate::program::{Program, Route, Stage};
use crate::telemetry::{Awaited, DeviceEvent, Phase, Recorder, TensorCopy};
use hpp_schema::StateUpdate;
use std::collections::BTreeMap;

/// Staging buffers, and which of them each state uses.
pub(crate) struct StateStaging<B: Backend> {
    assigned: BTreeMap<(StageId, StateId), Assignment>,
    buffers: Vec<StagingBuffer<B>>,
    /// The set of the present turn.
    set: usize,
    /// The set of the next turn at a stage with shared staging buffers.
    next_set: usize,
    ahead: Option<StatesAhead<B>>,
    /// The states of the present turn that were copied ahead.
    arrived: Vec<StateId>,
}

/// A staging buffer, and its counterpart in the second set, if there is one.
struct StagingBuffer<B: Backend> {
    first: Buffer<B>,
    second: Option<Buffer<B>>,
}

/// Indices of the staging buffers of a state's past and present: the same for a state updated in place.
#[derive(Clone, Copy, Debug)]
struct Assignment {
    past: usize,
    present: usize,
    /// Whether no other state uses them.
    exclusive: bool,
    /// Whether the state lies on the host and only devices update it, so that it can be copied ahead.
    is_upload: bool,
}

/// A staging buffer to be reserved.
struct PlannedBuffer {
    memory: MemoryId,
    bytes: u64,
    exclusive: bool,
}

/// States that are copied to the set of the next turn.
struct StatesAhead<B: Backend> {
    /// The stage and the item that will have this turn.
    turn: (StageId, usize),
    states: Vec<StateAhead<B>>,
}

struct StateAhead<B: Backend> {
    state: StateId,
    memory: MemoryId,
    bytes: u64,
    /// The copy, if it may still be in progress.
    upload: Option<B::Upload>,
}

/// What decides whether a state is copied to the staging buffer of a stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyIn {
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

impl<B: Backend> StagingBuffer<B> {
    fn of_set(&self, set: usize) -> &Buffer<B> {
        self.second.as_ref().filter(|_| set == 1).unwrap_or(&self.first)
    }
}

impl<B: Backend> StateStaging<B> {
    /// Reserves staging buffers for the states that need them.
    pub fn new(pool: &BufferPool<B>, program: &Program, route: &Route) -> Result<Self, EngineError> {
        let (assigned, planned) = assign_all(&program.layouts, &program.stages)?;
        let failed = || about("staging buffers for states");
        let first = planned.iter().map(|buffer| pool.reserve(buffer.memory, buffer.bytes).map_err(failed()));
        let first: Vec<Buffer<B>> = first.collect::<Result<_, _>>()?;
        let wants_second = |buffer: &PlannedBuffer| {
            let is_staged = |stage: &Stage, id: StageId| {
                stage.memory() == buffer.memory && stage.states().any(|state| is_shared_upload(&assigned, id, state))
            };
            !buffer.exclusive
                && Phase::BOTH.iter().any(|phase| {
                    let stages = route[*phase].iter().filter(|id| is_staged(&program.stages[**id], **id));
                    stages.count() > 1
                })
        };
        let reserve = |buffer: &PlannedBuffer| match wants_second(buffer) {
            true => pool.reserve(buffer.memory, buffer.bytes).map(Some),
            false => Ok(None),
        };
        // Without room for a whole second set, no part of it is kept, and nothing is copied ahead.
        let second: Result<Vec<Option<Buffer<B>>>, _> = planned.iter().map(reserve).collect();
        let second = second.unwrap_or_else(|error| {
            tracing::warn!(%error, "no room to copy states ahead of their runs");
            planned.iter().map(|_| None).collect()
        });
        let pair = |(first, second)| StagingBuffer { first, second };
        let buffers = first.into_iter().zip(second).map(pair).collect();
        Ok(StateStaging { assigned, buffers, set: 1, next_set: 0, ahead: None, arrived: Vec::new() })
    }

    /// Starts a pass: its first turn with states copied ahead uses the first set. No state is being copied.
    pub fn start_pass(&mut self) {
        (self.set, self.next_set) = (1, 0);
    }

    /// Whether states of any stage are copied ahead.
    pub fn copies_ahead(&self) -> bool {
        self.buffers.iter().any(|buffer| buffer.second.is_some())
    }

    /// Whether states of a stage are copied ahead.
    pub fn has_states_ahead(&self, stage: StageId) -> bool {
        self.assigned.iter().any(|((other, _), assignment)| *other == stage && self.is_copied_ahead(assignment))
    }

    fn is_copied_ahead(&self, assignment: &Assignment) -> bool {
        let has_second = self.buffers[assignment.past].second.is_some();
        assignment.is_upload && !assignment.exclusive && has_second
    }

    /// Starts to copy a state of the next turn to the set that no run uses. The states of the turn before the one in progress are back home, so
    /// runs in progress use the other set.
    pub fn copy_ahead(
        &mut self,
        pool: &BufferPool<B>,
        turn: (StageId, usize),
        state: StateId,
        layout: &StateLayout,
        home: BufferView<'_, B>,
        recorder: &mut Recorder,
    ) -> Result<(), EngineError> {
        let assignment = self.assigned.get(&(turn.0, state)).filter(|assignment| self.is_copied_ahead(assignment));
        let Some(assignment) = assignment else { return Ok(()) };
        if let Some(unused) = self.ahead.take_if(|ahead| ahead.turn != turn) {
            await_all(pool, unused, None)?;
        }
        let BufferView { buffer, dims } = home;
        let to = self.buffers[assignment.past].of_set(self.next_set);
        let (bytes, start) = (size_of(&layout.past, layout.dtype, &dims)?, pool.backend.now());
        let upload = pool.copy_ahead(buffer, to, layout.dtype, &dims).map_err(about(&layout.past))?;
        if upload.is_none() {
            let transfer = TensorCopy { name: &layout.past, from: buffer.memory, to: to.memory, bytes };
            recorder.copied(&transfer, pool.since(start));
        }
        let copied = StateAhead { state, memory: to.memory, bytes, upload };
        self.ahead.get_or_insert_with(|| StatesAhead { turn, states: Vec::new() }).states.push(copied);
        Ok(())
    }

    /// Starts the turn of an item at a stage whose states are not copied ahead. It uses the set of the previous turn, whose states are back home.
    pub fn start_other_turn(&mut self) {
        self.arrived.clear();
    }

    /// Starts the turn of an item at a stage whose states are copied ahead, and orders its run after the copies that were started for it. It also
    /// waits for copies that were started for another turn, whose item has failed, because this turn uses their set.
    pub fn start_turn(
        &mut self,
        pool: &BufferPool<B>,
        turn: (StageId, usize),
        recorder: &mut Recorder,
    ) -> Result<(), EngineError> {
        self.set = self.next_set;
        self.next_set = 1 - self.set;
        self.arrived.clear();
        let Some(ahead) = self.ahead.take() else { return Ok(()) };
        if ahead.turn == turn {
            self.arrived.extend(ahead.states.iter().map(|copied| copied.state));
        }
        await_all(pool, ahead, Some(recorder))
    }

    /// Ends a pass: waits for copies in progress and, after a failed pass, for devices, which may still use staging buffers.
    pub fn settle(&mut self, pool: &BufferPool<B>, has_failed: bool) -> Result<(), EngineError> {
        let awaited = self.ahead.take().map_or(Ok(()), |ahead| await_all(pool, ahead, None));
        if has_failed && self.copies_ahead() {
            self.buffers.iter().try_for_each(|buffer| pool.backend.synchronize(buffer.first.memory)).map_err(failed)?;
        }
        awaited
    }

    /// Waits for the device of a stage whose run has failed: work that is left there must end before states are copied to the set that the run
    /// used.
    pub fn abandon_run(&self, pool: &BufferPool<B>, stage: StageId) {
        for ((_, _), assignment) in self.assigned.iter().filter(|((other, _), _)| *other == stage) {
            // What the device reports is about the run that has failed.
            let _ = pool.backend.synchronize(self.buffers[assignment.past].first.memory);
        }
    }

    /// The past of a state as a stage reads it: its home buffer, or a staging buffer to which it is copied.
    pub fn past<'a>(
        &'a self,
        pool: &BufferPool<B>,
        at: (StageId, StateId),
        layout: &StateLayout,
        home: BufferView<'a, B>,
        arrival: CopyIn,
        recorder: &mut Recorder,
    ) -> Result<BufferView<'a, B>, EngineError> {
        let Some(assignment) = self.assigned.get(&at) else { return Ok(home) };
        let staging = self.buffers[assignment.past].of_set(self.set);
        // An empty state is not read, and an exclusive buffer still holds the state of the pass before.
        let is_wanted = match assignment.exclusive {
            true => arrival.first_pass && arrival.length > 0,
            false => !self.arrived.contains(&at.1),
        };
        if is_wanted {
            copy(pool, layout, &home, staging, recorder)?;
        }
        Ok(BufferView { buffer: staging, dims: home.dims })
    }

    /// Where a stage's run writes the present of a state: its home buffer, or a staging buffer.
    pub fn present<'a>(&'a self, at: (StageId, StateId), home: BufferView<'a, B>) -> BufferView<'a, B> {
        let Some(assignment) = self.assigned.get(&at) else { return home };
        let staging = self.buffers[assignment.present].of_set(self.set);
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
                let buffer = self.buffers[assignment.present].of_set(self.set);
                copy(pool, layout, &BufferView { buffer, dims: home.dims }, home.buffer, recorder)
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

/// The staging buffers of each stage's states.
type Assigned = BTreeMap<(StageId, StateId), Assignment>;

fn assign_all(
    layouts: &IndexVec<StateId, StateLayout>,
    stages: &IndexVec<StageId, Stage>,
) -> Result<(Assigned, Vec<PlannedBuffer>), EngineError> {
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
            // Appended and sliding states change their shape from pass to pass and are double-buffered, so they cannot stay here.
            let is_at_home = stages.iter().any(|other| other.memory_of_state(state) == Some(layout.memory));
            let exclusive = in_place && is_at_home;
            let past = assign(&mut planned, &mut taken, PlannedBuffer { memory, bytes, exclusive });
            let present = match in_place {
                true => past,
                false => assign(&mut planned, &mut taken, PlannedBuffer { memory, bytes, exclusive }),
            };
            // The planner counts two staging buffers for states that no stage updates at home.
            let is_upload = layout.memory == MemoryId::HOST && !is_at_home;
            assigned.insert((stage_id, state), Assignment { past, present, exclusive, is_upload });
        }
    }
    Ok((assigned, planned))
}

fn is_shared_upload(assigned: &Assigned, stage: StageId, state: StateId) -> bool {
    assigned.get(&(stage, state)).is_some_and(|assignment| assignment.is_upload && !assignment.exclusive)
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

/// Orders later runs after all copies of a turn, even if one of them has failed; returns the first error. The caller passes no recorder if no run
/// uses the copies.
fn await_all<B: Backend>(
    pool: &BufferPool<B>,
    ahead: StatesAhead<B>,
    mut recorder: Option<&mut Recorder>,
) -> Result<(), EngineError> {
    let mut outcome = Ok(());
    let stage = ahead.turn.0;
    for StateAhead { memory, bytes, upload, .. } in ahead.states {
        let Some(upload) = upload else { continue };
        let start = pool.backend.now();
        match (pool.backend.wait_upload(upload), &mut recorder) {
            (Ok(Uploaded { copy, stall }), Some(recorder)) => {
                recorder.record(DeviceEvent::StatesAhead { stage, memory, bytes }, copy);
                // The host waits until the copies are enqueued, then perhaps the device until they are done.
                let waited = [Some(Timing::Measured(pool.since(start))), stall.map(Timing::Pending)];
                for waited in waited.into_iter().flatten() {
                    recorder.record(DeviceEvent::Stall { stage, awaited: Awaited::States }, waited);
                }
            }
            (Ok(_), None) => {}
            (Err(error), _) => outcome = outcome.and(Err(failed(error))),
        }
    }
    outcome
}

fn failed(source: crate::error::BackendError) -> EngineError {
    EngineError::Memory { what: "staging buffers for states".into(), source }
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
