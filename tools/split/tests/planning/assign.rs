//! `--assign` with budgets: the planner places the blocks that it does not name.

use crate::support::{Done, LLAMA, fixture, planned, split};

/// Runs a dry run with these blocks assigned and this VRAM.
fn run(assign: &str, vram: &str) -> Done {
    split(&[fixture(LLAMA).to_str().unwrap(), "--assign", assign, "--vram", vram, "--dry-run", "--kv", "follow"])
}

/// A named placement that fits is planned, with any larger budget too.
#[test]
fn blocks_without_an_entry_leave_the_named_ones_room() {
    for assign in ["layers.0=gpu", "layers.1=stream", "layers.3=gpu,embedding=cpu"] {
        let refused = run(assign, "300K").refusal(&["the budget of gpu0 is too small"]);
        let bytes = refused.stderr.split('(').next_back().and_then(|rest| rest.split(' ').next()).unwrap();
        let smallest: u64 = bytes.parse().unwrap();
        for more in [0, 1, 2, 3, 5, 8, 13, 21].map(|steps| smallest + steps * smallest / 8) {
            run(assign, &more.to_string()).success();
        }
    }
}

#[test]
fn reasons_tell_the_user_s_blocks_from_the_planner_s() {
    let plan = planned(&["--assign", "layers.3=gpu,layers.2=cpu", "--vram", "1G"]);
    let of = |block: &str| {
        let has_block = |partition: &&hpp_schema::Partition| partition.blocks.iter().any(|other| other == block);
        plan.partitions.iter().find(has_block).unwrap().reason.as_str()
    };
    assert!(
        of("layers.3").contains("layers.3 placed manually; other blocks placed there by the planner"),
        "{}",
        of("layers.3")
    );
    assert!(of("layers.2").contains("layers.2 placed manually"), "{}", of("layers.2"));
    let small = planned(&["--assign", "layers.0=gpu", "--vram", "2M"]);
    let last = small.partitions.last().unwrap();
    assert!(last.reason.contains("would not fit on gpu0: gpu0 lacks "), "{}", last.reason);
}

#[test]
fn without_vram_only_named_blocks_leave_the_host() {
    let plan = planned(&["--assign", "layers.1=gpu,head=cpu"]);
    let reasons: Vec<&str> = plan.partitions.iter().map(|partition| partition.reason.as_str()).collect();
    let beside = "head placed manually; other blocks on the CPU without --vram";
    assert_eq!(reasons, ["on the CPU without --vram", "placed manually", beside]);
}

/// The greedy planner fills the GPU around named blocks, too, and a GPU that is not there is refused.
#[test]
fn the_greedy_planner_plans_around_named_blocks() {
    let greedy = |assign: &str, vram: &str| {
        let more = ["--planner", "greedy", "--assign", assign, "--vram", vram];
        split(&[&[fixture(LLAMA).to_str().unwrap(), "--dry-run"], &more[..]].concat())
    };
    let done = greedy("layers.2=gpu", "1G").success();
    assert!(done.stdout.contains("layers.0-3, head"), "{}", done.stdout);
    let streamed = greedy("layers.1=stream", "3M").success();
    assert!(streamed.stdout.contains("gpu0 streamed"), "{}", streamed.stdout);
    greedy("layers.0=gpu1", "1G").refusal(&["gpu1", "the plan has 1 GPU"]);
}

/// A block on the CPU whose operator has no kernel there is refused by the name of the operator; without `--assign` it goes to the GPU.
#[test]
fn blocks_without_a_cpu_kernel_compute_on_the_gpu() {
    let paged = fixture("genai/llama3-fp16-cuda-paged");
    let run = |more: &[&str]| split(&[&[paged.to_str().unwrap(), "--vram", "1G", "--dry-run"], more].concat());
    let planned = run(&[]).success();
    assert!(planned.stdout.contains("gpu_0") && planned.stderr.contains("keeps its KV cache in pages"), "{planned:?}");
    run(&["--assign", "layers.0=cpu"]).refusal(&["PagedAttention has no CPU kernel", "without paged attention"]);
}

/// A refusal of too many layers names the number that fits.
#[test]
fn too_many_gpu_layers_are_refused_with_the_number_that_fits() {
    let run = |layers: &str| {
        let more = ["--gpu-layers", layers, "--vram", "2M", "--dry-run"];
        split(&[&[fixture(LLAMA).to_str().unwrap()], &more[..]].concat())
    };
    let refused = run("4").refusal(&["--gpu-layers", "which fits"]);
    let (_, rest) = refused.stderr.split_once("give --gpu-layers ").unwrap();
    let fitting: u64 = rest.split(',').next().unwrap().parse().unwrap();
    run(&fitting.to_string()).success();
    run(&(fitting + 1).to_string()).refusal(&["the budget of gpu0 is too small"]);
}

/// Streamed blocks are partitions of their own, so what the planner places beside them counts their launches.
#[test]
fn no_block_beside_streamed_ones_is_slower_than_elsewhere() {
    let model = fixture("genai/learned-llama-fp32-cpu");
    let total_ms = |assign: &str| {
        let settings = ["--assign", assign, "--vram", "12M", "--kv", "follow", "--dry-run", "--json"];
        let plan = split(&[&[model.to_str().unwrap()], &settings[..]].concat()).success().json();
        let ms = |name: &str| plan["predictions"][name].as_f64().expect("a time");
        ms("time_to_first_token_ms") + 128.0 * ms("decode_ms")
    };
    for assign in ["layers.0-1=gpu,layers.2=stream,head=cpu", "layers.2=stream,head=cpu"] {
        let (free, on_cpu) = (total_ms(assign), total_ms(&format!("{assign},layers.3=cpu")));
        assert!(free <= on_cpu * 1.001, "{assign}: {free} and {on_cpu} ms");
    }
}
