//! The plan's schedules with names resolved to ids.

use super::resolve::NameResolver;
use super::stage::{InputSource, Stage};
use crate::ids::{BoundaryId, Id, IndexVec, PartitionId, StageId};
use crate::port::MemoryId;
use hpp_schema::{Plan, Step};

/// One step of a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ScheduledOp {
    /// Run a partition, in the variant that the runtime's route gives for the phase.
    Run(PartitionId),
    /// Copy boundaries to the memories of the stages that will read them.
    Copy(Vec<BoundaryCopy>),
}

/// A boundary and the memories it is copied to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BoundaryCopy {
    pub boundary: BoundaryId,
    pub memories: Vec<MemoryId>,
}

/// Resolves a schedule. `route` has the stage of each partition in the schedule's phase. The plan is checked: every name exists.
pub(crate) fn resolve(
    plan: &Plan,
    names: &NameResolver<'_>,
    stages: &IndexVec<StageId, Stage>,
    route: &IndexVec<PartitionId, StageId>,
    steps: &[Step],
) -> Vec<ScheduledOp> {
    let mut ops = Vec::with_capacity(steps.len());
    for step in steps {
        match step {
            Step::Run(name) => {
                let partition = plan.partitions.iter().position(|partition| partition.name == *name);
                ops.extend(partition.map(|index| ScheduledOp::Run(PartitionId::new(index))));
            }
            Step::Copy(copy) => {
                let readers: Vec<&Stage> =
                    route.iter().map(|stage| &stages[*stage]).filter(|stage| stage.device == copy.to).collect();
                let copied = names.boundaries.entries().filter(|(_, boundary)| {
                    copy.values.iter().any(|value| value == boundary.name)
                        && stages[route[boundary.producer]].device == copy.from
                });
                let copies =
                    copied.map(|(boundary, _)| BoundaryCopy { boundary, memories: read_in(boundary, &readers) });
                ops.push(ScheduledOp::Copy(copies.collect()));
            }
        }
    }
    ops
}

/// The memories in which stages read a boundary.
fn read_in(boundary: BoundaryId, readers: &[&Stage]) -> Vec<MemoryId> {
    let inputs = readers.iter().flat_map(|stage| &stage.inputs);
    let reads = inputs.filter(|input| input.source == InputSource::Boundary(boundary));
    let mut memories: Vec<MemoryId> = reads.map(|input| input.port.memory).collect();
    memories.sort_unstable();
    memories.dedup();
    memories
}
