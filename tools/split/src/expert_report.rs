//! Experts that are read by demand, for `--explain`: how many of those that a token selects are in memory, and what it reads.

use crate::partitioning::Partitioning;
use crate::request::PlanningRequest;
use crate::table;
use hpp_partition::{BlockPlacement, ExpertMemory, Phase, Placement, usage_of_partitions};
use hpp_schema::{ByteSize, DeviceKind, Plan};
use serde::Serialize;

/// What a token of one sequence is expected to read of experts.
#[derive(Debug, Serialize)]
pub struct ExpertReport {
    /// The blocks with experts on the host.
    blocks: String,
    /// Experts of a block, and those of them that a token selects; of the first block.
    count: u64,
    selected: u64,
    /// Bytes of all experts that a token selects.
    selected_bytes: u64,
    /// Memory for experts, bytes.
    cache_bytes: u64,
    /// The expected share of the selected experts that is in memory, 0 to 1.
    in_memory: f64,
    /// How that share is known.
    source: HitSource,
    /// Expected bytes that a token reads of experts, and of all other weights.
    read_bytes: u64,
    other_read_bytes: u64,
}

/// How the share of experts in memory is known.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum HitSource {
    /// From a profile's corpus.
    Profile,
    /// From the run of an earlier plan.
    Run,
    /// Every expert is assumed to be as likely as any other.
    Assumed,
}

impl ExpertReport {
    /// `None` if the plan reads no experts by demand.
    pub fn new(request: &PlanningRequest, partitioning: &Partitioning, plan: &Plan) -> Option<Self> {
        let host = plan.devices.iter().find(|device| device.kind == DeviceKind::Cpu)?;
        let cache = host.expert_cache?.0;
        let (problem, solution) = (partitioning.single_problem(request), &partitioning.solution);
        let usage = usage_of_partitions(&problem, &solution.placements, &solution.slots);
        let memory = ExpertMemory { cache, ..usage.expert_memory(&problem, Phase::Decode)? };
        let reads = usage.expert_reads[Phase::Decode as usize];
        let on_host = |at: &usize| solution.placements[*at] == BlockPlacement::both(Placement::Cpu);
        let with_experts = (0..problem.blocks.len()).filter(on_host).filter(|at| problem.blocks[*at].experts.is_some());
        let blocks: Vec<usize> = with_experts.collect();
        let first = problem.blocks[*blocks.first()?].experts?;
        let labels: Vec<String> = blocks.iter().map(|at| problem.blocks[*at].label.clone()).collect();
        let read_bytes = memory.read_bytes(reads, problem.expert_hits());
        Some(ExpertReport {
            blocks: table::blocks_and_experts(&labels),
            count: first.count,
            selected: first.active,
            selected_bytes: reads.visited,
            cache_bytes: cache,
            in_memory: 1.0 - read_bytes as f64 / reads.visited.max(1) as f64,
            source: match problem.expert_hits.is_empty() {
                false if request.corrections.has_expert_hits() => HitSource::Run,
                false => HitSource::Profile,
                true => HitSource::Assumed,
            },
            read_bytes,
            other_read_bytes: usage.disk_read_bytes(&problem, Phase::Decode).saturating_sub(read_bytes),
        })
    }

    /// The report as text.
    pub fn text(&self) -> String {
        let human = |bytes: u64| ByteSize(bytes).human();
        let source = match self.source {
            HitSource::Profile => "as the profile's corpus selects them",
            HitSource::Run => "as the run selected them",
            HitSource::Assumed => "if all are as likely (a profile with a corpus says how often each is selected)",
        };
        let others = match self.other_read_bytes {
            0 => String::new(),
            bytes => format!(", and {} of other weights", human(bytes)),
        };
        format!(
            "experts read by demand ({}): a token selects {} of {} in each, {} together; {:.0} % of them are expected in the {} of memory for \
             experts, {source}, so a token reads {} of experts from disk{others}",
            self.blocks,
            self.selected,
            self.count,
            human(self.selected_bytes),
            100.0 * self.in_memory,
            human(self.cache_bytes),
            human(self.read_bytes),
        )
    }
}
