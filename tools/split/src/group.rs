//! Groups blocks with the same block placement into partitions.

use hpp_model::PartitionSpec;
use hpp_partition::{BlockPlacement, DeviceId, KvHome, Phase, Placement, Problem, runs};
use hpp_schema::Provider;

/// Kinds of blocks that need a partition of their own, besides streamed ones and GPU blocks whose state is in host
/// memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnPartition {
    /// Blocks on the host, because the runtime reads and releases weights from disk partition by partition.
    pub from_disk: bool,
    /// Tables on the host of which a pass reads a few rows, because they stay memory-mapped.
    pub tables: bool,
    /// Blocks with state on the host, because the runtime reads and evicts state on disk partition by partition.
    pub states_on_disk: bool,
    /// Parts of layers that are divided by rows, so that those of several GPUs compute at the same time.
    pub shards: bool,
    /// Blocks with state on a GPU, so that the runtime can move each by itself.
    pub movable: bool,
}

/// Groups adjacent blocks with the same block placement into the fewest partitions, or into `min_partitions` if that is more (at
/// most one per block). A streamed block is a partition of its own because its slot holds one partition's weights. While state
/// is kept in host memory, each GPU block is a partition of its own, so that a staging buffer of the device holds the state of
/// one block. On the host, a partition has one provider (`host_providers`, by block; empty for one provider).
pub fn group(
    problem: &Problem,
    placements: &[BlockPlacement],
    min_partitions: usize,
    rules: OwnPartition,
    host_providers: &[Provider],
) -> Vec<PartitionSpec> {
    // `runs` joins adjacent blocks with equal places: give each group a number and pass it as a GPU index.
    let mut group = 0;
    let mut groups = Vec::with_capacity(placements.len());
    let is_alone = |at: usize| needs_own_partition(problem, at, placements[at], rules);
    for (at, placement) in placements.iter().enumerate() {
        let changes_provider =
            || at > 0 && host_providers.get(at) != host_providers.get(at - 1) && placement.computes_on_host();
        if at > 0 && (placements[at - 1] != *placement || is_alone(at) || is_alone(at - 1) || changes_provider()) {
            group += 1;
        }
        groups.push(DeviceId::Gpu(group));
    }
    let runs = runs(&problem.blocks, &groups, min_partitions);
    runs.into_iter().map(|run| PartitionSpec { placement: placements[run.blocks.start], blocks: run.blocks }).collect()
}

fn needs_own_partition(problem: &Problem, block: usize, placement: BlockPlacement, rules: OwnPartition) -> bool {
    let has_state = problem.blocks[block].kv_bytes > 0;
    // Where layers are divided, nothing else is assigned.
    if rules.shards && problem.blocks[block].assigned.is_some() {
        return true;
    }
    Phase::BOTH.iter().any(|phase| match placement.in_phase(*phase) {
        Placement::Streamed(_) => true,
        Placement::Resident(_) => problem.budget.kv == KvHome::Host || (rules.movable && has_state),
        Placement::Cpu => {
            rules.from_disk || (rules.tables && problem.is_lookup_table(block)) || (rules.states_on_disk && has_state)
        }
    })
}
