//! How much host memory a model takes if its plan was made for a limit.

use hpp_engine::{host_memory_needed, least_host_memory_needed};
use hpp_schema::{ByteSize, Plan};

/// Divisor of a host memory limit that gives the usual part for KV pages.
pub const SHARE_OF_LIMIT: u64 = 20;

/// Bytes of host memory that `states` sequences need at least, without KV pages, if the engine keeps as few weights in memory as it can. `here`: the
/// plan as it runs on this machine, where the host computes partitions of missing GPUs. Their weights stay in memory only if the plan's limit holds
/// them.
pub fn least_beside_pages(plan: &Plan, here: &Plan, states: u64) -> u64 {
    let holds_all = plan.budgets.ram.is_none_or(|ram| host_memory_needed(here, states) <= ram.0);
    least_host_memory_needed(if holds_all { here } else { plan }, states)
}

/// Bytes of host memory that a model takes at most if it needs `needed` bytes, `pages` of them for KV pages, and its plan was made for `ram`. To keep
/// to this limit, the engine keeps fewer weights in memory and runs fewer sequences, but it needs `least` bytes beside the pages. If the limit has no
/// room for both, pages go beyond it, apart from their usual share: the estimates in plans are higher than what runs take.
pub fn within_plan(ram: Option<ByteSize>, needed: u64, least: u64, pages: u64) -> u64 {
    let Some(ByteSize(ram)) = ram else { return needed };
    let share = pages.min(ram / SHARE_OF_LIMIT);
    let without_room = least.saturating_sub(ram - share).min(share);
    needed.min(ram.max(least.saturating_add(pages - without_room)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_schema::Residency;

    fn plan() -> Plan {
        let plan = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/tests/plan.yaml"));
        Plan::from_yaml(plan).unwrap()
    }

    /// Of a limit of 400 bytes, 20 are the usual share of pages.
    #[test]
    fn pages_go_beyond_the_limit_only_where_the_rest_leaves_no_room() {
        let taken = |needed, least, pages| within_plan(Some(ByteSize(400)), needed, least, pages);
        assert_eq!(within_plan(None, 1000, 50, 900), 1000);
        // Fewer weights in memory make room.
        assert_eq!([taken(300, 100, 50), taken(450, 100, 50), taken(700, 100, 300)], [300, 400, 400]);
        // Weights that must stay leave room for a part of the pages.
        assert_eq!([taken(450, 350, 100), taken(650, 350, 300)], [450, 650]);
        // The usual share changes nothing, and more pages take only what they have beyond the room that the limit leaves.
        assert_eq!([taken(395, 395, 0), taken(415, 395, 20), taken(695, 395, 300)], [395, 400, 680]);
        assert_eq!(taken(430, 410, 20), 410);
        assert_eq!(within_plan(Some(ByteSize(0)), 100, 50, 10), 60);
        assert_eq!(within_plan(Some(ByteSize(400)), u64::MAX, u64::MAX, u64::MAX), u64::MAX);
    }

    #[test]
    fn weights_of_a_missing_gpu_can_be_read_from_disk_if_the_limit_does_not_hold_them() {
        let (mut plan, mut here) = (plan(), plan());
        let moved = here.partitions.first_mut().unwrap();
        (moved.device, moved.residency) = ("cpu".to_owned(), Residency::Resident);
        moved.bytes.weights.0 += 1 << 40;
        plan.budgets.ram = Some(ByteSize(1 << 39));
        assert!(host_memory_needed(&here, 1) > 1 << 40);
        assert_eq!(least_beside_pages(&plan, &here, 1), least_host_memory_needed(&plan, 1));
        plan.budgets.ram = Some(ByteSize(1 << 41));
        assert!(least_beside_pages(&plan, &here, 1) > 1 << 40);
    }
}
