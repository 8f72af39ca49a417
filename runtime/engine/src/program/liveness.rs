//! Liveness of boundaries: boundaries that are never live at the same time share buffers (linear-scan allocation). Runs of a group may compute at
//! the same time, so what one of them reads or writes is live as long as the group runs.

use super::schedule::Schedule;
use super::stage::{InputSource, OutputSink, Stage};
use crate::ids::{BoundaryId, Id, IndexVec, PartitionId, StageId};
use crate::telemetry::{PerPhase, Phase};

/// The steps of a schedule from a boundary's producer to its last reader.
#[derive(Clone, Copy, Debug)]
struct Lifetime {
    first: usize,
    last: usize,
}

/// For each of `count` boundaries the index of its buffers. Boundaries have one index only if the last reader of one runs before the
/// producer of the other. Where the phases run partitions in different orders, each boundary has an index of its own.
pub(crate) fn share_buffers(
    stages: &IndexVec<StageId, Stage>,
    schedules: &PerPhase<Schedule>,
    count: usize,
) -> IndexVec<BoundaryId, usize> {
    let [prefill, decode] =
        [Phase::Prefill, Phase::Decode].map(|phase| schedules[phase].partitions().collect::<Vec<PartitionId>>());
    if prefill != decode {
        return (0..count).collect();
    }
    let lifetimes = lifetimes(stages, &prefill, &group_lifetimes(schedules), count);
    assign(&lifetimes).into_iter().collect()
}

/// For each run the first and the last run of its group, in whichever phase that is longer. Both phases have as many runs.
fn group_lifetimes(schedules: &PerPhase<Schedule>) -> Vec<Lifetime> {
    let of_phase = |phase: Phase| {
        let groups = schedules[phase].groups.iter();
        groups.flat_map(|group| group.clone().map(|_| Lifetime { first: group.start, last: group.end - 1 }))
    };
    let longer = |(one, other): (Lifetime, Lifetime)| Lifetime {
        first: one.first.min(other.first),
        last: one.last.max(other.last),
    };
    of_phase(Phase::Prefill).zip(of_phase(Phase::Decode)).map(longer).collect()
}

/// `runs` has the steps in which each run of `order` may compute. A boundary without a producer in the schedule lives always.
fn lifetimes(
    stages: &IndexVec<StageId, Stage>,
    order: &[PartitionId],
    runs: &[Lifetime],
    count: usize,
) -> Vec<Lifetime> {
    let mut lifetimes: Vec<Option<Lifetime>> = vec![None; count];
    let mut extend = |boundary: BoundaryId, first: usize, last: usize| {
        let lifetime = lifetimes[boundary.index()].get_or_insert(Lifetime { first, last });
        *lifetime = Lifetime { first: lifetime.first.min(first), last: lifetime.last.max(last) };
    };
    for stage in stages.iter() {
        let step = order.iter().position(|partition| *partition == stage.partition);
        let (first, last) = step.map_or((0, usize::MAX), |step| (runs[step].first, runs[step].last));
        for output in &stage.outputs {
            let last = if matches!(output.sink, OutputSink::Logits(_)) { usize::MAX } else { last };
            output.sink.boundary().into_iter().for_each(|boundary| extend(boundary, first, last));
        }
        for input in &stage.inputs {
            if let InputSource::Boundary(boundary) = input.source {
                extend(boundary, first, last);
            }
        }
    }
    lifetimes.into_iter().map(|lifetime| lifetime.unwrap_or(Lifetime { first: 0, last: usize::MAX })).collect()
}

/// Gives each lifetime the lowest index that is free from its first step on.
fn assign(lifetimes: &[Lifetime]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lifetimes.len()).collect();
    order.sort_by_key(|index| lifetimes[*index].first);
    // The last step in which each index is taken.
    let mut taken: Vec<usize> = Vec::new();
    let mut assigned = vec![0; lifetimes.len()];
    for index in order {
        let Lifetime { first, last } = lifetimes[index];
        let slot = taken.iter().position(|taken| *taken < first).unwrap_or_else(|| {
            taken.push(0);
            taken.len() - 1
        });
        taken[slot] = last;
        assigned[index] = slot;
    }
    assigned
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lifetime((first, length): (usize, usize)) -> Lifetime {
        Lifetime { first, last: first + length }
    }

    #[test]
    fn a_chain_needs_two_buffers_and_what_is_read_at_the_end_a_third() {
        let chain: Vec<Lifetime> = (0..9).map(|step| lifetime((step, 1))).collect();
        assert_eq!(assign(&chain), [0, 1, 0, 1, 0, 1, 0, 1, 0]);
        let mut with_mask = vec![Lifetime { first: 0, last: usize::MAX }];
        with_mask.extend(chain);
        assert_eq!(assign(&with_mask), [0, 1, 2, 1, 2, 1, 2, 1, 2, 1]);
    }

    proptest! {
        #[test]
        fn no_two_boundaries_of_one_index_live_at_the_same_time(
            lifetimes in prop::collection::vec((0usize..20, 0usize..8), 0..30)
        ) {
            let lifetimes: Vec<Lifetime> = lifetimes.into_iter().map(lifetime).collect();
            let assigned = assign(&lifetimes);
            for (index, one) in lifetimes.iter().enumerate() {
                for (other, another) in lifetimes.iter().enumerate().skip(index + 1) {
                    let apart = one.last < another.first || another.last < one.first;
                    prop_assert!(apart || assigned[index] != assigned[other]);
                }
            }
        }
    }
}
