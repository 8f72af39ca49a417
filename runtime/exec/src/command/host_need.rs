//! How much host memory a model takes if its plan was made for a limit.

use crate::runtime::memory_limit;
use hpp_engine::{WeightReads, holds_all_on_host, least_host_memory_needed};
use hpp_schema::{Plan, Residency};

/// The least host memory of a model beside its KV pages.
#[derive(Clone, Copy, Debug)]
pub struct HostNeed {
    /// Bytes of host memory that the plan was made for.
    pub planned: Option<u64>,
    /// Bytes that the engine keeps to: `planned`, or less where this process may use less.
    pub limit: Option<u64>,
    /// Bytes that one sequence and the plan's own draft need at least, if the engine keeps as few weights in memory as it can.
    pub least: u64,
}

impl HostNeed {
    /// The need of `plan` with `draft` bytes for its draft. `here`: the plan as it runs on this machine, with the context of this run and with
    /// partitions of missing GPUs on the host.
    pub fn new(plan: &Plan, here: &Plan, reads: WeightReads, draft: u64) -> Self {
        let planned = plan.budgets.ram.map(|ram| ram.0);
        let limit = planned.map(|planned| memory_limit().map_or(planned, |process| process.min(planned)));
        let reads_missing = reads != WeightReads::Mapped && limit.is_some_and(|limit| !holds_all_on_host(plan, limit));
        let read_from_disk = if reads_missing { weights_of_missing_gpus(plan, here) } else { 0 };
        let least = least_host_memory_needed(here, 1).saturating_sub(read_from_disk).saturating_add(draft);
        HostNeed { planned, limit, least }
    }

    /// Bytes of the limit that are left for KV pages; `None` without a limit.
    pub fn room_for_pages(&self) -> Option<u64> {
        self.limit.map(|limit| limit.saturating_sub(self.least))
    }

    /// Bytes of host memory that the model takes at most if it needs `needed` bytes, `pages` of them for KV pages. To keep to the limit, the engine
    /// keeps fewer weights in memory and runs fewer sequences.
    pub fn taken(&self, needed: u64, pages: u64) -> u64 {
        self.limit.map_or(needed, |limit| needed.min(limit.max(self.least.saturating_add(pages))))
    }
}

/// Bytes of weights of missing GPUs that need not stay in host memory: all but those of the largest partition, which a run needs at once.
fn weights_of_missing_gpus(plan: &Plan, here: &Plan) -> u64 {
    let pairs = plan.partitions.iter().zip(&here.partitions);
    let moved = pairs.filter(|(planned, here)| planned.device != here.device && here.residency == Residency::Resident);
    let weights: Vec<u64> = moved.map(|(_, here)| here.bytes.weights.0).collect();
    let all = weights.iter().copied().fold(0, u64::saturating_add);
    all.saturating_sub(weights.into_iter().max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_schema::ByteSize;

    fn plan() -> Plan {
        let plan = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/tests/plan.yaml"));
        Plan::from_yaml(plan).unwrap()
    }

    #[test]
    fn pages_go_beyond_the_limit_only_where_the_rest_leaves_no_room() {
        let need = |limit: Option<u64>, least: u64| HostNeed { planned: limit, limit, least };
        let taken = |needed, least, pages| need(Some(400), least).taken(needed, pages);
        assert_eq!(need(None, 50).taken(1000, 900), 1000);
        // Fewer weights in memory make room.
        assert_eq!([taken(300, 100, 50), taken(450, 100, 50), taken(700, 100, 300)], [300, 400, 400]);
        // Weights that must stay leave room for a part of the pages.
        assert_eq!([taken(395, 395, 0), taken(450, 350, 100), taken(650, 350, 300)], [395, 450, 650]);
        assert_eq!(taken(u64::MAX, u64::MAX, u64::MAX), u64::MAX);
    }

    #[test]
    fn pages_get_what_the_limit_leaves() {
        let room = |limit, least| HostNeed { planned: Some(1000), limit, least }.room_for_pages();
        assert_eq!([room(None, 5), room(Some(400), 300), room(Some(400), 500)], [None, Some(100), Some(0)]);
    }

    #[test]
    fn a_draft_needs_more_and_the_limit_of_the_process_counts() {
        let mut plan = plan();
        let least = |draft| HostNeed::new(&plan, &plan, WeightReads::default(), draft).least;
        assert_eq!(least(7), least(0) + 7);
        plan.budgets.ram = Some(ByteSize(u64::MAX / 2));
        let need = HostNeed::new(&plan, &plan, WeightReads::default(), 0);
        assert_eq!(need.planned, Some(u64::MAX / 2));
        assert_eq!(need.limit, memory_limit().or(need.planned));
    }

    #[test]
    fn weights_of_missing_gpus_are_read_from_disk_if_the_limit_does_not_hold_them() {
        let (mut plan, mut here) = (plan(), plan());
        for (planned, moved) in plan.partitions.iter_mut().zip(&mut here.partitions) {
            (planned.device, planned.bytes.weights) = ("gpu0".to_owned(), ByteSize(100 << 30));
            (moved.device, moved.residency) = ("cpu".to_owned(), Residency::Resident);
            moved.bytes.weights = ByteSize(100 << 30);
        }
        let mut least = |limit: u64, reads: WeightReads| {
            plan.budgets.ram = Some(ByteSize(limit));
            HostNeed::new(&plan, &here, reads, 0).least
        };
        let partitions = here.partitions.len() as u64;
        assert!(partitions > 1 && least_host_memory_needed(&here, 1) > partitions * (100 << 30));
        let from_disk = least_host_memory_needed(&here, 1) - (partitions - 1) * (100 << 30);
        assert_eq!(least(1 << 30, WeightReads::Prefetch), from_disk);
        assert_eq!(least(1 << 30, WeightReads::Mapped), least_host_memory_needed(&here, 1), "all stay in memory");
    }
}
