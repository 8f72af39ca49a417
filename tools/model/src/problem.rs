//! Builds the planning problem: the time of each block at each place, milliseconds, and the memory limits.
//!
//! Times come from a profile, from a machine file through the roofline (the longer of moving the bytes and doing the
//! arithmetic; Williams et al., "Roofline: an insightful visual performance model", 2009), or from an assumed machine.

mod assumed;
mod measured;
mod neurons;
mod packing;
mod passes;
mod roofline;
mod rows;

use crate::{Analysis, PlannedState, Scenario, streams};
use hpp_graph::{ExpertCounts, ValueId};
use hpp_partition::{
    Budget, Contention, Decompression, GpuCosts, MOST_SEQUENCES, Packing, Problem, ReadCosts, RowBatching, Workload,
    condensed,
};
use hpp_schema::compression::{decompressing_threads, worth_permille};
use hpp_schema::{
    BandwidthPath, ByteSize, DType, ExpertStatistics, Finding, GpuRates, InputRole, Machine, ModelInput, Profile,
    State, StateUpdate,
};
pub use measured::ProviderTimes;
pub use packing::scales_beside_packed;
pub(crate) use packing::{largest_widened, session_copies};
use passes::passes;

/// Number of steps of a cache's share of all experts for which the planner gets hit rates.
const HIT_RATE_STEPS: usize = 32;

/// The source of costs.
#[derive(Clone, Copy, Debug)]
pub enum CostSource<'a> {
    /// Round numbers of a desktop: they rank placements, but predict no absolute times.
    Assumed,
    /// A machine file, of this or another machine.
    Machine(&'a Machine),
    /// A profile of this model.
    Profile(&'a Profile),
}

impl<'a> CostSource<'a> {
    /// Memory of each GPU, bytes; empty if the machine is unknown.
    pub fn gpu_memory(&self) -> Vec<u64> {
        self.rates().iter().flat_map(|machine| &machine.gpus).map(|gpu| gpu.memory.0).collect()
    }

    /// Memory of the host, bytes, if known.
    pub fn host_memory(&self) -> Option<u64> {
        match self {
            CostSource::Assumed => None,
            CostSource::Machine(machine) => Some(machine.cpu.memory.0),
            CostSource::Profile(profile) => Some(profile.host.memory.0).filter(|memory| *memory > 0),
        }
    }

    /// Threads that share the work of an operator on the CPU, if known.
    pub fn threads(&self) -> Option<u32> {
        match self {
            CostSource::Assumed | CostSource::Machine(_) => None,
            CostSource::Profile(profile) => Some(profile.host.threads).filter(|threads| *threads > 0),
        }
    }

    /// Rate of direct reads from disk, 1e9 bytes per second; `None` if the machine file or profile has no disk.
    fn disk(&self) -> Option<f64> {
        match self {
            CostSource::Assumed => Some(assumed::DISK_GB_PER_S),
            CostSource::Machine(_) | CostSource::Profile(_) => {
                self.rates().and_then(|machine| machine.disk).map(|disk| disk.read_gb_per_s)
            }
        }
    }

    /// How much direct reads and computing slow each other down; not at all if that is unknown.
    fn disk_contention(&self) -> Contention {
        let disk = self.rates().and_then(|machine| machine.disk);
        let known = disk.and_then(|disk| disk.contention);
        known.map_or(Contention::NONE, |contention| Contention::new(contention.compute, contention.read))
    }

    /// The costs of direct reads of any size; `None` if the machine file or profile has no disk. The cost of a request comes from
    /// the smallest reads of a profile, with as many in flight as the runtime keeps.
    pub fn disk_reads(&self) -> Option<ReadCosts> {
        let bytes_per_ms = per_ms(self.disk()?);
        let CostSource::Profile(profile) = self else {
            return Some(ReadCosts { bytes_per_ms, request_ms: assumed::DISK_REQUEST_MS });
        };
        let curve = profile.machine.curves.iter().find(|curve| curve.path == BandwidthPath::DiskRead);
        let smallest = curve.and_then(|curve| curve.points.iter().min_by_key(|point| point.bytes));
        let request_ms = smallest.map_or(assumed::DISK_REQUEST_MS, |point| {
            let bytes = point.bytes as f64;
            (bytes / per_ms(point.gb_per_s) - bytes / bytes_per_ms).max(0.0)
        });
        Some(ReadCosts { bytes_per_ms, request_ms })
    }

    /// The mean share of a block's neurons that a token of a profile's corpus makes active; `None` without one, or if the block has no
    /// ReLU that was observed.
    pub fn active_neurons(&self, block: &str) -> Option<f64> {
        let CostSource::Profile(Profile { corpus: Some(corpus), .. }) = self else { return None };
        corpus.statistics.neurons.iter().find(|layer| layer.block == block)?.density()
    }

    /// How often the tokens of a profile's corpus selected each expert, for each layer; empty without one.
    pub fn experts(&self) -> &'a [ExpertStatistics] {
        match self {
            CostSource::Profile(Profile { corpus: Some(corpus), .. }) => &corpus.statistics.experts,
            _ => &[],
        }
    }

    /// Whether the rate of decompressing weights is known, not assumed.
    pub fn knows_decompression(&self) -> bool {
        self.measured_decompression().is_some()
    }

    /// The rate of decompressing weights with one thread, 1e9 bytes per second.
    fn measured_decompression(&self) -> Option<f64> {
        self.rates().and_then(|machine| machine.disk).and_then(|disk| disk.decompress_gb_per_s)
    }

    /// The rate and cost of decompressing weights on a host with this many cores.
    fn decompression(&self, cores: u64) -> Decompression {
        let measured = self.measured_decompression();
        let cores = usize::try_from(cores).unwrap_or(usize::MAX).max(1);
        let threads = decompressing_threads(cores);
        Decompression {
            bytes_per_ms: per_ms(measured.unwrap_or(assumed::DECOMPRESS_GB_PER_S)) * threads as f64,
            host_share: threads as f64 / cores as f64,
        }
    }

    /// The most bytes per 1000 that compressed weights on disk may take: with fewer, reading less saves more time than
    /// decompressing takes on a host of this many cores.
    pub fn compress_permille(&self, cores: u64) -> u32 {
        self.disk().map_or(0, |disk| worth_permille(per_ms(disk), self.decompression(cores).bytes_per_ms))
    }

    /// Hit rates of LRU caches for the experts of all layers together, by the number of sequences (1, 2, 4, ...) and in steps of the share
    /// of all experts, as a profile's corpus visited them; empty without one.
    fn expert_hits(&self) -> Vec<Vec<f64>> {
        let CostSource::Profile(Profile { corpus: Some(corpus), .. }) = self else { return Vec::new() };
        let layers = &corpus.statistics.experts;
        let visits: u64 = layers.iter().map(ExpertStatistics::visits).sum();
        if visits == 0 {
            return Vec::new();
        }
        let sequences: Vec<u64> = (0..=MOST_SEQUENCES.ilog2()).map(|doublings| 1 << doublings).collect();
        let mut curves = vec![vec![0.0; HIT_RATE_STEPS + 1]; sequences.len()];
        for layer in layers {
            let weight = layer.visits() as f64 / visits as f64;
            for step in 0..=HIT_RATE_STEPS {
                let rates = layer.shared_lru_hit_rates(layer.counts.len() * step / HIT_RATE_STEPS, &sequences);
                let rates = rates.into_iter().flatten();
                curves.iter_mut().zip(rates).for_each(|(curve, rate)| curve[step] += weight * rate);
            }
        }
        curves
    }

    /// The machine's rates, if known.
    pub fn rates(&self) -> Option<&Machine> {
        match self {
            CostSource::Assumed => None,
            CostSource::Machine(machine) => Some(machine),
            CostSource::Profile(profile) => profile.machine.rates.as_ref(),
        }
    }
}

/// The problem of placing this model's blocks within a budget. Reports all errors at once: budgets beyond the machine's
/// memory, missing GPUs, blocks that a profile lacks.
pub fn problem(
    analysis: &Analysis,
    scenario: Scenario,
    source: CostSource<'_>,
    budget: Budget,
) -> Result<Problem, Vec<Finding>> {
    let mut findings = budget_findings(&source, &budget);
    findings.extend(rows::findings(analysis, &source));
    let mut blocks =
        crate::blocks(&analysis.graph, &analysis.segmentation, &analysis.states, &analysis.inputs, scenario);
    streams::add_common_weights(analysis, &mut blocks);
    if !budget.vram.is_empty() {
        streams::set_streamed_bytes(analysis, &mut blocks);
    }
    rows::assign(analysis, &mut blocks);
    let active = neurons::of_all_partitions(analysis, source, &budget);
    if let Some(active) = active {
        neurons::set_widened_bytes(analysis, active, &mut blocks);
    }
    let workload = Workload {
        batch: scenario.batch,
        sequences: 1,
        prompt_tokens: scenario.prompt,
        new_tokens: scenario.new_tokens,
        passes: passes(analysis, scenario),
    };
    let gpus = budget.vram.len();
    let costs = match source {
        CostSource::Assumed => Ok(roofline::costs(analysis, &blocks, &workload, &assumed::machine(gpus), gpus)),
        CostSource::Machine(machine) => Ok(roofline::costs(analysis, &blocks, &workload, machine, gpus)),
        CostSource::Profile(profile) => measured::costs(profile, &blocks, scenario, &workload, gpus),
    };
    let costs = costs.map(|mut costs| {
        rows::overlap(analysis, &mut costs);
        if let Some(active) = active {
            neurons::correct_times(analysis, active, source, &workload, &blocks, &mut costs.cpu);
        }
        costs
    });
    match costs {
        Ok(costs) if findings.is_empty() => Ok(Problem {
            blocks: condensed(blocks),
            cpu: costs.cpu,
            gpus: costs.gpus,
            cpu_launch_ms: costs.cpu_launch_ms,
            pass_overhead_ms: pass_overhead_ms(analysis, &source),
            disk_bytes_per_ms: source.disk().map(per_ms),
            disk_contention: source.disk_contention(),
            decompression: Some(source.decompression(scenario.threads)),
            budget: Budget {
                packing: packing(analysis, source, &budget, source.compress_permille(scenario.threads)),
                ..budget
            },
            load: workload,
            // Layers with states on disk run one sequence after the other.
            row_batching: if budget.host_kv_on_disk { RowBatching::Never } else { row_batching(analysis) },
            // The corpus' hits are mostly those of popular experts, which the host's caches do not hold if a GPU computes them.
            expert_hits: if analysis.gpu_experts.is_some() { Vec::new() } else { source.expert_hits() },
            cuts: Vec::new(),
        }),
        Ok(_) => Err(findings),
        Err(more) => {
            findings.extend(more);
            Err(findings)
        }
    }
}

/// Packing of the model's weights, of which only what takes at most `compress_permille` of 1000 bytes is compressed.
pub fn packing(analysis: &Analysis, source: CostSource<'_>, budget: &Budget, compress_permille: u32) -> Packing {
    let graph = analysis.exported_graph();
    let active = neurons::of_all_partitions(analysis, source, budget);
    let is_widened = |id: ValueId| active.is_none_or(|active| !active.reads(&graph.value(id).name));
    packing::packing(&analysis.model, graph, is_widened, compress_permille)
}

/// Whether the runtime can compute the tokens of several sequences as rows of one run: each state has room for the whole context and a row
/// for each sequence, and the mask says how long each row is. False for mixtures of experts: the check at run time found other bits in
/// every batch of a mixture. Products with 16-bit and 4-bit weights have the bits of single rows, also where weights are read from disk.
fn row_batching(analysis: &Analysis) -> RowBatching {
    let is_row = |planned: &PlannedState| {
        let State { update, shape, .. } = &planned.state;
        let is_whole = matches!(update, StateUpdate::InPlace { capacity, .. } if *capacity == analysis.context);
        is_whole && shape.first().is_some_and(|dim| dim.as_symbol().is_some())
    };
    let has_rows = |input: &ModelInput| match input.role {
        InputRole::TokenIds | InputRole::AttentionMask => input.shape.len() == 2,
        InputRole::PositionIds => input.shape.len() > 1,
        InputRole::LogitPositions | InputRole::TokenTypeIds => true,
        InputRole::PastLengths | InputRole::TotalLengths | InputRole::Embeddings => false,
        // Only the source model has these.
        InputRole::UseCacheBranch | InputRole::Zeros => true,
        InputRole::Free => false,
    };
    let has_mask = analysis.inputs.iter().any(|input| input.role == InputRole::AttentionMask);
    let has_states = !analysis.states.is_empty();
    let has_experts =
        || analysis.segmentation.blocks.iter().any(|block| ExpertCounts::of(&analysis.graph, block).is_some());
    let is_possible = has_mask
        && has_states
        && !has_experts()
        && analysis.states.iter().all(is_row)
        && analysis.inputs.iter().all(has_rows);
    match is_possible {
        false => RowBatching::Never,
        true if multiplies_by_float32(analysis) => RowBatching::InMemory,
        true => RowBatching::Always,
    }
}

/// Whether the model has products with weights that it stores in float32.
fn multiplies_by_float32(analysis: &Analysis) -> bool {
    let (graph, weights) = (&analysis.graph, &analysis.segmentation.weights);
    let is_stored = |id: ValueId| match graph.producer(id).map(|node| graph.node(node).op_type.as_str()) {
        None | Some("Transpose" | "Identity") => weights.is_matrix(graph, id),
        Some(_) => false,
    };
    let is_float32 = |id: ValueId| graph.value(id).dtype == Some(DType::Float32);
    let products = graph.nodes.iter().filter(|node| matches!(node.op_type.as_str(), "Gemm" | "MatMul"));
    products.flat_map(|node| node.reads()).any(|id| is_float32(id) && is_stored(id))
}

/// The part of a [`Problem`] that depends on the source.
struct DeviceCosts {
    cpu: Vec<hpp_partition::Cost>,
    gpus: Vec<GpuCosts>,
    cpu_launch_ms: f64,
}

/// 1e9 bytes per second in bytes per millisecond.
fn per_ms(gb_per_s: f64) -> f64 {
    gb_per_s * 1e6
}

/// Costs of a GPU from its rates, and from the block costs that the caller has computed.
fn gpu_costs(gpu: &GpuRates, blocks: Vec<hpp_partition::Cost>, launch_ms: f64) -> GpuCosts {
    GpuCosts {
        blocks,
        launch_ms,
        to_device: per_ms(gpu.link.to_device_gb_per_s),
        from_device: per_ms(gpu.link.from_device_gb_per_s),
        latency_ms: gpu.link.latency_us / 1e3,
        compute_contention: gpu.contention.map_or(1.0, |c| c.compute),
        link_contention: gpu.contention.map_or(1.0, |c| c.link),
    }
}

/// Time per token outside partitions, milliseconds: feeding inputs, reading logits, sampling. Measured if a profile has
/// it.
fn pass_overhead_ms(analysis: &Analysis, source: &CostSource) -> f64 {
    let measured = match source {
        CostSource::Profile(profile) => profile.pass.as_ref().and_then(|pass| pass.timing),
        CostSource::Assumed | CostSource::Machine(_) => None,
    };
    match measured {
        Some(timing) => timing.median_ms,
        None => assumed_pass_overhead_ms(analysis.states.len() as f64, analysis.vocab_size.unwrap_or(0) as f64),
    }
}

/// Assumed time per token outside partitions, milliseconds: linear in the number of states, which are bound one by one,
/// and of logits, which are read one by one. `hpp-exec bench` on two server cores of the 2 GHz class,
/// microseconds:
///
/// | states | logits | measured | this formula |
/// |---|---|---|---|
/// | 8 | 512 | 5 to 10 | 8 |
/// | 12 | 32,000 | 66 | 70 |
/// | 48 | 32,000 | 91 | 92 |
/// | 48 | 151,936 | 319 | 319 |
fn assumed_pass_overhead_ms(states: f64, logits: f64) -> f64 {
    2e-3 + 0.6e-3 * states + 1.9e-6 * logits
}

/// Budgets that exceed the machine's memory, and missing GPUs or rates.
fn budget_findings(source: &CostSource<'_>, budget: &Budget) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let (Some(requested), Some(available)) = (budget.ram, source.host_memory())
        && requested > available
    {
        let what = format!("requested {}, but the machine has {}", human(requested), human(available));
        findings.push(Finding::error("--ram", what));
    }
    let Some(machine) = source.rates() else {
        if !budget.vram.is_empty() && matches!(source, CostSource::Profile(_)) {
            let what =
                "the profile lacks the rates of the machine and its links; complete it with hpp-profile --resume";
            findings.push(Finding::error("machine.rates", what));
        }
        return findings;
    };
    if budget.vram.len() > machine.gpus.len() {
        let gpus = |count: usize| if count == 1 { "1 GPU".to_owned() } else { format!("{count} GPUs") };
        let has = if machine.gpus.is_empty() { "none".to_owned() } else { machine.gpus.len().to_string() };
        let what = format!("the plan is for {}, but the machine has {has}", gpus(budget.vram.len()));
        findings.push(Finding::error("gpus", what));
    }
    for (at, (requested, gpu)) in budget.vram.iter().zip(&machine.gpus).enumerate() {
        if *requested > gpu.memory.0 {
            let what = format!("requested {}, but {} has {}", human(*requested), gpu.name, gpu.memory.human());
            findings.push(Finding::error(format!("gpus[{at}]"), what));
        }
    }
    findings
}

fn human(bytes: u64) -> String {
    ByteSize(bytes).human()
}

#[cfg(test)]
mod tests;
