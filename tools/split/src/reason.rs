//! The `reason` of each partition in a plan: one line on why it is on its device.

use crate::amount::{self, MEASURED};
use crate::partitioning::{DecidedBy, Partitioning};
use crate::request::PlanningRequest;
use crate::{split_mode, table};
use hpp_model::{DiskStreaming, PartitionSpec};
use hpp_partition::{
    Alternative, BlockPlacement, BlockRole, BlockSpec, Demand, DeviceId, Objective, Placement, RunExplanation,
    explain_runs,
};
use hpp_schema::ByteSize;

/// Why blocks are where the user places them.
const MANUALLY: &str = "placed manually";

/// Why blocks are beside blocks that the user places.
const BY_PLANNER: &str = "placed there by the planner";

/// Why blocks that `--assign` does not name are on the CPU.
const WITHOUT_VRAM: &str = "on the CPU without --vram";

/// One reason for each partition, in order. Adjacent partitions on one device are moved together in the comparison with
/// other devices, and share its result.
pub fn reasons(request: &PlanningRequest, partitioning: &Partitioning) -> Vec<String> {
    if partitioning.decided_by == DecidedBy::User {
        let others = if only_named_leave_host(request, partitioning) { WITHOUT_VRAM } else { MANUALLY };
        let reason = |partition: &PartitionSpec| {
            let asked = kept_on_host(request, partition, others).or_else(|| assigned(request, partition, others));
            asked.unwrap_or_else(|| others.to_owned())
        };
        return partitioning.partitions.iter().map(reason).collect();
    }
    let disk = partitioning.disk_streaming(request);
    if request.divides_rows {
        return partitioning.partitions.iter().map(|partition| beside_shards(request, partition)).collect();
    }
    if request.problem.gpus.is_empty() {
        return partitioning
            .partitions
            .iter()
            .map(|partition| without_gpus(request, partition, disk.as_ref()))
            .collect();
    }
    // Count the launch of each partition, as the predicted time does.
    let cuts = |placements: &[BlockPlacement]| partitioning.cuts_for(request, placements);
    let runs = explain_runs(&partitioning.problem(request), &request.options, &partitioning.solution, &cuts);
    let run_of = |partition: &PartitionSpec| runs.iter().find(|run| run.blocks.contains(&partition.blocks.start));
    let sharing = |run: &RunExplanation| {
        partitioning.partitions.iter().filter(|partition| run.blocks.contains(&partition.blocks.start)).count()
    };
    partitioning
        .partitions
        .iter()
        .map(|partition| {
            let of_run = || run_of(partition).map(|run| reason(request, partitioning, run, sharing(run)));
            let asked =
                || kept_on_host(request, partition, BY_PLANNER).or_else(|| assigned(request, partition, BY_PLANNER));
            let reason = asked().or_else(of_run).unwrap_or_default();
            match (&disk, partition.placement.decode) {
                (Some(disk), Placement::Cpu) => beside_disk(reason, request, partition, disk),
                _ => reason,
            }
        })
        .collect()
}

/// Whether `--assign` names blocks, and all others are on the CPU because no `--vram` allows the planner another place.
fn only_named_leave_host(request: &PlanningRequest, partitioning: &Partitioning) -> bool {
    let mut placed = request.problem.blocks.iter().zip(&partitioning.solution.placements);
    let is_by_hand = placed.clone().any(|(block, _)| block.assigned.is_some());
    let on_host = BlockPlacement::both(Placement::Cpu);
    let are_others_on_host = placed.all(|(block, placement)| block.assigned.is_some() || *placement == on_host);
    is_by_hand && are_others_on_host && request.recorded_budgets.vram.is_empty()
}

/// The reason of a partition on the host in a plan that reads weights from disk.
fn beside_disk(reason: String, request: &PlanningRequest, partition: &PartitionSpec, disk: &DiskStreaming) -> String {
    match partition.blocks.clone().all(|block| disk.is_table[block]) {
        true => TABLE.to_owned(),
        false if disk.holds_all() => reason,
        false => format!("{reason}; {}", from_disk(&request.problem.blocks[partition.blocks.clone()], disk)),
    }
}

/// The reason for a partition with experts that `--cpu-moe` or `--n-cpu-moe` keeps on the host; `others` says why its other blocks are there.
fn kept_on_host(request: &PlanningRequest, partition: &PartitionSpec, others: &str) -> Option<String> {
    let blocks = &request.problem.blocks[partition.blocks.clone()];
    let kept: Vec<String> = blocks.iter().filter(|block| block.kept_on_host).map(|block| block.label.clone()).collect();
    match kept.len() {
        0 => None,
        all if all == blocks.len() => Some("experts kept on the CPU".to_owned()),
        _ => Some(format!("{} kept on the CPU; other blocks {others}", table::blocks_and_experts(&kept))),
    }
}

/// The reason for a partition with blocks that `--assign` names; `others` says why its other blocks are there.
fn assigned(request: &PlanningRequest, partition: &PartitionSpec, others: &str) -> Option<String> {
    let blocks = &request.problem.blocks[partition.blocks.clone()];
    let is_where_assigned = |block: &&BlockSpec| block.assigned.map(BlockPlacement::both) == Some(partition.placement);
    let assigned = blocks.iter().filter(is_where_assigned);
    let assigned: Vec<String> = assigned.map(|block| block.label.clone()).collect();
    match assigned.len() {
        0 => None,
        all if all == blocks.len() || others == MANUALLY => Some(MANUALLY.to_owned()),
        _ => Some(format!("{} {MANUALLY}; other blocks {others}", table::blocks(&assigned))),
    }
}

/// The reason in a plan that divides layers by rows: every place of the other blocks was tried.
fn beside_shards(request: &PlanningRequest, partition: &PartitionSpec) -> String {
    let blocks = &request.problem.blocks[partition.blocks.clone()];
    let is_table = blocks.iter().all(|block| block.kind == BlockRole::Embedding);
    match blocks.iter().any(|block| block.assigned.is_some()) {
        true => split_mode::REASON.to_owned(),
        false if is_table && partition.placement.decode == Placement::Cpu => TABLE.to_owned(),
        false => "fastest of all places beside the divided layers".to_owned(),
    }
}

/// The reason in a plan without GPUs.
fn without_gpus(request: &PlanningRequest, partition: &PartitionSpec, disk: Option<&DiskStreaming>) -> String {
    match disk {
        None => "no GPU in this plan".to_owned(),
        Some(disk) if partition.blocks.clone().all(|block| disk.is_table[block]) => TABLE.to_owned(),
        Some(disk) if disk.holds_all() => "fits in host memory".to_owned(),
        Some(disk) => from_disk(&request.problem.blocks[partition.blocks.clone()], disk),
    }
}

/// What is read from disk of these blocks, and why.
fn from_disk(blocks: &[BlockSpec], disk: &DiskStreaming) -> String {
    let experts: u64 = blocks.iter().filter_map(|block| block.experts).map(|experts| experts.bytes).sum();
    let by_demand = if disk.expert_cache.is_some() { experts } else { 0 };
    let others = Demand::of(blocks).weights.saturating_sub(by_demand);
    let kept = kept_in_memory(others, disk.read_level);
    match by_demand {
        0 if disk.read_level == 0 => "its weights stay in host memory".to_owned(),
        0 if others <= disk.read_level => {
            "host memory holds none of its weights, which are read from disk in each pass".to_owned()
        }
        0 => format!("{kept} of its weights fit in host memory, the rest is read from disk in each pass"),
        _ => format!("experts are read from disk as tokens select them; {kept} of other weights fit in host memory"),
    }
}

/// The share of these bytes of weights beyond the level that is read in each pass, as text.
fn kept_in_memory(weights: u64, read_level: u64) -> String {
    let percent = (100.0 * weights.saturating_sub(read_level) as f64 / weights.max(1) as f64).round();
    if percent == 0.0 && weights > read_level { "less than 1 %".to_owned() } else { format!("{percent} %") }
}

const TABLE: &str = "embedding table: each token reads one row";

/// The reason of each of the `sharing` partitions of a run.
fn reason(request: &PlanningRequest, partitioning: &Partitioning, run: &RunExplanation, sharing: usize) -> String {
    let inside = &request.problem.blocks[run.blocks.clone()];
    let is_table = inside.iter().all(|block| block.kind == BlockRole::Embedding);
    if is_table && run.placement.decode == Placement::Cpu {
        return TABLE.to_owned();
    }
    let now = partitioning.solution.objective_ms;
    let chosen = || if partitioning.is_measured { MEASURED_FASTEST } else { BEFORE_LAUNCHES }.to_owned();
    match best_alternative(run) {
        None => "no other place is possible".to_owned(),
        Some(other) if sharing == 1 => compared(request, other, now).unwrap_or(chosen()),
        Some(other) => {
            let labels: Vec<String> = inside.iter().map(|block| block.label.clone()).collect();
            let together = |reason| format!("{} together {reason}", table::blocks(&labels));
            compared(request, other, now).map_or(chosen(), together)
        }
    }
}

/// The reason where another device is expected to be faster.
const MEASURED_FASTEST: &str = "fastest of the measured plans";
const BEFORE_LAUNCHES: &str = "fastest without the launches of partitions; with these another device may be faster";

/// The best alternative: those that fit first, then the least time. Where none fits, streaming to the device that holds the run comes last: that
/// this needs more memory says nothing of why the run is there.
fn best_alternative(run: &RunExplanation) -> Option<&Alternative> {
    let streams_to_own = |other: &Alternative| match (run.placement.decode, other.place) {
        (Placement::Resident(own), Placement::Streamed(gpu)) => own == gpu,
        _ => false,
    };
    let rank = |other: &Alternative| match other.over_budget {
        None => 0,
        Some(_) => 1 + u8::from(streams_to_own(other)),
    };
    run.elsewhere.iter().min_by(|a, b| rank(a).cmp(&rank(b)).then(a.objective_ms.total_cmp(&b.objective_ms)))
}

/// What another place lacks or costs; `None` if it costs less than the placement, which takes `now` milliseconds.
fn compared(request: &PlanningRequest, other: &Alternative, now: f64) -> Option<String> {
    let more_ms = other.objective_ms - now;
    match &other.over_budget {
        Some(over_budget) => {
            let memory = match over_budget.device {
                DeviceId::Cpu => "host memory".to_owned(),
                gpu => gpu.to_string(),
            };
            let missing = ByteSize(over_budget.missing()).human();
            Some(format!("would not fit {}: {memory} lacks {missing}", place_name(other.place)))
        }
        None if more_ms < 0.0 && !is_rounding(more_ms, now) => None,
        None => {
            let change = difference(more_ms, now, request.options.objective);
            Some(format!("{}: {change}", place_name(other.place)))
        }
    }
}

/// `on the CPU`, `on gpu0`, `streamed to gpu0`.
pub fn place_name(place: Placement) -> String {
    match place {
        Placement::Cpu => "on the CPU".to_owned(),
        Placement::Resident(gpu) => format!("on gpu{gpu}"),
        Placement::Streamed(gpu) => format!("streamed to gpu{gpu}"),
    }
}

/// A difference of the objective as text, such as `+31.5 s per answer`; `now` is its current value, milliseconds.
pub fn difference(ms: f64, now: f64, objective: Objective) -> String {
    let what = match objective {
        Objective::Decode => "per token",
        Objective::Prefill => "to the first token",
        Objective::Mixed => "per answer",
        Objective::Throughput => "for all answers",
    };
    match ms {
        ms if !ms.is_finite() => "cannot compute there".to_owned(),
        ms if is_rounding(ms, now) => "same time".to_owned(),
        ms => format!("{} {what}", amount::difference(ms, MEASURED)),
    }
}

/// Relative differences up to this are rounding errors.
const ROUNDING: f64 = 1e-6;

/// Whether a difference is a rounding error relative to `of_ms`.
pub fn is_rounding(difference_ms: f64, of_ms: f64) -> bool {
    difference_ms.abs() <= ROUNDING * of_ms.abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_keeps_what_a_partition_has_beyond_the_level_that_is_read() {
        assert_eq!([0, 60, 100, 150].map(|level| kept_in_memory(100, level)), ["100 %", "40 %", "0 %", "0 %"]);
        assert_eq!(kept_in_memory(1000, 997), "less than 1 %");
    }
}
