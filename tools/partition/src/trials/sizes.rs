//! Models of real size, and properties of the planner on problems too large for brute force.

use crate::{
    BlockPlacement, BlockRole, BlockSpec, Bottleneck, Budget, Contention, Cost, DeviceId, GpuCosts, Mechanisms,
    Objective, Options, OverBudget, Phase, Placement, Planner, Problem, RowBatching, Solution, Streamed, Work,
    Workload, best, bottleneck, evaluate, explain_runs, fits, plan, sweep, usage, useless_gpus,
};
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

/// A machine with one GPU, in 1e9 bytes and 1e12 operations per second.
#[derive(Clone, Copy)]
struct TrialMachine {
    cpu: (f64, f64),
    gpu: (f64, f64),
    link: f64,
    vram: u64,
    ram: Option<u64>,
    disk: Option<f64>,
    contention: f64,
}

const DESKTOP: TrialMachine = TrialMachine {
    cpu: (60.0, 0.8),
    gpu: (900.0, 120.0),
    link: 24.0,
    vram: 24 * GIB,
    ram: Some(64 * GIB),
    disk: Some(5.0),
    contention: 1.2,
};

const SERVER: TrialMachine = TrialMachine {
    cpu: (300.0, 3.0),
    gpu: (4000.0, 700.0),
    link: 50.0,
    vram: 40 * GIB,
    ram: Some(1024 * GIB),
    disk: None,
    contention: 1.0,
};

/// A block of which a token reads the `active` parameters; a parameter has 4.5 bits, scales included.
fn block(number: u32, kind: BlockRole, parameters: u64, active: u64, kv_bytes: u64) -> BlockSpec {
    let bytes = |parameters: u64| parameters * 9 / 16;
    BlockSpec {
        label: format!("block {number}"),
        kind,
        weights: vec![(number, bytes(parameters))],
        streamed: Streamed::whole(bytes(parameters)),
        experts: None,
        kv_bytes,
        kv_tensors: 2,
        kv_grows: None,
        kept_on_host: false,
        assigned: None,
        needs_gpu: false,
        kv_filled: None,
        workspace_bytes: 256 << 20,
        folded_bytes: 0,
        widened_bytes: 0,
        session_bytes: 0,
        score_bytes: 0,
        boundary_bytes: 16 << 10,
        boundary_tensors: 2,
        decode: Work { flops: 2 * active, bytes: bytes(active) + kv_bytes },
        prefill: Work { flops: 2 * active, bytes: bytes(parameters) },
    }
}

/// 70 B parameters in 80 equal layers.
fn dense(layers: u32) -> Vec<BlockSpec> {
    let mut blocks = vec![block(0, BlockRole::Embedding, 1_050_000_000, 8192, 0)];
    blocks.extend((1..=layers).map(|i| block(i, BlockRole::Layer(i - 1), 856_000_000, 856_000_000, 16 << 20)));
    blocks.push(block(layers + 1, BlockRole::Head, 1_050_000_000, 1_050_000_000, 0));
    blocks
}

/// 61 layers, three of them dense and 58 with 256 experts of which 8 and a shared one are read for a token.
fn experts() -> Vec<BlockSpec> {
    let mut blocks = vec![block(0, BlockRole::Embedding, 926_000_000, 7168, 0)];
    blocks.extend((1..4).map(|i| block(i, BlockRole::Layer(i - 1), 583_000_000, 583_000_000, 5 << 20)));
    blocks.extend((4..62).map(|i| block(i, BlockRole::Layer(i - 1), 11_500_000_000, 583_000_000, 5 << 20)));
    blocks.push(block(62, BlockRole::Head, 926_000_000, 926_000_000, 0));
    blocks
}

fn problem(blocks: Vec<BlockSpec>, machine: TrialMachine, prompt: u64, new_tokens: u64) -> Problem {
    let ms = |work: Work, (bytes, flops): (f64, f64)| {
        1e3 * (work.bytes as f64 / (bytes * 1e9)).max(work.flops as f64 / (flops * 1e12))
    };
    let cost = |block: &BlockSpec, rates| Cost {
        decode_ms: ms(block.decode, rates),
        short_pass_ms: vec![],
        prefill_ms: vec![ms(Work { flops: block.prefill.flops * prompt, bytes: block.prefill.bytes }, rates)],
    };
    Problem {
        cpu: blocks.iter().map(|block| cost(block, machine.cpu)).collect(),
        gpus: vec![GpuCosts {
            blocks: blocks.iter().map(|block| cost(block, machine.gpu)).collect(),
            launch_ms: 0.02,
            to_device: machine.link * 1e6,
            from_device: machine.link * 1e6,
            latency_ms: 0.01,
            compute_contention: machine.contention,
            link_contention: machine.contention,
        }],
        blocks,
        cpu_launch_ms: 0.05,
        pass_overhead_ms: 0.1,
        disk_bytes_per_ms: machine.disk.map(|rate| rate * 1e6),
        disk_contention: Contention::NONE,
        decompression: None,
        budget: Budget { vram: vec![machine.vram], ram: machine.ram, margin: GIB / 2, ..Budget::default() },
        load: Workload { batch: 1, sequences: 1, prompt_tokens: prompt, new_tokens, passes: vec![prompt] },
        row_batching: RowBatching::Never,
        expert_hits: vec![],
        cuts: vec![],
    }
}

fn options(mechanisms: Mechanisms, objective: Objective) -> Options {
    Options { planner: Planner::Exact, objective, mechanisms, slots: None }
}

/// The placement of `--gpu-layers` that decodes fastest and fits.
fn best_contiguous(problem: &Problem, options: &Options) -> Solution {
    let solution_with = |count: u64| {
        let places = crate::gpu_layers(problem, count);
        let placement = |device: &DeviceId| {
            BlockPlacement::both(if *device == DeviceId::Cpu { Placement::Cpu } else { Placement::Resident(0) })
        };
        let placements: Vec<BlockPlacement> = places.iter().map(placement).collect();
        fits(problem, &placements, &[0], options.mechanisms)
            .is_ok()
            .then(|| evaluate(problem, options, placements, vec![0]))
    };
    let all = (0..=problem.blocks.len() as u64).filter_map(solution_with);
    all.min_by(|a, b| a.objective_ms.total_cmp(&b.objective_ms)).expect("nothing on the GPU fits")
}

#[test]
fn without_streaming_large_models_are_proven() {
    for blocks in [dense(80), experts()] {
        let problem = problem(blocks, TrialMachine { ram: None, ..DESKTOP }, 512, 128);
        for objective in [Objective::Decode, Objective::Prefill, Objective::Mixed] {
            let options = options(Mechanisms::ResidentCpu, objective);
            let solution = plan(&problem, &options).unwrap();
            assert!(solution.proven, "{objective:?}: {} of {}", solution.bound_ms, solution.objective_ms);
            assert!(solution.objective_ms <= best_contiguous(&problem, &options).objective_ms);
        }
    }
}

#[test]
fn streaming_over_an_idle_link_is_faster_and_close_to_the_bound() {
    let problem = problem(dense(80), DESKTOP, 512, 128);
    for (objective, gain) in [(Objective::Decode, 1.05), (Objective::Prefill, 10.0), (Objective::Mixed, 1.5)] {
        let without = plan(&problem, &options(Mechanisms::ResidentCpu, objective)).unwrap();
        let with = plan(&problem, &options(Mechanisms::All, objective)).unwrap();
        assert!(without.objective_ms / with.objective_ms > gain, "{objective:?}: {with:?}");
        // The bound for one or two slots is weaker than for three.
        assert!(with.gap() < 0.04, "{objective:?}: gap {}", with.gap());
        assert!(fits(&problem, &with.placements, &with.slots, Mechanisms::All).is_ok());
    }
}

/// A ring of three blocks takes the place of blocks that could stay on a small GPU.
#[test]
fn a_small_gpu_has_fewer_slots() {
    let block = dense(10)[2].weights.iter().map(|(_, bytes)| bytes).sum::<u64>();
    for (blocks, gain) in [(2, 1.2), (4, 1.02)] {
        let machine = TrialMachine { vram: blocks * block + GIB, ..DESKTOP };
        let problem = problem(dense(10), machine, 2048, 32);
        let solved = |slots| plan(&problem, &Options { slots, ..options(Mechanisms::All, Objective::Mixed) }).unwrap();
        let (chosen, three) = (solved(None), solved(Some(3)));
        assert!((1..3).contains(&chosen.slots[0]), "{blocks}: {:?}", chosen.slots);
        assert!(
            three.objective_ms / chosen.objective_ms > gain,
            "{blocks}: {} {}",
            three.objective_ms,
            chosen.objective_ms
        );
    }
}

#[test]
fn experts_are_streamed_for_the_prompt_and_decoded_in_place() {
    let problem = problem(experts(), SERVER, 512, 128);
    let solution = plan(&problem, &options(Mechanisms::All, Objective::Mixed)).unwrap();
    let differ = solution.placements.iter().filter(|placement| placement.prefill != placement.decode).count();
    assert!(differ > 20, "{differ} blocks change places between the phases");
    assert!(solution.gap() < 0.03, "gap {}", solution.gap());
}

#[test]
fn the_same_problem_has_the_same_plan() {
    let problem = problem(dense(30), DESKTOP, 512, 128);
    let options = options(Mechanisms::All, Objective::Mixed);
    assert_eq!(best(&problem, &options, 4), best(&problem.clone(), &options, 4));
}

/// With two GPUs the integer program often has no good solution within its nodes, and a limit on host memory makes it harder. The plan is good
/// nevertheless: it streams the few layers that no GPU holds.
#[test]
fn two_gpus_stream_what_they_cannot_hold() {
    let mut blocks = vec![block(0, BlockRole::Embedding, 525_000_000, 4096, 0)];
    blocks.extend((1..=32).map(|i| block(i, BlockRole::Layer(i - 1), 218_000_000, 218_000_000, 32 << 20)));
    blocks.push(block(33, BlockRole::Head, 525_000_000, 525_000_000, 0));
    blocks.iter_mut().for_each(|block| block.workspace_bytes = 64 << 20);
    let options = options(Mechanisms::All, Objective::Mixed);
    for (cpu, gpu, contention, disk) in
        [((30.0, 0.3), (400.0, 40.0), 1.0, Some(2.0)), ((50.0, 0.5), (400.0, 40.0), 1.2, None)]
    {
        let machine = TrialMachine { cpu, gpu, link: 20.0, contention, disk, ram: None, vram: 0 };
        let mut problem = problem(blocks.clone(), machine, 512, 128);
        problem.gpus.push(problem.gpus[0].clone());
        (problem.budget.vram, problem.budget.margin) = (vec![3 * GIB, 2 * GIB], 0);
        let free = plan(&problem, &options).unwrap();
        let needs = usage(&problem, &free.placements, &free.slots).host.total();
        assert!(free.gap() < 0.1, "gap {}: {:?}", free.gap(), free.placements);
        for ram in [needs + needs / 4, 64 * GIB] {
            problem.budget.ram = Some(ram);
            let limited = plan(&problem, &options).unwrap();
            assert!(limited.gap() < 0.1, "{ram}: gap {}: {:?}", limited.gap(), limited.placements);
        }
        assert_eq!(plan(&problem, &options).unwrap().placements, free.placements, "a limit that holds everything");
    }
}

#[test]
fn the_best_placements_differ_and_are_sorted() {
    let problem = problem(dense(30), TrialMachine { vram: 8 * GIB, ..DESKTOP }, 512, 128);
    let options = options(Mechanisms::ResidentCpu, Objective::Decode);
    let few = best(&problem, &options, 4).unwrap();
    assert_eq!(few.len(), 4);
    assert_eq!(few[0], plan(&problem, &options).unwrap());
    for pair in few.windows(2) {
        assert!(pair[0].objective_ms <= pair[1].objective_ms * (1.0 + 1e-9));
        assert_ne!(pair[0].placements, pair[1].placements);
    }
    assert!(few[1..].iter().all(|solution| !solution.proven));
}

#[test]
fn more_memory_is_never_worse() {
    let problem = problem(dense(40), DESKTOP, 512, 128);
    let vram: Vec<u64> = [12, 3, 6, 20].map(|gib| gib * GIB).to_vec();
    for mechanisms in [Mechanisms::ResidentCpu, Mechanisms::All] {
        let mut points = sweep(&problem, &options(mechanisms, Objective::Decode), &vram);
        assert_eq!(points.iter().map(|point| point.vram).collect::<Vec<_>>(), vram);
        points.sort_by_key(|point| point.vram);
        let ms: Vec<f64> = points.iter().map(|point| point.solution.as_ref().unwrap().objective_ms).collect();
        assert!(ms.windows(2).all(|pair| pair[1] <= pair[0] * (1.0 + 1e-9)), "{ms:?}");
        assert!(ms[3] < 0.5 * ms[0], "{ms:?}");
    }
}

#[test]
fn equal_costs_are_decided_by_crossings_then_order() {
    let mut problem = problem(dense(6), DESKTOP, 16, 16);
    problem.gpus[0].blocks = problem.cpu.clone();
    (problem.cpu_launch_ms, problem.gpus[0].launch_ms, problem.gpus[0].latency_ms) = (0.0, 0.0, 0.0);
    problem.gpus[0].to_device = 1e300;
    problem.gpus[0].from_device = 1e300;
    let solution = plan(&problem, &options(Mechanisms::ResidentCpu, Objective::Decode)).unwrap();
    assert_eq!(solution.placements, vec![BlockPlacement::both(Placement::Cpu); 8]);
}

#[test]
fn an_explanation_names_the_bottleneck_and_the_times_elsewhere() {
    let problem = problem(dense(80), DESKTOP, 512, 128);
    let options = options(Mechanisms::ResidentCpu, Objective::Decode);
    let solution = plan(&problem, &options).unwrap();
    assert_eq!(bottleneck(&problem, &solution, Phase::Decode), Bottleneck::Compute(DeviceId::Cpu));
    let runs = explain_runs(&problem, &options, &solution, &|_| vec![]);
    let on_gpu = runs.iter().find(|run| run.placement == BlockPlacement::both(Placement::Resident(0))).unwrap();
    let back = on_gpu.elsewhere.iter().find(|other| other.place == Placement::Cpu).unwrap();
    assert!(back.objective_ms > solution.objective_ms && back.over_budget.is_none());
    let on_host =
        runs.iter().find(|run| run.placement == BlockPlacement::both(Placement::Cpu) && run.blocks.len() > 1).unwrap();
    let on_gpu = on_host.elsewhere.iter().find(|other| other.place == Placement::Resident(0)).unwrap();
    assert!(on_gpu.objective_ms < solution.objective_ms);
    assert!(matches!(on_gpu.over_budget, Some(OverBudget { device: DeviceId::Gpu(0), .. })));
}

/// Blocks that a user keeps on the host say nothing of their neighbours there, which may move.
#[test]
fn what_must_stay_on_the_host_is_explained_apart_from_what_may_move() {
    let mut problem = problem(dense(6), DESKTOP, 512, 128);
    problem.blocks[2].kept_on_host = true;
    let options = options(Mechanisms::ResidentCpu, Objective::Decode);
    let placements = vec![BlockPlacement::both(Placement::Cpu); problem.blocks.len()];
    let solution = evaluate(&problem, &options, placements, vec![0]);
    let runs = explain_runs(&problem, &options, &solution, &|_| vec![]);
    assert_eq!(runs.iter().map(|run| run.blocks.clone()).collect::<Vec<_>>(), [0..2, 2..3, 3..8]);
    assert!(runs[2].elsewhere.iter().any(|other| other.place == Placement::Resident(0)));
}

/// As the planner would.
#[test]
fn an_explanation_streams_with_the_number_of_slots_that_fits() {
    let mut problem = problem(dense(6), DESKTOP, 512, 128);
    let options = options(Mechanisms::All, Objective::Decode);
    let on_host = vec![BlockPlacement::both(Placement::Cpu); problem.blocks.len()];
    let streamed = vec![BlockPlacement::both(Placement::Streamed(0)); problem.blocks.len()];
    problem.budget.vram = vec![0];
    let refusal = fits(&problem, &streamed, &[1], options.mechanisms).unwrap_err();
    for (vram, is_enough) in [(refusal.required_budget(), true), (refusal.required_budget() / 2, false)] {
        problem.budget.vram = vec![vram];
        assert!(fits(&problem, &streamed, &[3], options.mechanisms).is_err());
        let solution = evaluate(&problem, &options, on_host.clone(), vec![0]);
        let runs = explain_runs(&problem, &options, &solution, &|_| vec![]);
        let on_gpu = runs[0].elsewhere.iter().find(|other| other.place == Placement::Streamed(0)).unwrap();
        assert_eq!((runs.len(), on_gpu.over_budget.is_none()), (1, is_enough), "{:?}", on_gpu.over_budget);
    }
}

#[test]
fn a_prompt_that_streams_is_limited_by_the_link() {
    let problem = problem(dense(80), DESKTOP, 64, 128);
    let options = options(Mechanisms::All, Objective::Prefill);
    let solution = plan(&problem, &options).unwrap();
    assert_eq!(bottleneck(&problem, &solution, Phase::Prefill), Bottleneck::Link(0));
}

#[test]
fn too_little_host_memory_is_refused_with_the_required_budget() {
    let mut problem = problem(dense(80), TrialMachine { ram: Some(20 * GIB), disk: None, ..DESKTOP }, 512, 128);
    for mechanisms in [Mechanisms::ResidentCpu, Mechanisms::All] {
        let options = options(mechanisms, Objective::Decode);
        problem.budget.ram = Some(20 * GIB);
        problem.budget.vram = vec![12 * GIB];
        let refusal = plan(&problem, &options).unwrap_err();
        assert_eq!((refusal.device, refusal.budget), (DeviceId::Cpu, 20 * GIB));
        problem.budget.ram = Some(refusal.required_budget());
        assert!(plan(&problem, &options).is_ok());
        problem.budget.ram = Some(refusal.required_budget() - 256 * (1 << 20));
        assert!(plan(&problem, &options).is_err());
    }
}

#[test]
fn a_gpu_of_zero_bytes_is_left_empty_and_a_host_of_zero_bytes_is_refused() {
    let mut problem = problem(dense(8), DESKTOP, 512, 128);
    for planner in [Planner::Exact, Planner::Greedy] {
        let options = Options { planner, ..options(Mechanisms::ResidentCpu, Objective::Decode) };
        problem.budget.vram = vec![0];
        problem.budget.ram = None;
        let solution = plan(&problem, &options).unwrap();
        assert!(solution.placements.iter().all(|placement| *placement == BlockPlacement::both(Placement::Cpu)));
        let needed = useless_gpus(&problem, &options).unwrap();
        problem.budget.vram = vec![needed.required_budget()];
        assert_eq!(useless_gpus(&problem, &options), None, "{planner:?}");
        (problem.budget.vram, problem.budget.ram) = (vec![], Some(0));
        problem.gpus.clear();
        assert_eq!(plan(&problem, &options).unwrap_err().device, DeviceId::Cpu);
        problem = self::problem(dense(8), DESKTOP, 512, 128);
    }
}

#[test]
fn no_block_is_placed_where_it_cannot_compute() {
    let mut problem = problem(dense(8), DESKTOP, 512, 128);
    let never = Cost { decode_ms: f64::INFINITY, short_pass_ms: vec![], prefill_ms: vec![f64::INFINITY] };
    problem.gpus[0].blocks[3] = never;
    for planner in [Planner::Exact, Planner::Greedy] {
        let options = Options { planner, ..options(Mechanisms::ResidentCpu, Objective::Decode) };
        let solution = plan(&problem, &options).unwrap();
        assert_eq!(solution.placements[3], BlockPlacement::both(Placement::Cpu));
        assert!(solution.objective_ms.is_finite());
        assert!(solution.placements.contains(&BlockPlacement::both(Placement::Resident(0))));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 25, ..ProptestConfig::default() })]

    #[test]
    fn never_worse_than_greedy(seed: u64, blocks in 2usize..7, gpus in 1usize..3) {
        let problem = super::instances::instance(seed, blocks, gpus);
        for objective in [Objective::Decode, Objective::Mixed] {
            let exact = options(Mechanisms::ResidentCpu, objective);
            let greedy = Options { planner: Planner::Greedy, ..exact };
            if let Ok(greedy) = plan(&problem, &greedy) {
                let exact = plan(&problem, &exact).unwrap();
                prop_assert!(exact.objective_ms <= greedy.objective_ms * (1.0 + 1e-9));
                prop_assert_eq!((greedy.bound_ms, greedy.proven), (0.0, false));
            }
        }
    }

    #[test]
    fn more_vram_or_ram_is_never_worse(seed: u64, blocks in 1usize..5, more in 1u64..2000) {
        let problem = super::instances::instance(seed, blocks, 1);
        let options = options(Mechanisms::All, Objective::Mixed);
        if let Ok(before) = plan(&problem, &options) {
            let (mut vram, mut ram) = (problem.clone(), problem.clone());
            vram.budget.vram[0] += more;
            ram.budget.ram = problem.budget.ram.map(|ram| ram + more);
            for problem in [vram, ram] {
                prop_assert!(plan(&problem, &options).unwrap().objective_ms <= before.objective_ms * (1.0 + 1e-9));
            }
        }
    }
}
