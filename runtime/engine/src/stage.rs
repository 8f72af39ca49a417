//! Stages: partitions loaded and ready, every input and output resolved to what the engine binds there.
//!
//! A partition that computes otherwise while the prompt is taken in is two stages. Stages whose weights are inputs of their
//! file may share a session.

use crate::area::Key;
use crate::error::{BackendError, EngineError};
use crate::port::{Backend, MemoryId, Port, Session};
use hpp_schema::{OutputRole, OutputUse, Partition, Plan, Step};

/// Where an input's value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    /// Model input number.
    Feed(usize),
    /// State number.
    State(usize),
    /// Boundary number.
    Boundary(usize),
    /// Weight number, among the stage's weights that are inputs.
    Weight(usize),
}

/// Where an output's value goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    /// The next-token scores: also a boundary number, so that taps and later partitions can read it.
    Logits(usize),
    /// State number.
    State(usize),
    /// Boundary number.
    Boundary(usize),
    /// An output that no step reads; a boundary number for when it is tapped.
    Spare(usize),
    /// An output the plan does not mention; never bound.
    Unknown,
}

/// A partition loaded and ready.
pub(crate) struct Stage {
    pub name: String,
    /// Its number in the plan.
    pub partition: usize,
    /// The plan's device.
    pub device: String,
    /// Number of its session.
    pub session: usize,
    /// In the session's order.
    pub inputs: Vec<Entrance>,
    /// In the session's order.
    pub outputs: Vec<Exit>,
}

/// An input of a stage.
#[derive(Clone, Debug)]
pub(crate) struct Entrance {
    /// The session's, under the plan's name.
    pub port: Port,
    pub from: From,
}

/// An output of a stage.
#[derive(Clone, Debug)]
pub(crate) struct Exit {
    /// The session's, under the plan's name.
    pub port: Port,
    pub to: To,
}

impl Stage {
    /// Names the partition an error comes from.
    pub fn failed(&self, doing: &str, source: BackendError) -> EngineError {
        match source {
            BackendError::Stopped => EngineError::Cancelled,
            source => EngineError::Run { partition: self.name.clone(), doing: doing.to_owned(), source },
        }
    }

    /// The memory in which it computes on this state, if it does.
    pub fn memory_of_state(&self, number: usize) -> Option<MemoryId> {
        let own = |entrance: &&Entrance| entrance.from == From::State(number);
        self.inputs.iter().find(own).map(|entrance| entrance.port.memory)
    }

    /// Its states.
    pub fn states(&self) -> impl Iterator<Item = usize> {
        self.inputs.iter().filter_map(|entrance| match entrance.from {
            From::State(number) => Some(number),
            _ => None,
        })
    }
}

/// What one sequence has bound at one stage.
pub(crate) struct Bound<B: Backend> {
    pub binding: <B::Session as Session>::Binding,
    pub inputs: Vec<Option<Key>>,
    pub outputs: Vec<Option<Key>>,
}

impl<B: Backend> Bound<B> {
    pub fn new(stage: &Stage, session: &B::Session) -> Result<Self, BackendError> {
        Ok(Bound {
            binding: session.binding()?,
            inputs: vec![None; stage.inputs.len()],
            outputs: vec![None; stage.outputs.len()],
        })
    }
}

/// One step of a schedule, by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// Run a stage.
    Run(usize),
    /// Make a boundary present in the memories of the stages that will read it.
    Copy(Vec<(usize, Vec<MemoryId>)>),
}

/// Numbers of everything that partitions name.
pub(crate) struct Names<'a> {
    plan: &'a Plan,
    /// Every partition output that is not a state, in order: its name and producer.
    pub boundaries: Vec<(&'a str, usize)>,
}

impl<'a> Names<'a> {
    pub fn of(plan: &'a Plan) -> Self {
        let boundaries = plan.partitions.iter().enumerate().flat_map(|(at, partition)| {
            let values = partition.outputs.iter().filter(|output| output.to != OutputUse::State);
            values.map(move |output| (output.name.as_str(), at))
        });
        Names { plan, boundaries: boundaries.collect() }
    }

    fn boundary(&self, name: &str, producer: usize) -> Option<usize> {
        self.boundaries.iter().position(|(other, at)| *other == name && *at == producer)
    }

    fn state(&self, partition: &Partition, is: impl Fn(&hpp_schema::State) -> bool) -> Option<usize> {
        self.plan.states.iter().position(|state| state.partition == partition.name && is(state))
    }

    /// Resolves one input of a partition.
    pub fn input(&self, partition: &Partition, name: &str) -> Option<From> {
        let input = partition.inputs.iter().find(|input| input.name == name)?;
        match input.from.as_str() {
            "model" => self.plan.model.inputs.iter().position(|other| other.name == name).map(From::Feed),
            "state" => self.state(partition, |state| state.past == name).map(From::State),
            producer => {
                let at = self.plan.partitions.iter().position(|other| other.name == producer)?;
                self.boundary(name, at).map(From::Boundary)
            }
        }
    }

    /// Resolves one output of a partition.
    pub fn output(&self, partition: &Partition, at: usize, name: &str) -> Option<To> {
        let output = partition.outputs.iter().find(|output| output.name == name)?;
        if output.to == OutputUse::State {
            return self.state(partition, |state| state.present == name).map(To::State);
        }
        let number = self.boundary(name, at)?;
        let is_logits =
            self.plan.model.outputs.iter().any(|other| other.name == name && other.role == OutputRole::Logits);
        let is_read = || {
            let reads = |input: &hpp_schema::PartitionInput| input.from == partition.name && input.name == name;
            self.plan.partitions.iter().any(|other| other.inputs.iter().any(reads))
        };
        Some(if output.to == OutputUse::Model && is_logits {
            To::Logits(number)
        } else if is_read() {
            To::Boundary(number)
        } else {
            To::Spare(number)
        })
    }
}

/// A schedule by number, with the stage each partition has in its phase; partitions and values it names are known to exist.
pub(crate) fn acts(plan: &Plan, names: &Names<'_>, stages: &[Stage], own: &[usize], steps: &[Step]) -> Vec<Act> {
    let number = |name: &str| plan.partitions.iter().position(|partition| partition.name == name);
    let act = |step: &Step| match step {
        Step::Run(name) => number(name).map(|partition| Act::Run(own[partition])),
        Step::Copy(copy) => {
            let moves = names.boundaries.iter().enumerate().filter(|(_, (name, at))| {
                copy.values.iter().any(|value| value == name) && stages[own[*at]].device == copy.from
            });
            let moves = moves.map(|(value, _)| {
                let readers = own.iter().map(|stage| &stages[*stage]).filter(|stage| stage.device == copy.to);
                let reads = readers.flat_map(|stage| &stage.inputs).filter(|input| input.from == From::Boundary(value));
                let mut memories: Vec<MemoryId> = reads.map(|input| input.port.memory).collect();
                memories.sort_unstable();
                memories.dedup();
                (value, memories)
            });
            Some(Act::Copy(moves.collect()))
        }
    };
    steps.iter().filter_map(act).collect()
}
