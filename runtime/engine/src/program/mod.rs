//! The program: what a plan says, resolved to ids. It never changes after loading.

mod liveness;
mod resolve;
mod schedule;
mod shape;
mod stage;

pub(crate) use liveness::share_buffers;
pub(crate) use resolve::{NameResolver, match_ports};
pub(crate) use schedule::{BoundaryCopy, Schedule, ScheduledRun, resolve as resolve_schedule};
pub(crate) use shape::{PassShape, PassSizes, SymbolTable, token_axis};
pub(crate) use stage::{InputSource, NextRouting, OutputSink, Routing, Stage, StageInput, StageOutput};

use crate::buffers::StateLayout;
use crate::ids::{BoundaryId, Id, IndexVec, PartitionId, StageId, StateId};
use crate::port::MemoryId;
use crate::telemetry::{PerPhase, Phase};
use hpp_schema::memory::state_window;
use hpp_schema::{ModelKind, Partition, Plan};

/// A loaded plan.
#[derive(Debug)]
pub(crate) struct Program {
    pub plan: Plan,
    /// Most tokens of one sequence.
    pub context: u64,
    pub stages: IndexVec<StageId, Stage>,
    pub schedules: PerPhase<Schedule>,
    pub layouts: IndexVec<StateId, StateLayout>,
    /// The boundary that holds the next-token logits.
    pub logits: Option<BoundaryId>,
}

/// The stage of each partition in each phase.
pub(crate) type Route = PerPhase<IndexVec<PartitionId, StageId>>;

impl Program {
    pub fn partition(&self, id: PartitionId) -> &Partition {
        &self.plan.partitions[id.index()]
    }

    /// Whether each step computes the whole sequence again, because the model keeps no state.
    pub fn recomputes(&self) -> bool {
        self.plan.model.kind == ModelKind::DecoderWithoutCache
    }

    /// The phase whose schedule a pass follows. `is_alone`: it is the only pass of its step. The last of several passes is prefill even if it has
    /// one token, because its states are where the passes before left them.
    pub fn phase(&self, sizes: &PassSizes, is_alone: bool) -> Phase {
        let decode_tokens = self.plan.schedule.decode_tokens.unwrap_or(1).max(1);
        match is_alone && sizes.past > 0 && sizes.sequence <= decode_tokens {
            true => Phase::Decode,
            false => Phase::Prefill,
        }
    }

    /// The sizes of the last chunk of a prompt as long as the context.
    pub fn largest_pass(&self) -> PassSizes {
        let sequence = self.plan.schedule.prefill_chunk.unwrap_or(u64::MAX).clamp(1, self.context.max(1));
        PassSizes { batch: 1, sequence, past: self.context.saturating_sub(sequence), rows: 1 }
    }

    /// Whether any stage writes or reads a boundary in host memory.
    pub fn is_on_host(&self, boundary: BoundaryId) -> bool {
        self.stages.iter().any(|stage| {
            let reads = stage
                .inputs
                .iter()
                .any(|input| input.source == InputSource::Boundary(boundary) && input.port.memory == MemoryId::HOST);
            let writes =
                |output: &StageOutput| output.sink.boundary() == Some(boundary) && output.port.memory == MemoryId::HOST;
            reads || stage.outputs.iter().any(writes)
        })
    }

    /// Bytes of host memory that the states of one sequence take, without those on disk.
    pub fn host_state_bytes(&self) -> u64 {
        let on_host = self.layouts.iter().filter(|layout| layout.memory == MemoryId::HOST && !layout.on_disk);
        on_host.map(StateLayout::bytes).fold(0, u64::saturating_add)
    }

    /// Bytes of device memory that the states of one sequence take, of all devices together.
    pub fn device_state_bytes(&self) -> u64 {
        let on_device = self.layouts.iter().filter(|layout| layout.memory != MemoryId::HOST);
        on_device.map(StateLayout::bytes).fold(0, u64::saturating_add)
    }

    /// Bytes of disk that the states of one sequence take.
    pub fn disk_state_bytes(&self) -> u64 {
        self.layouts.iter().filter(|layout| layout.on_disk).map(StateLayout::bytes).fold(0, u64::saturating_add)
    }

    /// The states of a stage that lie on disk between its runs.
    pub fn disk_states(&self, stage: StageId) -> impl Iterator<Item = StateId> {
        self.stages[stage].states().filter(|state| self.layouts[*state].on_disk)
    }

    /// Bytes of host memory for states on disk, of all sequences together.
    pub fn state_window(&self) -> u64 {
        let of_stage = |(stage, _): (StageId, &Stage)| -> u64 {
            self.disk_states(stage).map(|state| self.layouts[state].bytes()).fold(0, u64::saturating_add)
        };
        state_window(self.stages.entries().map(of_stage).max().unwrap_or(0))
    }

    /// The stages that run in each phase, in the order of the schedule.
    pub fn run_order(&self, route: &Route) -> PerPhase<Vec<StageId>> {
        PerPhase::new(|phase| self.schedules[phase].partitions().map(|partition| route[phase][partition]).collect())
    }
}
