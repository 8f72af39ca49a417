//! Instances worked out by hand.

use crate::{
    Block, BlockKind, Budget, Choice, Cost, FilledState, GpuCosts, GrowingState, Phase, Problem, Simulation, Streamed,
    Where, Work, Workload, simulate,
};

/// Four layers of 100 bytes. A layer takes 10 ms on the host and 1 ms on the GPU, its copy 20 ms; nothing else costs time.
pub fn four_layers() -> Problem {
    let block = |i: u32| Block {
        label: format!("layers.{i}"),
        kind: BlockKind::Layer(i),
        weights: vec![(i, 100)],
        streamed: Streamed::whole(100),
        kv_bytes: 0,
        kv_tensors: 2,
        kv_grows: None,
        kv_filled: None,
        workspace_bytes: 0,
        boundary_bytes: 0,
        boundary_tensors: 1,
        decode: Work::default(),
        prefill: Work::default(),
    };
    let cost = |ms: f64| Cost { decode_ms: ms, prefill_ms: vec![ms] };
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
        pass_ms: 0.0,
        disk_bytes_per_ms: None,
        budget: Budget { vram: vec![1000], ..Budget::default() },
        load: Workload { batch: 1, prompt_tokens: 1, new_tokens: 1, passes: vec![1] },
        cuts: vec![],
    }
}

const C: Where = Where::Cpu;
const R: Where = Where::Resident(0);
const S: Where = Where::Streamed(0);

fn run(problem: &Problem, places: [Where; 4], slots: u32, phase: Phase) -> Simulation {
    simulate(problem, &places.map(Choice::both), &[slots], phase)
}

fn near(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-6, "{a} is not {b}");
}

#[test]
fn a_chain_adds_up() {
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
    // A streamed block is a partition of its own; its copies of 20 ms each bound the token.
    near(run(&problem, [R, S, S, R], 3, Phase::Decode).ms, 40.0);
    problem.cuts = vec![1];
    near(run(&problem, [C, C, R, R], 0, Phase::Decode).ms, 23.25);
}

#[test]
fn a_copy_hides_behind_the_host() {
    let problem = four_layers();
    // 30 ms on the host, 1 ms on the GPU, a copy of 20 ms behind it.
    let simulation = run(&problem, [C, C, S, C], 2, Phase::Decode);
    near(simulation.ms, 31.0);
    near(simulation.stall_ms, 0.0);
    near(simulation.transfer_ms[0], 20.0);
    assert_eq!(simulation.bytes_moved, 100);
}

#[test]
fn copies_that_do_not_hide_decide() {
    let problem = four_layers();
    let simulation = run(&problem, [C, S, S, C], 4, Phase::Decode);
    // 20 ms on the host, 2 ms on the GPU, 40 ms of copies.
    near(simulation.ms, 40.0);
    near(simulation.stall_ms, 18.0);
}

#[test]
fn one_slot_makes_copying_and_computing_take_turns() {
    let problem = four_layers();
    // Each copy waits for the block before it: 20 ms hide behind the host, the other 20 ms do not.
    near(run(&problem, [C, C, S, S], 1, Phase::Decode).ms, 42.0);
    near(run(&problem, [C, C, S, S], 2, Phase::Decode).ms, 40.0);
}

#[test]
fn a_prompt_starts_cold() {
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
    // Copies end at 20 and 40: the second is there before the second pass wants it at 31 + 40.
    near(run(&problem, [C, C, S, C], 2, Phase::Prefill).ms, 31.0 + 62.0);
}

#[test]
fn contention_slows_both() {
    let mut problem = four_layers();
    problem.gpus[0].compute_contention = 2.0;
    problem.gpus[0].link_contention = 4.0;
    // While the copy runs the host does half and the copy a quarter: 30 ms of host work need 60 ms, in which 15 of the
    // 20 ms are copied. With two slots the copy goes on under the GPU (1 ms) and ends under the host of the next token:
    // per token the copy needs 20 = h / 4 + g, g at most 1 ms on the GPU, so the host is slowed all the time and 4 ms of
    // the copy are left, which the GPU waits for.
    let simulation = run(&problem, [C, C, S, C], 1, Phase::Decode);
    near(simulation.cpu_ms, 60.0);
    near(simulation.ms, 60.0 + 5.0 + 1.0);
}

#[test]
fn a_boundary_crosses_at_its_price_and_goes_ahead_of_weights() {
    let mut problem = four_layers();
    problem.gpus[0].latency_ms = 1.0;
    problem.blocks.iter_mut().for_each(|block| block.boundary_bytes = 5);
    // Into the GPU and out of it: 1 ms latency and 1 ms for 5 bytes each way.
    near(run(&problem, [C, R, R, C], 0, Phase::Decode).ms, 22.0 + 4.0);
    near(run(&problem, [C, R, C, R], 0, Phase::Decode).ms, 22.0 + 6.0);
    // Copies of 21 ms each and 2 ms of the boundary share the way there.
    near(run(&problem, [C, S, S, C], 4, Phase::Decode).ms, 44.0);
}

#[test]
fn each_tensor_of_a_boundary_or_a_state_is_a_copy_with_its_own_latency() {
    let mut problem = four_layers();
    problem.gpus[0].latency_ms = 1.0;
    problem.blocks.iter_mut().for_each(|block| (block.boundary_bytes, block.boundary_tensors) = (5, 2));
    // Each way 2 ms latency and 1 ms for the 5 bytes of both.
    let simulation = run(&problem, [C, R, R, C], 0, Phase::Decode);
    near(simulation.ms, 22.0 + 6.0);
    near(simulation.transfer_ms[0], 6.0);
    assert_eq!(simulation.bytes_moved, 10);
    // Three tensors of state, 10 ms for all their bytes: into a GPU and out of it around the one block, or once after the
    // prompt.
    (problem.blocks[1].kv_bytes, problem.blocks[1].kv_tensors) = (50, 3);
    let mut choices = [C, C, C, C].map(Choice::both);
    choices[1].prefill = R;
    near(simulate(&problem, &choices, &[0], Phase::Prefill).ms, 31.0 + 6.0 + 13.0);
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
fn state_moves_once_when_the_phases_differ() {
    let mut problem = four_layers();
    problem.blocks[1].kv_bytes = 50;
    let mut choices = [C, C, R, R].map(Choice::both);
    choices[1].prefill = R;
    near(simulate(&problem, &choices, &[0], Phase::Decode).ms, 22.0);
    near(simulate(&problem, &choices, &[0], Phase::Prefill).ms, 13.0 + 10.0);
}

#[test]
fn state_on_the_host_visits_both_ways() {
    let mut problem = four_layers();
    problem.budget.kv = crate::KvHome::Host;
    problem.blocks[2].kv_bytes = 50;
    near(run(&problem, [C, C, R, R], 0, Phase::Decode).ms, 22.0 + 20.0);
}

/// State on the host stays where a prompt is taken in until all of it is, if tokens are computed on the host; where they are
/// computed elsewhere, it comes for each of them.
#[test]
fn state_on_the_host_stays_for_one_phase() {
    let mut problem = four_layers();
    problem.budget.kv = crate::KvHome::Host;
    problem.blocks[2].kv_bytes = 50;
    problem.load.passes = vec![1, 1];
    let costs = problem.cpu.iter_mut().chain(&mut problem.gpus[0].blocks);
    costs.for_each(|cost| cost.prefill_ms = vec![cost.decode_ms; 2]);
    let ms = |problem: &Problem, prefill, decode, phase| {
        let mut choices = [C, C, C, C].map(Choice::both);
        choices[2] = Choice { prefill, decode };
        simulate(problem, &choices, &[0], phase).ms
    };
    near(ms(&problem, R, C, Phase::Prefill), 2.0 * 31.0 + 10.0);
    near(ms(&problem, R, C, Phase::Decode), 40.0);
    near(ms(&problem, C, R, Phase::Prefill), 80.0);
    near(ms(&problem, C, R, Phase::Decode), 31.0 + 20.0);
    near(ms(&problem, R, R, Phase::Prefill), 2.0 * (31.0 + 20.0));
    // What is another buffer after each pass has no room to stay in.
    problem.blocks[2].kv_grows = Some(GrowingState { fixed: 50, token: 0 });
    near(ms(&problem, R, C, Phase::Prefill), 2.0 * (31.0 + 20.0));
    problem.budget.kv = crate::KvHome::Device;
    near(ms(&problem, C, R, Phase::Prefill), 2.0 * (40.0 + 20.0));
    // What has greedy_run goes: 10, 15 and 20 bytes, of which the second pass takes over those of the first.
    problem.blocks[2].kv_grows = Some(GrowingState { fixed: 10, token: 5 });
    near(ms(&problem, C, R, Phase::Prefill), 2.0 * 40.0 + 2.0 + 3.0 + 3.0 + 4.0);
}

/// State on the host is copied as far as it is filled, in steps of 64 tokens; state on a GPU whole.
#[test]
fn state_on_the_host_visits_as_far_as_it_is_filled() {
    let mut problem = four_layers();
    problem.budget.kv = crate::KvHome::Host;
    problem.blocks[2].kv_bytes = 1000;
    problem.blocks[2].kv_filled = Some(FilledState { fixed: 0, token: 1, capacity: 1000 });
    let ms = |problem: &Problem, tokens: u64| {
        let mut problem = problem.clone();
        (problem.load.prompt_tokens, problem.load.new_tokens) = (tokens, 0);
        run(&problem, [C, C, R, R], 0, Phase::Decode).ms - 22.0
    };
    // Ten tokens are laid out as 64, which goes there and back at 5 bytes a millisecond; the 65th of 64 as 128.
    near(ms(&problem, 10), 2.0 * 64.0 / 5.0);
    near(ms(&problem, 64), 2.0 * 128.0 / 5.0);
    near(ms(&problem, 999), 2.0 * 1000.0 / 5.0);
    problem.blocks[2].kv_filled = None;
    near(ms(&problem, 10), 2.0 * 1000.0 / 5.0);
}

#[test]
fn what_memory_lacks_comes_from_disk() {
    let mut problem = four_layers();
    problem.disk_bytes_per_ms = Some(3.0);
    problem.budget.ram = Some(250);
    // Three blocks of 100 bytes on the host, and room for 250: three quarters of each stay, and a quarter of one lies there
    // while it is needed. 75 bytes take 25 ms, hidden behind 31 ms.
    near(run(&problem, [C, C, C, R], 0, Phase::Decode).ms, 31.0);
    problem.disk_bytes_per_ms = Some(1.5);
    let simulation = run(&problem, [C, C, C, R], 0, Phase::Decode);
    near(simulation.ms, 50.0);
    near(simulation.stall_ms, 19.0);
    assert_eq!(simulation.disk_bytes, 75);
    // What the process and reading ahead take leaves less room.
    problem.budget.reading = 50;
    assert_eq!(run(&problem, [C, C, C, R], 0, Phase::Decode).disk_bytes, 150);
    // A table of which rows are read stays on disk and is not waited for.
    problem.blocks[0].kind = BlockKind::Embedding;
    problem.budget.reading = 0;
    problem.budget.ram = Some(190);
    assert_eq!(run(&problem, [C, C, C, R], 0, Phase::Decode).disk_bytes, 20);
}

#[test]
fn streaming_without_slots_never_ends() {
    assert!(run(&four_layers(), [C, C, S, C], 0, Phase::Decode).ms.is_infinite());
}
