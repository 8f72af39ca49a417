//! The runtime: everything that a pass changes, and the operations on it. The immutable part is the [`Program`].

mod bind;
mod freed_memory;
mod infer;
mod lock;
mod pages;
mod pass;
mod pipeline;
mod row_batch;
mod select_experts;
mod sequence;
mod staged;
mod step;
mod truncate;
mod warm_up;

pub(crate) use freed_memory::FreedMemory;
pub use infer::NamedTensors;
pub use pages::{PageLayout, PageToSave};
pub(crate) use row_batch::RowBatcher;
pub use sequence::Sequence;
pub(crate) use step::StepRequest;
pub use step::{LogitRows, StepInput, WorkItem};

use crate::buffers::{BufferPool, Lane, StateArena, StateBuffers, StateStaging};
use crate::cancel::{Attached, CancelHandle};
use crate::error::EngineError;
use crate::file_watch::FileWatch;
use crate::ids::{BoundaryId, IndexVec, SessionId, StageId};
use crate::port::Backend;
use crate::program::{Program, Route, Stage};
use crate::telemetry::Recorder;
use crate::tensor::HostTensor;
use crate::weights::locked::LockedWeights;
use crate::weights::{TierContext, WeightStore};
use sequence::{History, StageBinding};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The mutable half of an engine.
pub(crate) struct Runtime<B: Backend> {
    pub pool: BufferPool<B>,
    pub sessions: IndexVec<SessionId, B::Session>,
    /// At least one; item n of a pass need not use lane n.
    pub lanes: Vec<Lane<B>>,
    pub staging: StateStaging<B>,
    /// Where sequences have their states if the tokens of several can be rows of one run.
    pub arena: Option<StateArena<B>>,
    pub weights: WeightStore<B>,
    pub route: Route,
    pub recorder: Recorder,
    pub taps: Taps,
    /// Sequences whose states fit the memory budget together.
    pub max_sequences: u64,
    /// Whether the plan or the system limits host memory.
    pub is_memory_limited: bool,
    pub freed_memory: FreedMemory,
    /// Streamed weights that are locked in host memory.
    pub locked: LockedWeights,
    /// Bytes of streamed weights that are locked now.
    pub locked_now: u64,
    /// The longest item, in tokens, for which the backend has allocated since its unused memory was last freed.
    pub longest_item: u64,
    /// The items of a pass in the order in which the present stage runs them. Kept, so that a pass without experts allocates nothing.
    pub item_order: Vec<usize>,
    /// Staging for logits on their way from a device to the caller.
    pub scratch: Vec<u8>,
    /// Fails if a file that sessions read is written to.
    pub watch: FileWatch,
    pub control: B::Control,
    pub cancel: CancelHandle,
    /// Connects `cancel` with `control` for as long as it lives.
    pub _attached: Attached,
}

/// Outputs that are read back after each pass.
#[derive(Debug, Default)]
pub(crate) struct Taps {
    /// Incremented when the set changes.
    pub version: u64,
    pub wanted: BTreeSet<BoundaryId>,
    pub read: BTreeMap<String, HostTensor>,
}

impl<B: Backend> Runtime<B> {
    /// A sequence without tokens. Its states are in the arena if the arena has a free row.
    pub fn new_sequence(&mut self, program: &Program) -> Result<Sequence<B>, EngineError> {
        let mut sequence = self.sequence_without_states(program)?;
        let in_arena = self.arena.as_ref().and_then(|arena| {
            let row = arena.take()?;
            Some((arena.states_of(&program.layouts, &self.pool, row.index)?, row))
        });
        match in_arena {
            Some((states, row)) => (sequence.states, sequence.row) = (states, Some(row)),
            None => {
                let start = self.pool.backend.now();
                let states = program.layouts.iter().map(|layout| StateBuffers::new(layout, &self.pool));
                sequence.states = states.collect::<Result<_, _>>()?;
                self.waited_for_states(program, start);
            }
        }
        self.recorder.telemetry.state_bytes += sequence.state_bytes();
        Ok(sequence)
    }

    /// Frees a sequence. A file system waits for writes in progress before it frees their blocks.
    pub fn free(&mut self, program: &Program, sequence: Sequence<B>) {
        let start = self.pool.backend.now();
        drop(sequence);
        self.waited_for_states(program, start);
    }

    /// Counts the time since `start`, between passes, as waiting for states on disk if there are any.
    fn waited_for_states(&mut self, program: &Program, start: Duration) {
        if program.disk_state_bytes() > 0 {
            self.recorder.telemetry.state_stalls.add(self.pool.since(start).duration());
        }
    }

    /// A sequence without states of its own, for bindings.
    fn sequence_without_states(&self, program: &Program) -> Result<Sequence<B>, EngineError> {
        let limits = program.layouts.iter().map(|layout| layout.limit(program.context));
        let limit = limits.min().unwrap_or(program.context);
        let bindings = self.new_bindings(program)?;
        let (taps_version, history) = (self.taps.version, History::default());
        Ok(Sequence {
            length: 0,
            limit,
            row: None,
            states: IndexVec::default(),
            bindings,
            taps_version,
            history,
            lane: 0,
            pass_start: None,
            snapshots: false,
            has_snapshots: false,
            interrupted: false,
        })
    }

    /// Empty bindings, one for each stage.
    fn new_bindings(&self, program: &Program) -> Result<IndexVec<StageId, StageBinding<B>>, EngineError> {
        let bind = |stage: &Stage| {
            StageBinding::new(stage, &self.sessions[stage.session])
                .map_err(|source| stage.failed("being bound", source))
        };
        program.stages.iter().map(bind).collect()
    }

    /// The parts that weight tiers use, apart from the weight store itself.
    fn weights(&mut self) -> (&mut WeightStore<B>, TierContext<'_, B>) {
        (&mut self.weights, TierContext { pool: &self.pool, recorder: &mut self.recorder })
    }

    /// Waits for all devices and records the intervals that they report.
    pub fn synchronize(&mut self) -> Result<(), EngineError> {
        let recorder = &mut self.recorder;
        let synchronized =
            self.pool.backend.synchronize_all(&mut |token, interval| recorder.completed(token, interval));
        synchronized.map_err(|source| EngineError::Device { source })
    }

    fn check_cancelled(&self) -> Result<(), EngineError> {
        if self.cancel.is_cancelled() { Err(EngineError::Cancelled) } else { Ok(()) }
    }
}
