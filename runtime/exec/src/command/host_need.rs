//! How much host memory a model takes if its plan was made for a limit.

use hpp_engine::{host_memory_needed, least_host_memory_needed};
use hpp_schema::{ByteSize, Plan};

/// Bytes of host memory that `states` sequences need at least, without KV pages, if the engine keeps as few weights in memory as it can. `here`: the
/// plan as it runs on this machine, where the host computes partitions of missing GPUs. Their weights stay in memory only if the plan's limit holds
/// them.
pub fn least_beside_pages(plan: &Plan, here: &Plan, states: u64) -> u64 {
    let holds_all = plan.budgets.ram.is_none_or(|ram| host_memory_needed(here, states) <= ram.0);
    least_host_memory_needed(if holds_all { here } else { plan }, states)
}

/// Bytes of a plan's limit that are left for KV pages beside what the engine needs at least for one sequence and the plan's own draft; `None` without
/// a limit.
pub fn room_for_pages(plan: &Plan) -> Option<u64> {
    let draft = plan.draft.as_ref().map_or(0, |draft| draft.host_memory.0);
    let least = least_host_memory_needed(plan, 1).saturating_add(draft);
    plan.budgets.ram.map(|ram| ram.0.saturating_sub(least))
}

/// Bytes of host memory that a model takes at most if it needs `needed` bytes, `pages` of them for KV pages, and its plan was made for `ram`. To keep
/// to this limit, the engine keeps fewer weights in memory and runs fewer sequences, but it needs `least` bytes beside the pages.
pub fn within_plan(ram: Option<ByteSize>, needed: u64, least: u64, pages: u64) -> u64 {
    ram.map_or(needed, |ram| needed.min(ram.0.max(least.saturating_add(pages))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_schema::Residency;

    fn plan() -> Plan {
        let plan = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/tests/plan.yaml"));
        Plan::from_yaml(plan).unwrap()
    }

    #[test]
    fn pages_go_beyond_the_limit_only_where_the_rest_leaves_no_room() {
        let taken = |needed, least, pages| within_plan(Some(ByteSize(400)), needed, least, pages);
        assert_eq!(within_plan(None, 1000, 50, 900), 1000);
        // Fewer weights in memory make room.
        assert_eq!([taken(300, 100, 50), taken(450, 100, 50), taken(700, 100, 300)], [300, 400, 400]);
        // Weights that must stay leave room for a part of the pages.
        assert_eq!([taken(395, 395, 0), taken(450, 350, 100), taken(650, 350, 300)], [395, 450, 650]);
        assert_eq!(taken(u64::MAX, u64::MAX, u64::MAX), u64::MAX);
    }

    #[test]
    fn pages_get_what_the_limit_leaves() {
        let mut plan = plan();
        plan.budgets.ram = None;
        assert_eq!(room_for_pages(&plan), None);
        let least = least_host_memory_needed(&plan, 1);
        plan.budgets.ram = Some(ByteSize(least + 100));
        assert_eq!(room_for_pages(&plan), Some(100));
        plan.budgets.ram = Some(ByteSize(least - 1));
        assert_eq!(room_for_pages(&plan), Some(0));
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
