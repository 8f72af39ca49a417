//! Examples with times computed by hand.

use crate::{
    BlockPlacement, BlockRole, BlockSpec, Bottleneck, Budget, Contention, Cost, Decompression, DeviceId, Experts,
    FilledState, GpuCosts, GrowingState, Mechanisms, Objective, Options, Packing, Phase, Placement, Planner, Problem,
    RowBatching, Simulation, Streamed, Work, Workload, bottleneck, evaluate, simulate,
};

/// Four layers of 100 bytes. A layer takes 10 ms on the host and 1 ms on the GPU, its copy 20 ms; nothing else costs time.
pub fn four_layers() -> Problem {
    let block = |i: u32| BlockSpec {
        label: format!("layers.{i}"),
        kind: BlockRole::Layer(i),
        weights: vec![(i, 100)],
        streamed: Streamed::whole(100),
        experts: None,
        kv_bytes: 0,
        kv_tensors: 2,
        kv_grows: None,
        kept_on_host: false,
        assigned: None,
        needs_gpu: false,
        kv_filled: None,
        workspace_bytes: 0,
        folded_bytes: 0,
        widened_bytes: 0,
        session_bytes: 0,
        score_bytes: 0,
        boundary_bytes: 0,
        boundary_tensors: 1,
        decode: Work::default(),
        prefill: Work::default(),
    };
    let cost = |ms: f64| Cost { decode_ms: ms, short_pass_ms: vec![], prefill_ms: vec![ms] };
    Problem {
        blocks: (0..4).map(block).collect(),
        cpu: vec![cost(10.0); 4],
        gpus: vec![GpuCosts {
            blocks: vec![cost(1.0); 4],
            launch_ms: 0.0,
            to_device: 5.0,
            from_device: 5.0,
            latency_ms: 0.0,
            compute_contention: 1.0,
            link_contention: 1.0,
        }],
        cpu_launch_ms: 0.0,
        pass_overhead_ms: 0.0,
        disk_bytes_per_ms: None,
        disk_contention: Contention::NONE,
        decompression: None,
        budget: Budget { vram: vec![1000], ..Budget::default() },
        load: Workload { batch: 1, sequences: 1, prompt_tokens: 1, new_tokens: 1, passes: vec![1] },
        row_batching: RowBatching::Never,
        expert_hits: vec![],
        cuts: vec![],
    }
}

const C: Placement = Placement::Cpu;
const R: Placement = Placement::Resident(0);
const S: Placement = Placement::Streamed(0);

fn run(problem: &Problem, places: [Placement; 4], slots: u32, phase: Phase) -> Simulation {
    simulate(problem, &places.map(BlockPlacement::both), &[slots], phase)
}

fn near(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-6, "{a} is not {b}");
}

#[test]
fn times_of_a_sequence_add_up() {
    let problem = four_layers();
    near(run(&problem, [C, C, R, R], 0, Phase::Decode).ms, 22.0);
    near(run(&problem, [C, C, R, R], 0, Phase::Prefill).ms, 22.0);
}

#[test]
fn launches_count_for_each_partition() {
    let mut problem = four_layers();
    problem.cpu_launch_ms = 0.5;
    problem.gpus[0].launch_ms = 0.25;
    near(run(&problem, [C, C, R, R], 0, Phase::Decode).ms, 22.75);
    near(run(&problem, [C, R, C, R], 0, Phase::Decode).ms, 23.5);
    // A streamed block is its own partition; two copies of 20 ms each take longer than the partitions.
    near(run(&problem, [R, S, S, R], 3, Phase::Decode).ms, 40.0);
    problem.cuts = vec![1];
    near(run(&problem, [C, C, R, R], 0, Phase::Decode).ms, 23.25);
}

#[test]
fn a_copy_overlaps_with_the_host() {
    let problem = four_layers();
    // 30 ms on the host and 1 ms on the GPU; a copy of 20 ms overlaps with them.
    let simulation = run(&problem, [C, C, S, C], 2, Phase::Decode);
    near(simulation.ms, 31.0);
    near(simulation.stall_ms, 0.0);
    near(simulation.transfer_ms[0], 20.0);
    assert_eq!(simulation.bytes_moved, 100);
}

#[test]
fn copies_longer_than_computation_determine_the_time() {
    let problem = four_layers();
    let simulation = run(&problem, [C, S, S, C], 4, Phase::Decode);
    // 20 ms on the host, 2 ms on the GPU, 40 ms of copies.
    near(simulation.ms, 40.0);
    near(simulation.stall_ms, 18.0);
}

#[test]
fn with_one_slot_copies_and_streamed_blocks_alternate() {
    let problem = four_layers();
    // Each copy waits for the previous streamed block: one copy of 20 ms overlaps with the host, the other does not.
    near(run(&problem, [C, C, S, S], 1, Phase::Decode).ms, 42.0);
    near(run(&problem, [C, C, S, S], 2, Phase::Decode).ms, 40.0);
}

#[test]
fn a_prompt_starts_with_empty_slots() {
    let problem = four_layers();
    // The first copy ends at 20, the second at 40; each is followed by 1 ms.
    near(run(&problem, [S, S, R, R], 2, Phase::Prefill).ms, 43.0);
    near(run(&problem, [C, C, S, C], 2, Phase::Prefill).ms, 31.0);
}

#[test]
fn passes_of_a_prompt_follow_one_another() {
    let mut problem = four_layers();
    problem.load.passes = vec![1, 1];
    for costs in [&mut problem.cpu, &mut problem.gpus[0].blocks] {
        costs.iter_mut().for_each(|cost| cost.prefill_ms = vec![cost.decode_ms, 2.0 * cost.decode_ms]);
    }
    near(run(&problem, [C, C, R, R], 0, Phase::Prefill).ms, 22.0 + 44.0);
    // Copies end at 20 and 40: the second is done before the second pass needs it at 31 + 40.
    near(run(&problem, [C, C, S, C], 2, Phase::Prefill).ms, 31.0 + 62.0);
}

#[test]
fn contention_slows_both() {
    let mut problem = four_layers();
    problem.gpus[0].compute_contention = 2.0;
    problem.gpus[0].link_contention = 4.0;
    // During the copy the host runs at half speed and the copy at a quarter: 30 ms of host work take 60 ms, in which 15 of
    // the 20 ms are copied. The GPU waits 5 ms for the rest of the copy, then computes for 1 ms.
    let simulation = run(&problem, [C, C, S, C], 1, Phase::Decode);
    near(simulation.cpu_ms, 60.0);
    near(simulation.ms, 60.0 + 5.0 + 1.0);
}

#[test]
fn a_boundary_is_copied_before_waiting_weights() {
    let mut problem = four_layers();
    problem.gpus[0].latency_ms = 1.0;
    problem.blocks.iter_mut().for_each(|block| block.boundary_bytes = 5);
    // To the GPU and back: 1 ms latency and 1 ms for 5 bytes in each direction.
    near(run(&problem, [C, R, R, C], 0, Phase::Decode).ms, 22.0 + 4.0);
    near(run(&problem, [C, R, C, R], 0, Phase::Decode).ms, 22.0 + 6.0);
    // Two copies of 21 ms each and the boundary of 2 ms share the link to the GPU.
    near(run(&problem, [C, S, S, C], 4, Phase::Decode).ms, 44.0);
}

#[test]
fn each_tensor_of_a_boundary_or_a_state_is_a_copy_with_its_own_latency() {
    let mut problem = four_layers();
    problem.gpus[0].latency_ms = 1.0;
    problem.blocks.iter_mut().for_each(|block| (block.boundary_bytes, block.boundary_tensors) = (5, 2));
    // In each direction 2 ms latency, and 1 ms for the 5 bytes of both tensors.
    let simulation = run(&problem, [C, R, R, C], 0, Phase::Decode);
    near(simulation.ms, 22.0 + 6.0);
    near(simulation.transfer_ms[0], 6.0);
    assert_eq!(simulation.bytes_moved, 10);
    // Three tensors of state, 10 ms for all their bytes: copied to the host once after the prompt, or to the GPU and back in
    // each pass.
    (problem.blocks[1].kv_bytes, problem.blocks[1].kv_tensors) = (50, 3);
    let mut placements = [C, C, C, C].map(BlockPlacement::both);
    placements[1].prefill = R;
    near(simulate(&problem, &placements, &[0], Phase::Prefill).ms, 31.0 + 6.0 + 13.0);
    problem.budget.kv = crate::KvHome::Host;
    near(run(&problem, [C, R, C, C], 0, Phase::Decode).ms, 31.0 + 6.0 + 26.0);
    // A streamed block's weights are one copy.
    problem.budget.kv = crate::KvHome::Device;
    near(run(&problem, [C, S, C, C], 2, Phase::Decode).transfer_ms[0], 6.0 + 21.0);
}

#[test]
fn constants_of_a_streamed_block_are_not_copied() {
    let mut problem = four_layers();
    problem.blocks.iter_mut().for_each(|block| block.streamed = Streamed::new(vec![10, 65], Some((0, 25))));
    let simulation = run(&problem, [C, C, S, C], 2, Phase::Decode);
    near(simulation.transfer_ms[0], 15.0);
    assert_eq!(simulation.bytes_moved, 75);
}

#[test]
fn state_is_handed_over_once_if_the_phases_differ() {
    let mut problem = four_layers();
    problem.blocks[1].kv_bytes = 50;
    let mut placements = [C, C, R, R].map(BlockPlacement::both);
    placements[1].prefill = R;
    near(simulate(&problem, &placements, &[0], Phase::Decode).ms, 22.0);
    near(simulate(&problem, &placements, &[0], Phase::Prefill).ms, 13.0 + 10.0);
}

#[test]
fn state_on_the_host_is_copied_in_and_out() {
    let mut problem = four_layers();
    problem.budget.kv = crate::KvHome::Host;
    problem.blocks[2].kv_bytes = 50;
    near(run(&problem, [C, C, R, R], 0, Phase::Decode).ms, 22.0 + 20.0);
}

/// While a partition computes and returns its state, that of the next one comes.
#[test]
fn state_on_the_host_is_copied_ahead() {
    let mut problem = four_layers();
    problem.budget.kv = crate::KvHome::Host;
    problem.blocks[1..].iter_mut().for_each(|block| block.kv_bytes = 50);
    // The first state comes while the host computes; then computing for 1 ms and 10 ms of copying back hide the next.
    let simulation = run(&problem, [C, R, R, R], 0, Phase::Decode);
    near(simulation.ms, 10.0 + 3.0 * (1.0 + 10.0));
    near(simulation.transfer_ms[0], 6.0 * 10.0);
    assert_eq!(simulation.bytes_moved, 6 * 50);
    // Slower copies to the GPU: they follow each other without a break, two of them beside the copies back.
    problem.gpus[0].to_device = 2.5;
    near(run(&problem, [C, R, R, R], 0, Phase::Decode).ms, 20.0 + 20.0 + 20.0 + 11.0);
    // Weights pause meanwhile.
    let streamed = run(&problem, [C, S, S, C], 2, Phase::Decode);
    assert!(streamed.ms >= 2.0 * (40.0 + 20.0), "the link is busy without a break: {}", streamed.ms);
    // With several sequences too, one after the other.
    problem.gpus[0].to_device = 5.0;
    near(crate::simulate::queued_ms(&problem, &[C, R, R, R].map(BlockPlacement::both), &[0], Phase::Decode), 43.0);
}

/// State that is kept on the host stays on the GPU during all passes of the prompt if tokens are decoded on the host; if tokens are decoded
/// on the GPU, it is copied for each of them.
#[test]
fn state_on_the_host_stays_on_the_gpu_for_one_phase() {
    let mut problem = four_layers();
    problem.budget.kv = crate::KvHome::Host;
    problem.blocks[2].kv_bytes = 50;
    problem.load.passes = vec![1, 1];
    let costs = problem.cpu.iter_mut().chain(&mut problem.gpus[0].blocks);
    costs.for_each(|cost| cost.prefill_ms = vec![cost.decode_ms; 2]);
    let ms = |problem: &Problem, prefill, decode, phase| {
        let mut placements = [C, C, C, C].map(BlockPlacement::both);
        placements[2] = BlockPlacement { prefill, decode };
        simulate(problem, &placements, &[0], phase).ms
    };
    near(ms(&problem, R, C, Phase::Prefill), 2.0 * 31.0 + 10.0);
    near(ms(&problem, R, C, Phase::Decode), 40.0);
    near(ms(&problem, C, R, Phase::Prefill), 80.0);
    near(ms(&problem, C, R, Phase::Decode), 31.0 + 20.0);
    near(ms(&problem, R, R, Phase::Prefill), 2.0 * (31.0 + 20.0));
    // State that each pass returns in a new buffer has no buffer of its own on the GPU.
    problem.blocks[2].kv_grows = Some(GrowingState { fixed: 50, token: 0 });
    near(ms(&problem, R, C, Phase::Prefill), 2.0 * (31.0 + 20.0));
    problem.budget.kv = crate::KvHome::Device;
    near(ms(&problem, C, R, Phase::Prefill), 2.0 * (40.0 + 20.0));
    // Growing state is copied with its current size: 10 and 15 bytes around the first pass, 15 and 20 around the second.
    problem.blocks[2].kv_grows = Some(GrowingState { fixed: 10, token: 5 });
    near(ms(&problem, C, R, Phase::Prefill), 2.0 * 40.0 + 2.0 + 3.0 + 3.0 + 4.0);
}

/// Of state on the host only the filled part is copied, in steps of 64 tokens; state on a GPU is copied whole.
#[test]
fn only_the_filled_part_of_state_on_the_host_is_copied() {
    let mut problem = four_layers();
    problem.budget.kv = crate::KvHome::Host;
    problem.blocks[2].kv_bytes = 1000;
    problem.blocks[2].kv_filled = Some(FilledState { fixed: 0, token: 1, capacity: 1000 });
    let ms = |problem: &Problem, tokens: u64| {
        let mut problem = problem.clone();
        (problem.load.prompt_tokens, problem.load.new_tokens) = (tokens, 0);
        run(&problem, [C, C, R, R], 0, Phase::Decode).ms - 22.0
    };
    // Ten tokens are laid out as 64, which are copied in and out at 5 bytes per millisecond; 65 tokens as 128.
    near(ms(&problem, 10), 2.0 * 64.0 / 5.0);
    near(ms(&problem, 64), 2.0 * 128.0 / 5.0);
    near(ms(&problem, 999), 2.0 * 1000.0 / 5.0);
    problem.blocks[2].kv_filled = None;
    near(ms(&problem, 10), 2.0 * 1000.0 / 5.0);
}

#[test]
fn weights_that_exceed_memory_are_read_from_disk() {
    let mut problem = four_layers();
    problem.disk_bytes_per_ms = Some(3.0);
    problem.budget.ram = Some(250);
    // Three blocks of 100 bytes on the host, and 250 bytes of memory: three quarters of each block are locked, and the rest of
    // one block is in memory while it computes. Reading 75 bytes takes 25 ms, which overlap with 31 ms of computation.
    near(run(&problem, [C, C, C, R], 0, Phase::Decode).ms, 31.0);
    problem.disk_bytes_per_ms = Some(1.5);
    let simulation = run(&problem, [C, C, C, R], 0, Phase::Decode);
    near(simulation.ms, 50.0);
    near(simulation.stall_ms, 19.0);
    assert_eq!(simulation.disk_bytes, 75);
    // Read-ahead buffers leave less memory for weights.
    problem.budget.read_ahead = 50;
    assert_eq!(run(&problem, [C, C, C, R], 0, Phase::Decode).disk_bytes, 150);
    // A table of which a pass reads only rows stays on disk, and no pass waits for it.
    problem.blocks[0].kind = BlockRole::Embedding;
    problem.budget.read_ahead = 0;
    problem.budget.ram = Some(190);
    assert_eq!(run(&problem, [C, C, C, R], 0, Phase::Decode).disk_bytes, 20);
}

/// Three layers on the host have 130 bytes of state each, of which all are read: at 65 % of the rate of weights, 10 bytes a
/// millisecond take 60 ms for 390 bytes, of which 31 ms pass while the layers compute.
#[test]
fn states_are_read_more_slowly_than_weights() {
    let mut problem = four_layers();
    (problem.disk_bytes_per_ms, problem.budget.host_kv_on_disk) = (Some(10.0), true);
    problem.blocks.iter_mut().for_each(|block| block.kv_bytes = 130);
    let simulation = run(&problem, [C, C, C, R], 0, Phase::Decode);
    near(simulation.ms, 60.0);
    near(simulation.stall_ms, 29.0);
}

#[test]
fn reading_from_disk_and_computing_slow_each_other_down() {
    let mut problem = four_layers();
    (problem.disk_bytes_per_ms, problem.budget.ram) = (Some(3.0), Some(250));
    problem.disk_contention = Contention { compute: 1.5, transfer: 1.25 };
    // Of a token's 31 ms the host computes 30. One of the 25 ms of reads passes while the GPU computes. The others take 30 ms, in
    // which the host does 20 ms of its work.
    let simulation = run(&problem, [C, C, C, R], 0, Phase::Decode);
    near(simulation.ms, 41.0);
    near(simulation.stall_ms, 0.0);
    near(simulation.cpu_ms, 40.0);
    // Reads of 50 ms lose a fifth of the 45 ms in which the host computes.
    problem.disk_bytes_per_ms = Some(1.5);
    let simulation = run(&problem, [C, C, C, R], 0, Phase::Decode);
    near(simulation.ms, 59.0);
    near(simulation.cpu_ms, 45.0);
    near(simulation.stall_ms, 13.0);
    let reads = simulation.timeline.spans.iter().find(|span| span.lane == "disk").unwrap();
    near(reads.duration_us, 59e3);
    // With all weights in memory nothing is slowed.
    problem.budget.ram = None;
    near(run(&problem, [C, C, C, R], 0, Phase::Decode).ms, 31.0);
}

/// Of a token's 31 ms the host computes 30. 75 bytes are decompressed from 38, which are read in 12.7 ms.
#[test]
fn threads_that_decompress_and_threads_that_compute_share_the_cores() {
    let mut problem = four_layers();
    (problem.disk_bytes_per_ms, problem.budget.ram) = (Some(3.0), Some(250));
    problem.budget.packing = Packing { growth_permille: 0, decompressed_permille: 1000, read_permille: 500 };
    let mut ms = |bytes_per_ms| {
        problem.decompression = Some(Decompression { bytes_per_ms, host_share: 0.5 });
        run(&problem, [C, C, C, R], 0, Phase::Decode).ms
    };
    // 75 ms of decompressing take as much longer as half of the cores' 30 ms of computing.
    near(ms(1.0), 75.0 + 15.0);
    // 10 ms of decompressing take 5 ms from the computing.
    near(ms(7.5), 31.0 + 5.0);
}

#[test]
fn nothing_computes_while_selected_experts_are_read() {
    let mut problem = four_layers();
    (problem.disk_bytes_per_ms, problem.budget.ram) = (Some(3.0), Some(250));
    let experts = Experts { bytes: 80, count: 8, active: 2 };
    problem.blocks.iter_mut().for_each(|block| block.experts = Some(experts));
    let simulation = run(&problem, [C, C, C, R], 0, Phase::Decode);
    assert!(simulation.disk_bytes > 0);
    near(simulation.ms, 31.0 + simulation.disk_bytes as f64 / 3.0);
    near(simulation.stall_ms, simulation.disk_bytes as f64 / 3.0);
}

/// Experts are read while nothing computes, so the disk need not be busy all the time to be what takes longest.
#[test]
fn reading_experts_is_the_bottleneck_where_it_takes_longer_than_computing() {
    let mut problem = four_layers();
    (problem.gpus, problem.budget.vram) = (vec![], vec![]);
    let experts = Experts { bytes: 80, count: 8, active: 2 };
    problem.blocks.iter_mut().for_each(|block| (block.experts, block.decode.bytes) = (Some(experts), 100));
    problem.budget.ram = Some(250);
    let options =
        Options { planner: Planner::Exact, objective: Objective::Decode, mechanisms: Mechanisms::All, slots: None };
    let of = |disk_bytes_per_ms| {
        let problem = Problem { disk_bytes_per_ms: Some(disk_bytes_per_ms), ..problem.clone() };
        let solution = evaluate(&problem, &options, vec![BlockPlacement::both(C); 4], vec![]);
        (bottleneck(&problem, &solution, Phase::Decode), solution.decode_ms)
    };
    // 40 ms of computing; three quarters of all with the slow disk.
    let (found, ms) = of(0.4);
    assert!(found == Bottleneck::Disk && ms > 80.0, "{found:?}: {ms} ms");
    let (found, ms) = of(4.0);
    assert!(found == Bottleneck::Compute(DeviceId::Cpu) && ms < 80.0, "{found:?}: {ms} ms");
}

#[test]
fn a_sequence_computes_while_experts_of_others_are_read() {
    let mut problem = four_layers();
    (problem.disk_bytes_per_ms, problem.budget.ram) = (Some(3.0), Some(250));
    (problem.gpus, problem.budget.vram) = (vec![], vec![]);
    let experts = Experts { bytes: 80, count: 8, active: 2 };
    problem.blocks.iter_mut().for_each(|block| (block.experts, block.decode.bytes) = (Some(experts), 100));
    let run = |problem: &Problem| simulate(problem, &[BlockPlacement::both(C); 4], &[], Phase::Decode);
    let alone = run(&problem);
    near(alone.stall_ms, alone.disk_bytes as f64 / 3.0);
    // Two sequences, each of which takes 10 ms for a layer, a fifth of them for the experts: 20 bytes of 100.
    problem.load.sequences = 2;
    problem.cpu.iter_mut().for_each(|cost| cost.decode_ms *= 2.0);
    let reading = |simulation: &Simulation| simulation.disk_bytes as f64 / 3.0;
    // While the first computes, the experts of the second are read.
    let both = run(&problem);
    near(both.stall_ms, reading(&both) - 4.0 * 2.0);
    // They select 35 bytes of a block, 15 of them besides those of the first: with a faster disk that is all that computing hides.
    problem.disk_bytes_per_ms = Some(30.0);
    let both = run(&problem);
    near(both.stall_ms, both.disk_bytes as f64 / 30.0 * 20.0 / 35.0);
}

#[test]
fn streaming_without_slots_never_finishes() {
    assert!(run(&four_layers(), [C, C, S, C], 0, Phase::Decode).ms.is_infinite());
}
