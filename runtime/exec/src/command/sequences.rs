//! The number of sequences that run at once on an engine.

use crate::console::Console;
use crate::numbers::counted;
use crate::runtime::{OrtBackend, available_memory};
use hpp_engine::Engine;
use hpp_schema::Plan;

/// The part of the free memory that states may take if the plan has no limit.
const STATES_SHARE: f64 = 0.75;

/// The plan's number of sequences. A plan without measurements may underestimate it, so it is at least `assumed` then. With experts read by demand
/// such a plan may overestimate it instead, because sequences evict each other's experts; then the plan's number stays.
pub fn planned_sequences(plan: &Plan, assumed: u64) -> u64 {
    let predictions = &plan.predictions;
    let reads_experts = plan.devices.iter().any(|device| device.expert_cache.is_some());
    let least = if predictions.is_static() && !reads_experts { assumed } else { 1 };
    predictions.throughput.as_ref().map_or(assumed, |throughput| throughput.sequences.max(least))
}

/// How many of the `wanted` sequences fit into memory. `is_asked`: the user gave the number, and is warned if fewer fit.
pub fn fitting_sequences(engine: &Engine<OrtBackend>, wanted: u64, is_asked: bool, console: &Console) -> usize {
    let has_limit = engine.plan().budgets.ram.is_some();
    let free = available_memory().filter(|_| !has_limit).map(|free| (free as f64 * STATES_SHARE) as u64);
    let in_memory = free.and_then(|free| free.checked_div(engine.host_state_bytes())).unwrap_or(wanted);
    let sequences = engine.max_sequences().min(in_memory).clamp(1, wanted.max(1));
    let planned =
        engine.plan().predictions.throughput.as_ref().map_or(0, |throughput| throughput.sequences).min(wanted);
    if !is_asked && sequences < planned {
        console.info(&format!(
            "note: memory has room for {} at once beside what this process takes already (in a server also KV pages, --kv-ram), and the plan expects {planned}; a shorter --context or more --ram makes room for more",
            counted(sequences, "sequence")
        ));
    }
    if is_asked && sequences < wanted {
        let fitting = counted(sequences, "sequence");
        let disk = match engine.host_state_bytes() > 0 && cfg!(target_os = "linux") {
            true => ", and so does a plan with KV caches on disk (hpp-split --kv disk)",
            false => "",
        };
        console.warn(&format!(
            "memory has room for {fitting} at once, and any more wait; a shorter --context makes room for more{disk}"
        ));
    }
    usize::try_from(sequences).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_schema::ByteSize;

    #[test]
    fn more_sequences_than_planned_run_only_where_they_cannot_evict_each_other_s_experts() {
        let plan = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/tests/plan.yaml"));
        let mut plan = Plan::from_yaml(plan).unwrap();
        plan.predictions.source = "static".to_owned();
        plan.predictions.throughput.get_or_insert_default().sequences = 2;
        assert_eq!(planned_sequences(&plan, 16), 16);
        plan.devices[0].expert_cache = Some(ByteSize(1 << 20));
        assert_eq!(planned_sequences(&plan, 16), 2);
        plan.predictions.source = "profile.yaml".to_owned();
        plan.devices[0].expert_cache = None;
        assert_eq!(planned_sequences(&plan, 16), 2);
    }
}
