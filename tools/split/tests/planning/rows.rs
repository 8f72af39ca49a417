//! `--split-mode row`: each GPU computes a part of every layer.

use crate::support::{LLAMA, fixture, machine, planned, profile, split};
use hpp_schema::{Partition, Plan, Step};
use std::fs;

const ROWS: [&str; 4] = ["--split-mode", "row", "--vram", "1G,1G"];

/// The parts of layers, in the order in which they run.
fn shards(plan: &Plan) -> Vec<&Partition> {
    plan.partitions.iter().filter(|partition| partition.blocks[0].starts_with("layers")).collect()
}

#[test]
fn each_gpu_computes_half_of_every_layer() {
    let plan = planned(&ROWS);
    let whole = planned(&["--gpu-layers", "all", "--vram", "1G"]);
    let shards = shards(&plan);
    // Attention and MLP of four layers, on two GPUs.
    assert_eq!(shards.len(), 4 * 2 * 2);
    for pair in shards.chunks(2) {
        assert_eq!((pair[0].device.as_str(), pair[1].device.as_str()), ("gpu0", "gpu1"));
        let [first, second] = [pair[0], pair[1]].map(|partition| partition.bytes.weights.0);
        assert!(first > 0 && first == second, "{} and {}", pair[0].blocks[0], pair[1].blocks[0]);
    }
    let kv = |plan: &Plan, gpu: &str| -> u64 {
        plan.states.iter().filter(|state| state.device == gpu).map(|state| state.bytes.0).sum()
    };
    assert_eq!((kv(&plan, "gpu0"), kv(&plan, "gpu1")), (kv(&whole, "gpu0") / 2, kv(&whole, "gpu0") / 2));
    assert_eq!((plan.states.len(), plan.model.states.len()), (2 * whole.states.len(), whole.states.len()));
    let on_gpu = |plan: &Plan, gpu: &str| plan.weights_on(gpu).unwrap();
    let (all, half) = (on_gpu(&whole, "gpu0"), on_gpu(&plan, "gpu0").max(on_gpu(&plan, "gpu1")));
    assert!(half < all * 3 / 5, "{half} of {all}");
}

/// The engine runs adjacent partitions at the same time if none of them reads or copies what another of them produces.
#[test]
fn the_parts_of_a_layer_need_nothing_of_each_other() {
    let plan = planned(&ROWS);
    let names: Vec<&str> = shards(&plan).iter().map(|partition| partition.name.as_str()).collect();
    for steps in [&plan.schedule.prefill, &plan.schedule.decode] {
        let run = |name: &str| steps.iter().position(|step| matches!(step, Step::Run(run) if run == name)).unwrap();
        for pair in names.chunks(2) {
            let (first, second) = (run(pair[0]), run(pair[1]));
            let partition = |name: &str| plan.partitions.iter().find(|partition| partition.name == name).unwrap();
            let made: Vec<&str> = partition(pair[0]).outputs.iter().map(|output| output.name.as_str()).collect();
            for step in &steps[first + 1..second] {
                let Step::Copy(copy) = step else { panic!("something runs between {pair:?}") };
                assert!(copy.values.iter().all(|value| !made.contains(&value.as_str())), "{pair:?}: {copy:?}");
            }
            assert!(partition(pair[1]).inputs.iter().all(|input| input.from != pair[0]), "{pair:?}");
        }
    }
}

/// One hidden state is all that a GPU gets of the other for a part of a layer. What follows the layers may be on either, and gets more.
#[test]
fn shards_exchange_one_hidden_state_for_each_part() {
    let plan = planned(&ROWS);
    let last = shards(&plan).last().unwrap().name.clone();
    let steps = plan.schedule.decode.iter().take_while(|step| !matches!(step, Step::Run(run) if *run == last));
    let copied: Vec<usize> =
        steps.filter_map(|step| if let Step::Copy(copy) = step { Some(copy.values.len()) } else { None }).collect();
    assert_eq!(copied, [1; 15]);
}

#[test]
fn the_table_has_a_row_for_each_shard() {
    let model = fixture(LLAMA);
    let done = split(&[&[model.to_str().unwrap(), "--dry-run"], &ROWS[..]].concat()).success();
    for words in ["layers.0-3 (rows, 1 of 2)", "layers.0-3 (rows, 2 of 2)", "of layers divided by rows"] {
        assert!(done.stdout.contains(words), "{words:?} is not in {}", done.stdout);
    }
    assert_eq!(done.stdout.matches("each GPU computes a part of every layer").count(), 2, "{}", done.stdout);
}

#[test]
fn llama_cpp_s_spelling_is_understood() {
    assert_eq!(planned(&["-sm", "row", "--vram", "1G,1G"]), planned(&ROWS));
    assert_eq!(planned(&["-sm", "layer", "--vram", "1G,1G"]), planned(&["--vram", "1G,1G"]));
}

#[test]
fn contradictory_settings_are_refused_together() {
    let model = fixture(LLAMA);
    let run = |more: &[&str]| split(&[&[model.to_str().unwrap(), "--dry-run", "--split-mode", "row"], more].concat());
    let refused = ["--gpu-layers", "--assign", "--stream", "--cpu-moe", "--movable", "--kv cpu", "--explain"];
    let given = [
        "--gpu-layers",
        "2",
        "--assign",
        "head=cpu",
        "--stream",
        "auto",
        "--cpu-moe",
        "--movable",
        "--kv",
        "cpu",
        "--explain",
    ];
    let done = run(&[&["--vram", "1G,1G"], &given[..]].concat()).refusal(&refused);
    assert!(done.stderr.matches("error: --split-mode row").count() >= refused.len(), "{}", done.stderr);
    run(&["--vram", "1G"]).refusal(&["fewer than two", "24G,24G"]);
    run(&["--vram", "0"]).refusal(&["fewer than two"]);
    run(&["--vram", "1G,0,1G"]).refusal(&["gives one 0 bytes"]);
    run(&["--machine", "rtx4090"]).refusal(&["fewer than two", "entry under `gpus`"]);
    run(&["--machine", "rtx4090", "--vram", "24G,24G"]).refusal(&["the machine has 1", "entry under `gpus`"]);
    run(&["--vram", "1G,1G", "--sweep-vram", "1M..2M"]).refusal(&["--sweep-vram"]);
    run(&["--vram", "1G,1G", "--refine", "8"]).refusal(&["--split-mode row", "--refine"]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("profile.yaml");
    fs::write(&path, profile(LLAMA, 1.0, 0.1).to_yaml().unwrap()).unwrap();
    run(&["--vram", "1G,1G", "--profile", path.to_str().unwrap()]).refusal(&["--profile", "times of whole layers"]);
}

/// A preset with a second GPU, of this memory rate.
fn two_gpus(dir: &std::path::Path, gb_per_s: &str) -> String {
    let one = fs::read_to_string(machine("rtx4090-desktop.yaml")).unwrap();
    let (before, gpu) = one.split_once("gpus:\n").unwrap();
    let (gpu, after) = gpu.split_once("disk:").unwrap();
    let other = gpu.replace("memory_gb_per_s: 806", &format!("memory_gb_per_s: {gb_per_s}"));
    let path = dir.join(format!("{gb_per_s}.yaml"));
    fs::write(&path, format!("{before}gpus:\n{gpu}{other}disk:{after}")).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn described_gpus_are_of_one_kind() {
    let dir = tempfile::tempdir().unwrap();
    let (equal, different) = (two_gpus(dir.path(), "806"), two_gpus(dir.path(), "400"));
    let model = fixture(LLAMA);
    let run = |machine: &str| {
        split(&[model.to_str().unwrap(), "--dry-run", "--json", "--split-mode", "row", "--machine", machine])
    };
    let plan: Plan = serde_json::from_str(&run(&equal).success().stdout).unwrap();
    assert_eq!(shards(&plan).len(), 16);
    run(&different).refusal(&["GPUs of one kind"]);
}

/// Models that cannot be divided are refused with the reason and with what to do.
#[test]
fn models_that_cannot_be_divided_are_refused() {
    for (name, words) in [
        ("genai/gpt-oss-int4-cpu", "mixture of experts"),
        ("genai/lfm2-fp32-cpu", "not the KV cache of a GroupQueryAttention"),
        ("optimum/llama-with-past", "not the KV cache of a GroupQueryAttention"),
    ] {
        let model = fixture(name);
        let done = split(&[&[model.to_str().unwrap(), "--dry-run"], &ROWS[..]].concat());
        done.refusal(&["cannot divide layers.0 by rows", words, "--split-mode layer"]);
    }
    let model = fixture(LLAMA);
    let three = split(&[model.to_str().unwrap(), "--dry-run", "--split-mode", "row", "--vram", "1G,1G,1G"]);
    three.refusal(&["cannot be divided equally among 3 shards"]);
}

/// A budget that is too small is refused with one that suffices.
#[test]
fn a_refusal_names_a_budget_that_suffices() {
    let model = fixture(LLAMA);
    let run = |vram: &str| split(&[model.to_str().unwrap(), "--dry-run", "--split-mode", "row", "--vram", vram]);
    for is_alone in [true, false] {
        let given = if is_alone { "1M,1G" } else { "1M,1M" };
        let refused =
            run(given).refusal(&["the budget of gpu0 is too small", "--vram on each GPU", "omit --split-mode"]);
        assert!(!refused.stderr.contains("--assign") && !refused.stderr.contains("is raised"), "{}", refused.stderr);
        let bytes = refused.stderr.split('(').next_back().and_then(|rest| rest.split(' ').next()).unwrap();
        run(&if is_alone { format!("{bytes},1G") } else { format!("{bytes},{bytes}") }).success();
    }
}
