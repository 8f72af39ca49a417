//! Stages: partitions loaded and ready, every input and output resolved to what the engine binds there.

use crate::area::Key;
use crate::error::BackendError;
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
pub(crate) struct Stage<B: Backend> {
    pub name: String,
    pub session: B::Session,
    /// In the session's order.
    pub inputs: Vec<(From, MemoryId)>,
    /// In the session's order.
    pub outputs: Vec<To>,
}

/// What one sequence has bound at one stage.
pub(crate) struct Bound<B: Backend> {
    pub binding: <B::Session as Session>::Binding,
    pub inputs: Vec<Option<Key>>,
    pub outputs: Vec<Option<Key>>,
}

impl<B: Backend> Bound<B> {
    pub fn new(stage: &Stage<B>) -> Result<Self, BackendError> {
        Ok(Bound {
            binding: stage.session.binding()?,
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

/// Differences between a session and what the plan says of it.
pub(crate) fn differences(partition: &Partition, inputs: &[Port], outputs: &[Port]) -> Vec<String> {
    let said_in = partition.inputs.iter().map(|input| (input.name.as_str(), input.dtype)).collect::<Vec<_>>();
    let said_out = partition.outputs.iter().map(|output| (output.name.as_str(), output.dtype)).collect::<Vec<_>>();
    let mut problems = side("input", &said_in, inputs);
    problems.extend(side("output", &said_out, outputs));
    problems
}

fn side(what: &str, said: &[(&str, hpp_schema::DType)], found: &[Port]) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, dtype) in said {
        match found.iter().find(|port| port.name == *name) {
            None => problems.push(format!("the file has no {what} {name:?}")),
            Some(port) if port.dtype != *dtype => {
                problems.push(format!("{what} {name:?} is {} in the file and {dtype} in the plan", port.dtype));
            }
            Some(_) => {}
        }
    }
    // An output nobody knows is left unbound; an input nobody feeds cannot run.
    if what == "input" {
        for port in found.iter().filter(|port| said.iter().all(|(name, _)| *name != port.name)) {
            problems.push(format!("the file has an {what} {:?} that the plan does not know", port.name));
        }
    }
    problems
}

/// A schedule by number; partitions and values it names are known to exist.
pub(crate) fn acts<B: Backend>(plan: &Plan, names: &Names<'_>, stages: &[Stage<B>], steps: &[Step]) -> Vec<Act> {
    let number = |name: &str| plan.partitions.iter().position(|partition| partition.name == name);
    let act = |step: &Step| match step {
        Step::Run(name) => number(name).map(Act::Run),
        Step::Copy(copy) => {
            let moves = names.boundaries.iter().enumerate().filter(|(_, (name, at))| {
                copy.values.iter().any(|value| value == name) && plan.partitions[*at].device == copy.from
            });
            let moves = moves.map(|(value, _)| {
                let readers = stages.iter().zip(&plan.partitions).filter(|(_, p)| p.device == copy.to);
                let mut memories: Vec<MemoryId> = readers
                    .flat_map(|(stage, _)| &stage.inputs)
                    .filter(|(from, _)| *from == From::Boundary(value))
                    .map(|(_, memory)| *memory)
                    .collect();
                memories.sort_unstable();
                memories.dedup();
                (value, memories)
            });
            Some(Act::Copy(moves.collect()))
        }
    };
    steps.iter().filter_map(act).collect()
}
