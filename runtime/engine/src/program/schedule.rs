//! The plan's schedules with names resolved to ids.

use super::resolve::NameResolver;
use super::stage::{InputSource, Stage};
use crate::ids::{BoundaryId, Id, IndexVec, PartitionId, StageId};
use crate::port::MemoryId;
use hpp_schema::{Plan, Step};
use std::ops::Range;

/// The order in which a pass runs partitions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Schedule {
    pub runs: Vec<ScheduledRun>,
    /// Divides `runs` into groups of adjacent runs. Runs of a group read nothing of each other, so on different devices they may compute at the
    /// same time.
    pub groups: Vec<Range<usize>>,
    /// Copies after the last run.
    pub final_copies: Vec<BoundaryCopy>,
}

/// A partition, run in the variant that the runtime's route gives for the phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScheduledRun {
    pub partition: PartitionId,
    /// Copies before it, to the memories of the stages that will read them.
    pub copies: Vec<BoundaryCopy>,
}

impl Schedule {
    /// The partitions in order.
    pub fn partitions(&self) -> impl Iterator<Item = PartitionId> {
        self.runs.iter().map(|run| run.partition)
    }
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
) -> Schedule {
    let (mut runs, mut copies) = (Vec::with_capacity(steps.len()), Vec::new());
    for step in steps {
        match step {
            Step::Run(name) => {
                let partition = plan.partitions.iter().position(|partition| partition.name == *name);
                let partition = partition.map(PartitionId::new);
                runs.extend(partition.map(|partition| ScheduledRun { partition, copies: std::mem::take(&mut copies) }));
            }
            Step::Copy(copy) => {
                let readers: Vec<&Stage> =
                    route.iter().map(|stage| &stages[*stage]).filter(|stage| stage.device == copy.to).collect();
                let copied = names.boundaries.entries().filter(|(_, boundary)| {
                    copy.values.iter().any(|value| value == boundary.name)
                        && stages[route[boundary.producer]].device == copy.from
                });
                copies.extend(
                    copied.map(|(boundary, _)| BoundaryCopy { boundary, memories: read_in(boundary, &readers) }),
                );
            }
        }
    }
    let groups = independent_groups(names, stages, route, &runs);
    Schedule { runs, groups, final_copies: copies }
}

/// Groups of adjacent runs, as long as possible from the first run on, none of which reads or copies what another of its group produces.
fn independent_groups(
    names: &NameResolver<'_>,
    stages: &IndexVec<StageId, Stage>,
    route: &IndexVec<PartitionId, StageId>,
    runs: &[ScheduledRun],
) -> Vec<Range<usize>> {
    let needs = |run: &ScheduledRun, earlier: &[ScheduledRun]| {
        let read = stages[route[run.partition]].inputs.iter().filter_map(|input| match input.source {
            InputSource::Boundary(boundary) => Some(boundary),
            _ => None,
        });
        let mut boundaries = read.chain(run.copies.iter().map(|copy| copy.boundary));
        boundaries.any(|boundary| earlier.iter().any(|other| other.partition == names.boundaries[boundary].producer))
    };
    let mut groups: Vec<Range<usize>> = Vec::new();
    for (at, run) in runs.iter().enumerate() {
        match groups.last_mut() {
            Some(group) if !needs(run, &runs[group.clone()]) => group.end = at + 1,
            _ => groups.push(at..at + 1),
        }
    }
    groups
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
