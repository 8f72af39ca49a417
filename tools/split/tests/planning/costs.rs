//! Plans with costs from a machine file or a profile.

use crate::support::{LLAMA, fixture, machine, places, planned, profile, split};
use hpp_schema::{CorpusStatistics, ExpertStatistics, Plan, Profile, Statistics};

fn saved(dir: &tempfile::TempDir, profile: &Profile) -> String {
    let path = dir.path().join("profile.yaml");
    std::fs::write(&path, profile.to_yaml().unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_machine_file_sets_budgets_and_the_source_of_predictions() {
    let plan = planned(&["--machine", &machine("rtx4060-laptop.yaml")]);
    assert_eq!(plan.budgets.vram[0].0, 8 << 30);
    assert_eq!(plan.budgets.ram.unwrap().0, 30 << 30, "fifteen sixteenths of 32 GiB");
    assert!(plan.predictions.source.starts_with("machine: laptop"), "{}", plan.predictions.source);
    assert!(places(&plan).starts_with("gpu0:"), "{}", places(&plan));
    let plan = planned(&["--machine", &machine("mini-pc.yaml")]);
    assert_eq!(plan.partitions.len(), 1);
    assert!(plan.budgets.vram.is_empty());
}

#[test]
fn measured_times_decide_whether_the_gpu_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let with = |profile| planned(&["--profile", &saved(&dir, &profile), "--vram", "1G"]);
    let fast_gpu = with(profile(LLAMA, 4.0, 0.5));
    assert!(places(&fast_gpu).contains("gpu0:"), "{}", places(&fast_gpu));
    let slow_gpu = with(profile(LLAMA, 0.5, 4.0));
    assert_eq!(places(&slow_gpu), "cpu:embedding+layers.0+layers.1+layers.2+layers.3+head");
    assert_eq!(slow_gpu.predictions.source, "profile: profile.yaml of 2025-06-01T12:00:00Z");
    // One launch, four layers, two blocks of a tenth of a layer, and the time outside partitions.
    let expected = 0.1 + 4.0 * 0.5 + 2.0 * 0.05 + 0.03;
    assert!((slow_gpu.predictions.decode_ms - expected).abs() < 1e-6, "{}", slow_gpu.predictions.decode_ms);
}

/// Each extra partition costs one launch, in both phases.
#[test]
fn each_partition_costs_one_launch_per_pass() {
    let dir = tempfile::tempdir().unwrap();
    let file = saved(&dir, &profile(LLAMA, 0.5, 4.0));
    let plan_with = |partitions: &str| planned(&["--profile", &file, "--gpu-layers", "0", "--partitions", partitions]);
    let (one, four) = (plan_with("1").predictions, plan_with("4").predictions);
    assert!((four.decode_ms - one.decode_ms - 0.3).abs() < 2e-3, "{} {}", one.decode_ms, four.decode_ms);
    let apart = four.time_to_first_token_ms - one.time_to_first_token_ms;
    assert!((apart - 0.3).abs() < 2e-3, "{apart}");
}

#[test]
fn a_profile_of_whole_layers_plans_experts_on_the_host() {
    let dir = tempfile::tempdir().unwrap();
    let name = "genai/gpt-oss-int4-cpu";
    let file = saved(&dir, &profile(name, 10.0, 1.0));
    let model = fixture(name);
    let run = |more: &[&str]| {
        let arguments = [model.to_str().unwrap(), "--dry-run", "--json", "--profile", &file, "--vram", "8G"];
        let done = split(&[&arguments[..], more].concat()).success();
        (serde_json::from_str::<Plan>(&done.stdout).unwrap(), done.stderr)
    };
    let (on_host, _) = run(&["--gpu-layers", "0"]);
    let (on_gpu, _) = run(&["--gpu-layers", "all"]);
    let (apart, said) = run(&["--cpu-moe", "--gpu-layers", "all"]);
    assert!(said.contains("share its times"), "{said}");
    assert!(places(&apart).contains("cpu:layers.0.experts gpu0:"), "{}", places(&apart));
    let [slowest, fastest, between] = [&on_host, &on_gpu, &apart].map(|plan| plan.predictions.decode_ms);
    assert!(fastest < between && between < slowest, "{fastest} {between} {slowest}");
}

/// The times of a layer are divided by the share of its selections that the GPU computes.
#[test]
fn the_experts_that_a_corpus_selected_most_stay_on_the_gpu() {
    let dir = tempfile::tempdir().unwrap();
    let name = "genai/gpt-oss-int4-cpu";
    let mut counted = profile(name, 10.0, 1.0);
    let layer = |layer: usize| ExpertStatistics {
        block: format!("layers.{layer}"),
        top_k: 2,
        tokens: 50,
        counts: vec![10, 20, 60, 10],
        reuse_distances: vec![32, 32, 32, 0],
        first_visits: 4,
        oracle_hits: vec![0; 4],
    };
    counted.corpus = Some(CorpusStatistics {
        hash: "0".repeat(64),
        prompts_hash: None,
        prompts_done: 1,
        prompts_in_all: Some(1),
        skipped: vec![],
        skipped_in_all: 0,
        statistics: Statistics { experts: (0..4).map(layer).collect(), ..Statistics::default() },
    });
    let (with, without) = (saved(&dir, &counted), dir.path().join("uncounted.yaml"));
    std::fs::write(&without, profile(name, 10.0, 1.0).to_yaml().unwrap()).unwrap();
    let run = |profile: &str, more: &[&str]| {
        let model = fixture(name);
        let options = ["--dry-run", "--json", "--profile", profile, "--vram", "8G", "--gpu-layers", "all"];
        let done = split(&[&[model.to_str().unwrap()], &options[..], more].concat()).success();
        (serde_json::from_str::<Plan>(&done.stdout).unwrap().predictions.decode_ms, done.stderr)
    };
    let (popular, said) = run(&with, &["--gpu-experts", "1"]);
    assert!(said.contains("1 expert, those that the profile's corpus selected most; 60 %"), "{said}");
    let (first, said) = run(without.to_str().unwrap(), &["--gpu-experts", "1"]);
    assert!(said.contains("those that come first") && said.contains("; 25 %"), "{said}");
    let (none, _) = run(&with, &["--cpu-moe"]);
    assert!(popular < first && first < none, "{popular} {first} {none}");
}

#[test]
fn a_profile_whose_times_contradict_each_other_is_used_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let mut profile = profile(LLAMA, 1.0, 1.0);
    let said = |profile: &Profile| {
        let file = saved(&dir, profile);
        split(&[fixture(LLAMA).to_str().unwrap(), "--dry-run", "--profile", &file, "--vram", "0"]).success().stderr
    };
    assert!(!said(&profile).contains("contradict each other"));
    for point in &mut profile.classes[1].providers[0].decode.points {
        let times = point.single.as_mut().unwrap();
        times.p90_ms = 4.0 * times.median_ms;
    }
    let block = profile.classes[1].block.clone();
    let text = said(&profile);
    assert!(
        text.contains(&format!("the times of {block} on cpu vary from run to run or contradict each other")),
        "{text}"
    );
}

#[test]
fn a_profile_of_another_model_or_machine_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut profile = profile(LLAMA, 1.0, 1.0);
    let model = fixture(LLAMA);
    let run =
        |path: &str, more: &[&str]| split(&[&[model.to_str().unwrap(), "--dry-run", "--profile", path], more].concat());
    profile.host.cpu = "Z80".into();
    profile.host.cores += 7;
    let path = saved(&dir, &profile);
    run(&path, &[]).refusal(&["another machine", "Z80", "number of cores", "--allow-other-machine"]);
    run(&path, &["--allow-other-machine"]).success();
    profile.model.hash = "0".repeat(64);
    let path = saved(&dir, &profile);
    run(&path, &[]).refusal(&["another model", "another machine", "hpp-profile"]);
    run(&path, &["--allow-other-machine"]).refusal(&["another model", "`hpp-profile MODEL --out FILE`"]);
}

#[test]
fn a_profile_that_is_not_complete_is_one_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut profile = profile(LLAMA, 1.0, 1.0);
    profile.classes[0].providers[0].decode = Default::default();
    profile.classes[1].providers[0].prefill = Default::default();
    let path = saved(&dir, &profile);
    let model = fixture(LLAMA);
    let done = split(&[model.to_str().unwrap(), "--dry-run", "--profile", &path]);
    done.refusal(&["measurements that are missing: 2", "classes.0.cpu.decode", "hpp-profile --resume"]);
}

/// A provider of the host without times in the profile is not used, and that is noted.
#[test]
fn a_provider_that_the_profile_did_not_measure_is_noted() {
    let dir = tempfile::tempdir().unwrap();
    let file = saved(&dir, &profile(LLAMA, 2.0, 0.7));
    let model = fixture(LLAMA);
    let said = |providers: &str| {
        split(&[model.to_str().unwrap(), "--dry-run", "--vram", "0", "--profile", &file, "--providers", providers])
            .success()
            .stderr
    };
    assert!(
        said("openvino,cpu")
            .contains("--providers openvino has no effect: on the host the times of the profile decide")
    );
    assert!(!said("cpu").contains("no effect"));
}

#[test]
fn the_same_input_gives_the_same_plan() {
    let dir = tempfile::tempdir().unwrap();
    let file = saved(&dir, &profile(LLAMA, 2.0, 0.7));
    let more = ["--profile", &file, "--vram", "6M"];
    let again: Vec<Plan> = (0..3).map(|_| planned(&more)).collect();
    assert!(again.iter().all(|plan| *plan == again[0]));
}

#[test]
fn the_exact_planner_is_never_slower_than_the_greedy_one() {
    for vram in ["4M", "5M", "6M", "7M", "9M"] {
        let ms = |planner: &str| {
            let in_one_place = planned(&["--vram", vram, "--planner", planner, "--mechanisms", "resident,cpu"]);
            let simple = in_one_place.predictions.objective.unwrap();
            assert_eq!(simple.proven, planner == "exact");
            let ms = planned(&["--vram", vram, "--planner", planner]).predictions.objective.unwrap().ms;
            assert!(ms <= simple.ms * 1.0001);
            ms
        };
        let (exact, greedy) = (ms("exact"), ms("greedy"));
        assert!(exact <= greedy * 1.0001, "{exact} {greedy} at {vram}");
    }
}

/// The minimised time is that of a token, of the prompt, or of a whole answer.
#[test]
fn objectives_minimise_their_time() {
    let predictions_for =
        |objective: &str| planned(&["--vram", "6M", "--objective", objective, "--new-tokens", "10"]).predictions;
    let (decode, prefill, mixed) = (predictions_for("decode"), predictions_for("prefill"), predictions_for("mixed"));
    assert_eq!(decode.objective.unwrap().ms, decode.decode_ms);
    assert_eq!(prefill.objective.unwrap().ms, prefill.time_to_first_token_ms);
    let whole = mixed.time_to_first_token_ms + 9.0 * mixed.decode_ms;
    assert!((mixed.objective.unwrap().ms / whole - 1.0).abs() < 1e-3);
    assert_eq!((mixed.new_tokens, mixed.decode_context), (10, 507));
}
