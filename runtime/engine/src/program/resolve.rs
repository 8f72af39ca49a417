//! Matches the plan's names with ids and with the ports of sessions.

use super::stage::{InputSource, OutputSink};
use crate::ids::{BoundaryId, Id, IndexVec, InputId, PartitionId, StateId};
use crate::port::Port;
use hpp_schema::{DType, OutputRole, OutputUse, Partition, PartitionVariant, Plan, State};

/// A partition output that is not a state.
pub(crate) struct BoundaryName<'a> {
    pub name: &'a str,
    pub producer: PartitionId,
}

/// The ids of everything that partitions name.
pub(crate) struct NameResolver<'a> {
    plan: &'a Plan,
    /// In the order of partitions and their outputs.
    pub boundaries: IndexVec<BoundaryId, BoundaryName<'a>>,
}

impl<'a> NameResolver<'a> {
    pub fn new(plan: &'a Plan) -> Self {
        let boundaries = plan.partitions.iter().enumerate().flat_map(|(index, partition)| {
            let values = partition.outputs.iter().filter(|output| output.to != OutputUse::State);
            values.map(move |output| BoundaryName { name: &output.name, producer: PartitionId::new(index) })
        });
        NameResolver { plan, boundaries: boundaries.collect() }
    }

    fn boundary(&self, name: &str, producer: PartitionId) -> Option<BoundaryId> {
        self.boundaries.position(|boundary| boundary.name == name && boundary.producer == producer)
    }

    fn state(&self, partition: &Partition, is: impl Fn(&State) -> bool) -> Option<StateId> {
        let index = self.plan.states.iter().position(|state| state.partition == partition.name && is(state));
        index.map(StateId::new)
    }

    /// The source of one input of a partition.
    pub fn input(&self, partition: &Partition, name: &str) -> Option<InputSource> {
        let input = partition.inputs.iter().find(|input| input.name == name)?;
        match input.from.as_str() {
            "model" => {
                let index = self.plan.model.inputs.iter().position(|other| other.name == name);
                index.map(|index| InputSource::ModelInput(InputId::new(index)))
            }
            "state" => self.state(partition, |state| state.past == name).map(InputSource::State),
            producer => {
                let producer = self.plan.partitions.iter().position(|other| other.name == producer)?;
                self.boundary(name, PartitionId::new(producer)).map(InputSource::Boundary)
            }
        }
    }

    /// The sink of one output of a partition; `None` if the plan does not mention the output.
    pub fn output(&self, id: PartitionId, name: &str) -> Option<OutputSink> {
        let partition = &self.plan.partitions[id.index()];
        let output = partition.outputs.iter().find(|output| output.name == name)?;
        if output.to == OutputUse::State {
            return self.state(partition, |state| state.present == name).map(OutputSink::State);
        }
        let boundary = self.boundary(name, id)?;
        let is_logits =
            self.plan.model.outputs.iter().any(|other| other.name == name && other.role == OutputRole::Logits);
        if output.to == OutputUse::Model && is_logits {
            return Some(OutputSink::Logits(boundary));
        }
        let inputs = self.plan.partitions.iter().flat_map(|other| &other.inputs);
        let is_read = inputs.into_iter().any(|input| input.from == partition.name && input.name == name);
        Some(if is_read { OutputSink::Boundary(boundary) } else { OutputSink::Unread(boundary) })
    }
}

/// A name in the plan and its element type.
type PlannedPort<'a> = (&'a str, DType);

/// A session's ports under the plan's names, in the session's order.
pub(crate) struct NamedPorts {
    pub inputs: Vec<Port>,
    pub outputs: Vec<Port>,
}

/// Matches a session's ports with the plan, or returns all mismatches.
///
/// In a class file, whose weights are inputs, names differ and positions count: inputs in the plan's order followed by the
/// weights, and outputs in the plan's order.
pub(crate) fn match_ports(
    partition: &Partition,
    variant: &PartitionVariant<'_>,
    inputs: &[Port],
    outputs: &[Port],
) -> Result<NamedPorts, Vec<String>> {
    let mut planned_inputs: Vec<PlannedPort> =
        partition.inputs.iter().map(|input| (&*input.name, input.dtype)).collect();
    let planned_outputs: Vec<PlannedPort> =
        partition.outputs.iter().map(|output| (&*output.name, output.dtype)).collect();
    let mut problems = Vec::new();
    let ports = if variant.weights.is_empty() {
        problems.extend(match_by_name("input", &planned_inputs, inputs));
        problems.extend(match_by_name("output", &planned_outputs, outputs));
        NamedPorts { inputs: inputs.to_vec(), outputs: outputs.to_vec() }
    } else {
        planned_inputs.extend(variant.weights.iter().map(|weight| (&*weight.name, weight.dtype)));
        problems.extend(match_by_position("input", &planned_inputs, inputs));
        problems.extend(match_by_position("output", &planned_outputs, outputs));
        NamedPorts { inputs: renamed(&planned_inputs, inputs), outputs: renamed(&planned_outputs, outputs) }
    };
    if problems.is_empty() { Ok(ports) } else { Err(problems) }
}

fn renamed(planned: &[PlannedPort], found: &[Port]) -> Vec<Port> {
    let rename = |((name, _), port): (&PlannedPort, &Port)| Port { name: (*name).to_owned(), ..port.clone() };
    planned.iter().zip(found).map(rename).collect()
}

fn match_by_position(what: &str, planned: &[PlannedPort], found: &[Port]) -> Vec<String> {
    if planned.len() != found.len() {
        return vec![format!("the file has {} {what}s, the plan says {}", found.len(), planned.len())];
    }
    let differs = |((name, dtype), port): (&PlannedPort, &Port)| {
        let text =
            || format!("{what} {name:?} is {} in the file, as {:?}, and {dtype} in the plan", port.dtype, port.name);
        (port.dtype != *dtype).then(text)
    };
    planned.iter().zip(found).filter_map(differs).collect()
}

fn match_by_name(what: &str, planned: &[PlannedPort], found: &[Port]) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, dtype) in planned {
        match found.iter().find(|port| port.name == *name) {
            None => problems.push(format!("the file has no {what} {name:?}")),
            Some(port) if port.dtype != *dtype => {
                problems.push(format!("{what} {name:?} is {} in the file and {dtype} in the plan", port.dtype));
            }
            Some(_) => {}
        }
    }
    // An output that the plan does not know is left unbound; an input that it does not feed makes a run impossible.
    if what == "input" {
        for port in found.iter().filter(|port| planned.iter().all(|(name, _)| *name != port.name)) {
            problems.push(format!("the file has an {what} {:?} that the plan does not know", port.name));
        }
    }
    problems
}
