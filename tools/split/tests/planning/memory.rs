//! Memory that plans count: workspaces and states, as runs take them.

use crate::support::{LLAMA, copied, fixture, machine, split};
use hpp_schema::{ByteSize, Plan};

/// Caches are appended, and attention writes its scores to memory.
const APPENDED: &str = "torch/llama-dynamo-kv";

fn planned(model: &str, more: &[&str]) -> Plan {
    let model = fixture(model);
    let done = split(&[&[model.to_str().unwrap(), "--dry-run", "--json"], more].concat()).success();
    serde_json::from_str(&done.stdout).unwrap()
}

/// The reason of blocks that a GPU holds says what the host lacks for them, not what streaming them to this GPU would lack.
#[test]
fn the_reason_names_the_place_that_would_not_fit() {
    let limits = ["--vram", "12M", "--ram", "80M", "--context", "512", "--slots", "3"];
    let plan = planned("genai/learned-llama-fp32-cpu", &limits);
    let layers = plan.partitions.iter().find(|partition| partition.blocks.contains(&"layers.0".to_owned())).unwrap();
    assert_eq!(layers.device.to_string(), "gpu0");
    assert!(layers.reason.starts_with("would not fit on the CPU: host memory lacks 2."), "{}", layers.reason);
}

/// The planner keeps KV caches in memory there, so their size on disk does not count.
#[test]
fn without_a_disk_the_named_budget_is_enough() {
    let machine = std::fs::read_to_string(machine("mini-pc.yaml")).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let without_disk: Vec<&str> = machine.lines().filter(|line| !line.starts_with("disk")).collect();
    std::fs::write(file.path(), without_disk.join("\n")).unwrap();
    let (model, machine) = (fixture("genai/learned-llama-fp32-cpu"), file.path().to_str().unwrap());
    let run = |more: &[&str]| {
        split(&[&[model.to_str().unwrap(), "--machine", machine, "--dry-run", "--context", "512"], more].concat())
    };
    let refused = run(&["--ram", "66M"]).refusal(&["the smallest sufficient --ram is", "have no disk"]);
    assert!(!refused.stderr.contains("--kv disk"), "{}", refused.stderr);
    let named = refused.stderr.split(" bytes)").next().and_then(|text| text.rsplit('(').next()).unwrap();
    let bytes: u64 = named.parse().unwrap();
    run(&["--ram", &format!("{bytes}B")]).success();
    run(&["--ram", &format!("{}B", bytes - 1)]).refusal(&["the smallest sufficient --ram is"]);
    run(&["--kv", "disk"]).refusal(&["--kv disk needs a disk", "read_gb_per_s"]);
}

/// The host computes the same, so it needs the same, whether or not there is a GPU that can hold nothing.
#[test]
fn the_workspace_of_the_host_is_the_same_beside_an_empty_gpu() {
    for model in [APPENDED, LLAMA] {
        let workspace = |vram: &str| {
            let plan = planned(model, &["--vram", vram, "--ram", "1G", "--context", "512"]);
            assert!(plan.partitions.iter().all(|partition| partition.device == "cpu"));
            let bytes = plan.partitions.iter().map(|partition| partition.bytes.workspace.0).max();
            (bytes, plan.schedule.prefill_chunk.unwrap_or(512))
        };
        assert_eq!(workspace("8k"), workspace("0"), "{model}");
    }
}

/// Prompts are divided into smaller passes where the host lacks memory for their activations.
#[test]
fn passes_shrink_beside_an_empty_gpu_too() {
    let plan = planned(APPENDED, &["--vram", "8k", "--ram", "200M", "--context", "8192"]);
    assert!(plan.schedule.prefill_chunk.is_some_and(|chunk| chunk < 512), "{:?}", plan.schedule.prefill_chunk);
}

/// Runs write an appended cache to a second buffer.
#[test]
fn appended_caches_take_two_buffers() {
    let kv = |model: &str| {
        let plan = planned(model, &["--vram", "0", "--context", "512"]);
        let states: u64 = plan.states.iter().map(|state| state.bytes.0).sum();
        (plan.partitions.iter().map(|partition| partition.bytes.kv.0).sum::<u64>(), states)
    };
    let (counted, of_one_buffer) = kv(APPENDED);
    assert_eq!(counted, 2 * of_one_buffer);
    let (counted, of_one_buffer) = kv(LLAMA);
    assert_eq!(counted, of_one_buffer);
}

/// Caches in host memory are copied to a GPU, which holds those of two layers: of the one that computes, and of the next one.
#[test]
fn the_table_counts_caches_that_are_copied_to_a_gpu() {
    let model = fixture(LLAMA);
    let arguments =
        [model.to_str().unwrap(), "--dry-run", "--gpu-layers", "all", "--vram", "1G", "--context", "512", "--kv"];
    let text = |kv: &str| split(&[&arguments[..], &[kv]].concat()).success().stdout;
    let plan: Plan =
        serde_json::from_str(&split(&[&arguments[..], &["cpu", "--json"]].concat()).success().stdout).unwrap();
    let of =
        |bytes: fn(&hpp_schema::Partition) -> u64| plan.partitions.iter().filter(|p| p.device == "gpu0").map(bytes);
    let used = plan.weights_on("gpu0").unwrap()
        + 2 * of(|p| p.bytes.kv.0).max().unwrap()
        + of(|p| p.bytes.workspace.0).max().unwrap();
    let caches: u64 = of(|p| p.bytes.kv.0).sum();
    let copied = text("cpu");
    assert!(copied.contains(&format!("gpu0: {} of 1 GiB", ByteSize(used).human())), "{copied}");
    let on_host = format!("{} for KV caches of layers on GPUs", ByteSize(caches).human());
    assert!(copied.contains(&on_host), "{on_host}: {copied}");
    assert!(!text("follow").contains("for KV caches of layers on GPUs"));
}

/// Of four layers with caches on disk, the window takes as much as those of three.
#[test]
fn caches_on_disk_are_recommended_only_where_that_suffices() {
    let model = fixture(APPENDED);
    let arguments = [model.to_str().unwrap(), "--dry-run", "--vram", "0", "--context", "8192", "--ram"];
    let in_memory = |ram: &str| split(&[&arguments[..], &[ram, "--kv", "follow"]].concat());
    let hint = |ram: &str| in_memory(ram).refusal(&["the smallest sufficient --ram"]).stderr;
    assert!(!hint("92M").contains("--kv disk"), "{}", hint("92M"));
    assert!(hint("97M").contains("--kv disk"), "{}", hint("97M"));
    split(&[&arguments[..], &["97M", "--kv", "disk"]].concat()).success();
}

/// Where memory does not hold caches (16 MiB) beside the activations of 192 tokens, it holds them beside those of shorter passes. Caches are on
/// disk, with a window of 12 MiB, where no passes leave room for them.
#[test]
fn shorter_passes_leave_caches_in_memory() {
    let planned = |ram: &str| {
        let plan = planned(APPENDED, &["--vram", "0", "--ram", ram, "--context", "8192"]);
        (plan.schedule.prefill_chunk.unwrap(), plan.states.iter().any(|state| state.on_disk))
    };
    let plans = ["190M", "186M", "183M", "97M"].map(planned);
    assert_eq!(plans, [(192, false), (96, false), (96, false), (32, true)]);
}

/// A tokenizer whose file has 12 MiB takes more than the 8 MiB that the process has for sessions and a tokenizer.
#[test]
fn a_large_tokenizer_takes_host_memory() {
    let dir = tempfile::tempdir().unwrap();
    let model = copied(LLAMA, dir.path());
    let arguments = [model.to_str().unwrap(), "--dry-run", "--json", "--vram", "0", "--context", "128", "--ram"];
    let planned = |ram: &str| split(&[&arguments[..], &[ram]].concat());
    let heap = || -> u64 {
        let plan: Plan = serde_json::from_str(&planned("1G").success().stdout).unwrap();
        plan.devices.iter().filter_map(|device| device.heap).map(|heap| heap.0).sum()
    };
    assert_eq!(heap(), 0);
    planned("60M").refusal(&["process 64 MiB"]);
    std::fs::write(model.join("tokenizer.json"), format!("{{{}}}", " ".repeat(12 << 20))).unwrap();
    assert!((4 << 20..8 << 20).contains(&heap()), "{}", heap());
    assert!(!planned("60M").refusal(&["process 6"]).stderr.contains("process 64 MiB"));
}

/// A GPU that holds all weights and states beside the activations of the shortest passes holds them, and computes such passes.
#[test]
fn a_gpu_is_not_left_empty_for_the_activations_of_long_passes() {
    let plan = planned(LLAMA, &["--machine", "rtx4090", "--vram", "4500K", "--context", "512"]);
    let devices: Vec<&str> = plan.partitions.iter().map(|partition| partition.device.as_str()).collect();
    assert_eq!((devices, plan.schedule.prefill_chunk), (vec!["gpu0"], Some(32)));
    // More memory has room for both; there shorter passes alone would gain nothing.
    let plan = planned(LLAMA, &["--machine", "rtx4090", "--vram", "5500K", "--context", "512"]);
    assert!(plan.schedule.prefill_chunk.is_none_or(|chunk| chunk >= 192), "{:?}", plan.schedule.prefill_chunk);
}

/// The plan for several sequences and its prediction are for the same number of them, and the table counts their states. More memory never means
/// clearly fewer tokens per second: longer passes do not take the place of sequences.
#[test]
fn a_plan_for_several_sequences_is_for_the_number_that_jobs_runs() {
    let model = fixture(LLAMA);
    let arguments =
        |ram| [model.to_str().unwrap(), "--dry-run", "--vram", "0", "--objective", "throughput", "--ram", ram];
    let mut best_with_less = 0.0f64;
    for ram in ["70M", "76M", "85M", "88M", "109M"] {
        let done = split(&arguments(ram)).success();
        let json = split(&[&arguments(ram)[..], &["--json"]].concat()).success();
        let plan: Plan = serde_json::from_str(&json.stdout).unwrap();
        let throughput = plan.predictions.throughput.unwrap();
        let objective = plan.predictions.objective.unwrap();
        let new_tokens = (throughput.sequences * plan.predictions.new_tokens) as f64;
        let rate = 1e3 * new_tokens / objective.ms;
        assert!((rate / throughput.tokens_per_second - 1.0).abs() < 0.01, "{ram}: {rate} {throughput:?}");
        let of_others = done.stdout.contains("MiB for the KV caches of other sequences");
        let in_memory = plan.states.iter().all(|state| !state.on_disk);
        assert_eq!(of_others, in_memory && throughput.sequences > 1, "{}", done.stdout);
        assert!(rate > 0.9 * best_with_less, "{ram}: {rate} instead of {best_with_less}");
        best_with_less = best_with_less.max(rate);
    }
}

/// A GPU that is too small for the activations of long passes gets shorter ones; caches on disk would not help it.
#[test]
fn caches_stay_in_memory_where_only_the_gpu_is_small() {
    for more in
        [&["--vram", "2M", "--gpu-layers", "1"][..], &["--vram", "8M", "--gpu-layers", "all", "--n-cpu-moe", "1"]]
    {
        let plan = planned("genai/learned-gpt-oss-int4-cpu", &[more, &["--ram", "16G"]].concat());
        assert!(!plan.states.is_empty() && plan.states.iter().all(|state| !state.on_disk), "{more:?}");
    }
}
