//! Corrects the cost model with measured times.
//!
//! - Blocks that ran in a stage for the first time at a place are scaled so that the stage's predicted time equals its
//!   measured time minus the launch and minus the time of its blocks that ran at that place before.
//! - Blocks that never ran at a place are scaled by the ratio over all stages at that place. Without this the planner
//!   would keep preferring placements with unmeasured, optimistic costs.
//! - Links are scaled by the ratio of measured to predicted copy time.
//! - The part of a token's time that neither stages nor copies nor waits for the disk account for becomes the overhead of a pass.
//! - If weights were read from disk, the disk gets the rate of those reads. The time by which the host's stages exceeded the
//!   expectation meanwhile is contention, not slower computing, because more tokens in one pass read no more. If a static estimate
//!   is too fast, a slow processor counts as contention too, up to a limit.

use super::bench::{BenchResult, MeasuredReads, StageTimes};
use crate::measured_run::{contention, slowed_by_reads};
use crate::partitioning::Partitioning;
use hpp_model::PartitionSpec;
use hpp_partition::{Contention, Cost, Phase, Placement, Problem, simulate};
use std::collections::BTreeSet;

/// The state of the correction over several measured plans.
#[derive(Debug, Default)]
pub struct CostFeedback {
    /// Pairs of a block and a place where it has been measured.
    measured: BTreeSet<(usize, Placement)>,
}

/// Predicted and measured time of the same blocks, milliseconds.
struct TimePair {
    predicted: f64,
    measured: f64,
}

impl TimePair {
    /// Measured over predicted; 1 unless both are above 0.
    fn ratio(&self) -> f64 {
        if self.predicted > 0.0 && self.measured > 0.0 { self.measured / self.predicted } else { 1.0 }
    }
}

impl CostFeedback {
    /// Corrects the costs by a measured run of this placement.
    pub fn correct(&mut self, problem: &mut Problem, partitioning: &Partitioning, result: &BenchResult) {
        problem.cuts = partitioning.cuts();
        scale_links(problem, partitioning, result);
        let reads = result.reads.filter(|_| disk_bytes(problem, partitioning) > 0);
        let slowed = reads.map_or(1.0, |reads| host_contention(problem, partitioning, result, reads));
        let alone = match reads {
            Some(reads) => without_contention(problem, partitioning, result, reads, slowed),
            None => result.clone(),
        };
        for phase in Phase::BOTH {
            self.scale_blocks(problem, partitioning, &alone, phase);
        }
        for partition in &partitioning.partitions {
            self.measured.extend(partition.blocks.clone().map(|block| (block, partition.placement.decode)));
        }
        set_pass_overhead(problem, partitioning, result);
        if let Some(reads) = reads {
            problem.pass_overhead_ms = reads.rest_ms;
            (problem.disk_bytes_per_ms, problem.disk_contention) =
                (Some(reads.bytes_per_ms), Contention::new(slowed, 1.0));
        } else if disk_bytes(problem, partitioning) > 0 {
            // Without measured reads, the measured times already include the contention with them.
            problem.disk_contention = Contention::NONE;
        }
        problem.cuts.clear();
    }

    fn scale_blocks(&self, problem: &mut Problem, partitioning: &Partitioning, result: &BenchResult, phase: Phase) {
        let places: BTreeSet<Placement> = partitioning.partitions.iter().map(|p| p.placement.in_phase(phase)).collect();
        let mut factors = Vec::new();
        for place in places {
            let stages: Vec<(&PartitionSpec, TimePair)> = partitioning
                .partitions
                .iter()
                .zip(&result.stages)
                .filter(|(partition, _)| partition.placement.in_phase(phase) == place)
                .map(|(partition, times)| (partition, self.new_block_times(problem, partition, place, phase, *times)))
                .collect();
            let total = TimePair {
                predicted: stages.iter().map(|(_, times)| times.predicted).sum(),
                measured: stages.iter().map(|(_, times)| times.measured).sum(),
            };
            for block in 0..problem.blocks.len() {
                let own_stage = stages.iter().find(|(partition, _)| partition.blocks.contains(&block));
                let is_new = !self.measured.contains(&(block, place));
                let factor = match own_stage {
                    Some((partition, times)) if is_new || self.is_measured(partition, place) => times.ratio(),
                    None if is_new => total.ratio(),
                    _ => continue,
                };
                factors.push((place, block, factor));
            }
        }
        for (place, block, factor) in factors {
            scale(problem.costs_mut(place), block, phase, factor);
        }
    }

    /// Times of those blocks of a stage that never ran at this place before; of all its blocks if all did.
    fn new_block_times(
        &self,
        problem: &Problem,
        partition: &PartitionSpec,
        place: Placement,
        phase: Phase,
        times: StageTimes,
    ) -> TimePair {
        let stage_ms = if phase == Phase::Prefill { times.prefill_ms } else { times.decode_ms };
        let launches_ms = problem.launch_ms(place) * problem.passes(phase) as f64;
        let ms = |block: usize| problem.phase_ms(block, place, phase);
        let has_new = !self.is_measured(partition, place);
        let is_known = |block: &usize| has_new && self.measured.contains(&(*block, place));
        let known_ms: f64 = partition.blocks.clone().filter(is_known).map(ms).sum();
        let predicted = partition.blocks.clone().filter(|block| !is_known(block)).map(ms).sum();
        // Launch and known blocks may be predicted longer than the whole stage took: the new blocks get at least 5 % of
        // it.
        TimePair { predicted, measured: (stage_ms - launches_ms - known_ms).max(stage_ms * 0.05) }
    }

    /// Whether all blocks of a partition have been measured at this place.
    fn is_measured(&self, partition: &PartitionSpec, place: Placement) -> bool {
        partition.blocks.clone().all(|block| self.measured.contains(&(block, place)))
    }
}

/// Predicted time of all copies in one pass (decode) or all passes of the prompt (prefill), milliseconds.
fn transfer_ms(problem: &Problem, partitioning: &Partitioning, phase: Phase) -> f64 {
    let (placements, slots) = (&partitioning.solution.placements, &partitioning.solution.slots);
    simulate(problem, placements, slots, phase).transfer_ms.iter().sum()
}

/// Bytes of weights that a token reads from disk.
fn disk_bytes(problem: &Problem, partitioning: &Partitioning) -> u64 {
    let solution = &partitioning.solution;
    simulate(problem, &solution.placements, &solution.slots, Phase::Decode).disk_bytes
}

/// How many times as long the host computes while the disk is read.
fn host_contention(problem: &Problem, partitioning: &Partitioning, result: &BenchResult, reads: MeasuredReads) -> f64 {
    let (mut measured, mut expected) = (0.0, 0.0);
    for (partition, times) in on_host(partitioning, result, Phase::Decode) {
        let ms = |block: usize| problem.phase_ms(block, Placement::Cpu, Phase::Decode);
        measured += times.decode_ms;
        expected += partition.blocks.clone().map(ms).sum::<f64>() + problem.cpu_launch_ms;
    }
    contention(measured, expected, reads.busy_ms)
}

/// The measured times without what reading from disk added to them.
fn without_contention(
    problem: &Problem,
    partitioning: &Partitioning,
    result: &BenchResult,
    reads: MeasuredReads,
    contention: f64,
) -> BenchResult {
    let share = |phase: Phase| {
        let stage_ms = |times: &StageTimes| if phase == Phase::Decode { times.decode_ms } else { times.prefill_ms };
        let measured: f64 = on_host(partitioning, result, phase).map(|(_, times)| stage_ms(times)).sum();
        let slowed = slowed_by_reads(contention, measured, reads.busy_ms * problem.passes(phase) as f64);
        if measured > 0.0 { 1.0 - slowed / measured } else { 1.0 }
    };
    let (prefill, decode) = (share(Phase::Prefill), share(Phase::Decode));
    let mut alone = result.clone();
    for (partition, times) in partitioning.partitions.iter().zip(&mut alone.stages) {
        let computes = |phase| partition.placement.in_phase(phase) == Placement::Cpu;
        times.prefill_ms *= if computes(Phase::Prefill) { prefill } else { 1.0 };
        times.decode_ms *= if computes(Phase::Decode) { decode } else { 1.0 };
    }
    alone
}

/// Partitions that compute on the host in a phase, and their times.
fn on_host<'a>(
    partitioning: &'a Partitioning,
    result: &'a BenchResult,
    phase: Phase,
) -> impl Iterator<Item = (&'a PartitionSpec, &'a StageTimes)> {
    let stages = partitioning.partitions.iter().zip(&result.stages);
    stages.filter(move |(partition, _)| partition.placement.in_phase(phase) == Placement::Cpu)
}

/// Scales the links of all GPUs in use by the ratio of measured to predicted time of all copies in a run.
fn scale_links(problem: &mut Problem, partitioning: &Partitioning, result: &BenchResult) {
    let [prefill, decode] = [Phase::Prefill, Phase::Decode].map(|phase| transfer_ms(problem, partitioning, phase));
    let predicted = prefill + result.decoded * decode;
    if predicted <= 0.0 || result.transfer_ms <= 0.0 {
        return;
    }
    let factor = result.transfer_ms / predicted;
    let used: BTreeSet<usize> =
        partitioning.solution.placements.iter().filter_map(|placement| placement.decode.gpu()).collect();
    for gpu in used {
        let costs = &mut problem.gpus[gpu];
        costs.latency_ms *= factor;
        costs.to_device /= factor;
        costs.from_device /= factor;
    }
}

/// Sets the overhead of a pass to a token's measured time minus stages and copies.
fn set_pass_overhead(problem: &mut Problem, partitioning: &Partitioning, result: &BenchResult) {
    let copies_ms = transfer_ms(problem, partitioning, Phase::Decode);
    let stages_ms: f64 = result.stages.iter().map(|stage| stage.decode_ms).sum();
    problem.pass_overhead_ms = (result.times.decode_ms - stages_ms - copies_ms).max(0.0);
}

fn scale(costs: &mut [Cost], block: usize, phase: Phase, factor: f64) {
    match phase {
        Phase::Decode => costs[block].decode_ms *= factor,
        Phase::Prefill => costs[block].prefill_ms.iter_mut().for_each(|ms| *ms *= factor),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partitioning::DecidedBy;
    use crate::predicted::PredictedTimes;
    use hpp_partition::{
        BlockPlacement, BlockRole, BlockSpec, Budget, GpuCosts, Mechanisms, Objective, Options, Planner, Streamed,
        Workload, evaluate,
    };

    /// Six blocks of `cpu` milliseconds on the host and `0.1 * gpu` milliseconds on the GPU.
    fn problem(cpu: f64, gpu: f64) -> Problem {
        let block = |at: u32| BlockSpec {
            label: format!("layers.{at}"),
            kind: BlockRole::Layer(at),
            weights: vec![(at, 1000)],
            streamed: Streamed::whole(1000),
            experts: None,
            kv_bytes: 10,
            kv_tensors: 2,
            kv_grows: None,
            kept_on_host: false,
            assigned: None,
            needs_gpu: false,
            kv_filled: None,
            workspace_bytes: 10,
            folded_bytes: 0,
            widened_bytes: 0,
            session_bytes: 0,
            score_bytes: 0,
            boundary_bytes: 1000,
            boundary_tensors: 2,
            decode: Default::default(),
            prefill: Default::default(),
        };
        let costs =
            |ms: f64| vec![Cost { decode_ms: ms, short_pass_ms: vec![], prefill_ms: vec![2.0 * ms, 3.0 * ms] }; 6];
        let gpu = GpuCosts {
            blocks: costs(0.1 * gpu),
            launch_ms: 0.01,
            to_device: 1e6,
            from_device: 1e6,
            latency_ms: 0.02,
            compute_contention: 1.0,
            link_contention: 1.0,
        };
        Problem {
            blocks: (0..6).map(block).collect(),
            cpu: costs(cpu),
            gpus: vec![gpu],
            cpu_launch_ms: 0.01,
            pass_overhead_ms: 0.05,
            disk_bytes_per_ms: None,
            disk_contention: Contention::NONE,
            decompression: None,
            budget: Budget { vram: vec![1 << 20], ..Budget::default() },
            load: Workload { batch: 1, sequences: 1, prompt_tokens: 20, new_tokens: 5, passes: vec![10, 10] },
            row_batching: hpp_partition::RowBatching::Never,
            expert_hits: vec![],
            cuts: vec![],
        }
    }

    const OPTIONS: Options = Options {
        planner: Planner::Exact,
        objective: Objective::Mixed,
        mechanisms: Mechanisms::ResidentCpu,
        slots: None,
    };

    /// Blocks before `on_host` on the host, the rest on the GPU.
    fn partitioning(problem: &Problem, on_host: usize) -> Partitioning {
        let place =
            |at: usize| BlockPlacement::both(if at < on_host { Placement::Cpu } else { Placement::Resident(0) });
        let placements: Vec<BlockPlacement> = (0..6).map(place).collect();
        let partitions =
            [0..on_host, on_host..6].map(|blocks| PartitionSpec { placement: placements[blocks.start], blocks });
        Partitioning {
            solution: evaluate(problem, &OPTIONS, placements, vec![0]),
            partitions: partitions.to_vec(),
            decided_by: DecidedBy::Planner,
            is_measured: false,
            min_partitions: 1,
        }
    }

    /// What a machine with the costs of `actual` would measure.
    fn run(actual: &Problem, on_host: usize) -> BenchResult {
        let partitioning = partitioning(actual, on_host);
        let stage_ms = |partition: &PartitionSpec, phase| {
            let place = partition.placement.in_phase(phase);
            let blocks = partition.blocks.clone().map(|block| actual.phase_ms(block, place, phase)).sum::<f64>();
            blocks + actual.launch_ms(place) * actual.passes(phase) as f64
        };
        let stage = |partition: &PartitionSpec| StageTimes {
            prefill_ms: stage_ms(partition, Phase::Prefill),
            decode_ms: stage_ms(partition, Phase::Decode),
        };
        BenchResult {
            times: PredictedTimes::of(&partitioning.solution),
            stages: partitioning.partitions.iter().map(stage).collect(),
            transfer_ms: transfer_ms(actual, &partitioning, Phase::Prefill)
                + 5.0 * transfer_ms(actual, &partitioning, Phase::Decode),
            decoded: 5.0,
            reads: None,
            others_cpu_percent: None,
        }
    }

    fn near(a: f64, b: f64) {
        assert!((a / b - 1.0).abs() < 0.01, "{a} is not {b}");
    }

    #[test]
    fn a_measured_plan_is_predicted_to_take_its_measured_time() {
        let (mut model, mut actual) = (problem(1.0, 1.0), problem(2.0, 7.0));
        actual.gpus[0].latency_ms = 0.5;
        actual.pass_overhead_ms = 0.3;
        let measured = run(&actual, 4);
        let (before, mut feedback) = (partitioning(&model, 4), CostFeedback::default());
        feedback.correct(&mut model, &before, &measured);
        let after = partitioning(&model, 4).solution;
        near(after.decode_ms, measured.times.decode_ms);
        near(after.prefill_ms, measured.times.prefill_ms);
        // Blocks that did not run on the GPU are predicted to be as slow there as those that did.
        near(model.gpus[0].blocks[0].decode_ms, 0.7);
        near(model.cpu[5].prefill_ms[1], 6.0);
        near(partitioning(&model, 2).solution.decode_ms, partitioning(&actual, 2).solution.decode_ms);
    }

    /// A token's wait for the disk does not count as overhead of a pass, which each of several sequences would have.
    #[test]
    fn waits_for_the_disk_are_the_disks() {
        let reading = |cpu: f64, rate: f64| {
            let mut problem = problem(cpu, 1.0);
            problem.budget.ram = Some(3000);
            problem.disk_bytes_per_ms = Some(rate);
            problem
        };
        let (mut model, mut actual) = (reading(1.0, 1000.0), reading(1.0, 100.0));
        actual.pass_overhead_ms = 0.3;
        let bytes = disk_bytes(&actual, &partitioning(&actual, 5)) as f64;
        let mut measured = run(&actual, 5);
        assert!(measured.times.decode_ms > 15.0 && bytes > 1500.0, "{bytes} bytes, {:?}", measured.times);
        measured.reads = Some(MeasuredReads { bytes_per_ms: 100.0, busy_ms: bytes / 100.0, rest_ms: 0.3 });
        let before = partitioning(&model, 5);
        CostFeedback::default().correct(&mut model, &before, &measured);
        near(partitioning(&model, 5).solution.decode_ms, measured.times.decode_ms);
        assert_eq!((model.pass_overhead_ms, model.disk_bytes_per_ms), (0.3, Some(100.0)));
        // Computing that takes twice as long while the disk is read does so because of that.
        let mut slowed = measured.clone();
        slowed.stages[0].decode_ms *= 2.0;
        let mut model = reading(1.0, 1000.0);
        CostFeedback::default().correct(&mut model, &before, &slowed);
        near(model.cpu[0].decode_ms, 1.0);
        assert!((1.9..2.1).contains(&model.disk_contention.compute), "{:?}", model.disk_contention);
    }

    /// Later measurements of other blocks do not change a block's own measurement.
    #[test]
    fn a_blocks_own_measurement_wins() {
        let mut actual = problem(1.0, 1.0);
        actual.cpu[0].decode_ms = 9.0;
        let (mut model, mut feedback) = (problem(1.0, 1.0), CostFeedback::default());
        for on_host in [1, 4] {
            let partitioning = partitioning(&model, on_host);
            feedback.correct(&mut model, &partitioning, &run(&actual, on_host));
        }
        near(partitioning(&model, 1).solution.decode_ms, partitioning(&actual, 1).solution.decode_ms);
    }
}
