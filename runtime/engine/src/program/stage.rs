//! Stages: partitions loaded in one of their variants, with every input and output resolved to what the engine binds there.
//!
//! A partition that computes differently in prefill and decode is two stages. Stages whose weights are inputs may share a session.

use crate::error::{BackendError, EngineError};
use crate::ids::{BoundaryId, InputId, PartitionId, SessionId, StateId};
use crate::port::{MemoryId, Port};
use hpp_schema::SelectedBy;

/// Where an input's value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InputSource {
    /// A model input.
    ModelInput(InputId),
    State(StateId),
    Boundary(BoundaryId),
    /// A weight, by its index among the stage's weights that are inputs.
    Weight(usize),
}

/// Where an output's value goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputSink {
    /// The next-token logits; also a boundary, so that taps and later partitions can read it.
    Logits(BoundaryId),
    State(StateId),
    Boundary(BoundaryId),
    /// An output that no step reads; bound only while it is tapped.
    Unread(BoundaryId),
    /// An output that the plan does not mention; never bound.
    Unknown,
}

impl OutputSink {
    /// The boundary that holds the value, if one does.
    pub fn boundary(self) -> Option<BoundaryId> {
        match self {
            OutputSink::Logits(id) | OutputSink::Boundary(id) | OutputSink::Unread(id) => Some(id),
            OutputSink::State(_) | OutputSink::Unknown => None,
        }
    }
}

/// A partition loaded in one variant.
#[derive(Debug)]
pub(crate) struct Stage {
    /// The partition's name.
    pub name: String,
    pub partition: PartitionId,
    /// The plan's device.
    pub device: String,
    pub session: SessionId,
    /// In the session's order.
    pub inputs: Vec<StageInput>,
    /// In the session's order.
    pub outputs: Vec<StageOutput>,
    /// How its tokens select experts, if it begins with a mixture whose experts are fetched by demand.
    pub routing: Option<Routing>,
}

/// How tokens select experts of a mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Routing {
    /// The router's numbers: a row of `count` for each token.
    pub router: BoundaryId,
    /// How many experts there are.
    pub count: usize,
    /// How many of them each token selects.
    pub active: usize,
    /// How the router's numbers select them.
    pub selected_by: SelectedBy,
    /// Which experts a later partition probably selects.
    pub next: Option<NextRouting>,
}

/// A prediction of the logits of a later partition's router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NextRouting {
    /// The later partition.
    pub partition: PartitionId,
    /// The predicted logits: a row for each token, with a number for each of the later partition's experts.
    pub router: BoundaryId,
}

/// An input of a stage.
#[derive(Clone, Debug)]
pub(crate) struct StageInput {
    /// The session's, under the plan's name.
    pub port: Port,
    pub source: InputSource,
}

/// An output of a stage.
#[derive(Clone, Debug)]
pub(crate) struct StageOutput {
    /// The session's, under the plan's name.
    pub port: Port,
    pub sink: OutputSink,
}

impl Stage {
    /// Adds the partition's name and the operation to a backend error.
    pub fn failed(&self, doing: &str, source: BackendError) -> EngineError {
        match source {
            BackendError::Stopped => EngineError::Cancelled,
            source => EngineError::Run { partition: self.name.clone(), doing: doing.to_owned(), source },
        }
    }

    /// The memory in which this stage updates a state, if it does.
    pub fn memory_of_state(&self, state: StateId) -> Option<MemoryId> {
        let input = self.inputs.iter().find(|input| input.source == InputSource::State(state));
        input.map(|input| input.port.memory)
    }

    /// Its states.
    pub fn states(&self) -> impl Iterator<Item = StateId> {
        self.inputs.iter().filter_map(|input| match input.source {
            InputSource::State(state) => Some(state),
            _ => None,
        })
    }

    /// The memory of the device it runs on: another than the host's if any of its inputs and outputs lies there.
    pub fn memory(&self) -> MemoryId {
        let inputs = self.inputs.iter().map(|input| input.port.memory);
        let mut memories = inputs.chain(self.outputs.iter().map(|output| output.port.memory));
        memories.find(|memory| *memory != MemoryId::HOST).unwrap_or(MemoryId::HOST)
    }

    /// The memory of its weights that are inputs: another than the host's if any lies there. `None` where all weights are constants.
    pub fn weight_memory(&self) -> Option<MemoryId> {
        let memories = || self.weight_memories().map(|(_, memory)| memory);
        memories().find(|memory| *memory != MemoryId::HOST).or_else(|| memories().next())
    }

    /// Each weight that is an input, by its index, and the memory in which the session wants it.
    pub fn weight_memories(&self) -> impl Iterator<Item = (usize, MemoryId)> {
        self.inputs.iter().filter_map(|input| match input.source {
            InputSource::Weight(index) => Some((index, input.port.memory)),
            _ => None,
        })
    }
}
