//! Output besides a plan: sweeps, traces, explanations, targets.

use crate::support::{LLAMA, copied, fixture, machine, places, planned, split};
use hpp_schema::{Plan, Predictions, Residency, Severity, WeightInput};
use serde_json::{Value, json};
use std::fs;

fn run(more: &[&str]) -> crate::support::Done {
    let model = fixture(LLAMA);
    split(&[&[model.to_str().unwrap()], more].concat())
}

#[test]
fn a_sweep_is_a_table_with_bars_and_data_as_json() {
    let text = run(&["--sweep-vram", "5M..9M:1M"]).success().stdout;
    assert!(text.lines().count() >= 5 && text.contains("5 MiB") && text.contains('\u{2588}'), "{text}");
    let json = run(&["--sweep-vram", "5M..9M:1M", "--json"]).success().json();
    let points = json["points"].as_array().unwrap();
    let vram: Vec<u64> = points.iter().map(|point| point["vram"].as_u64().unwrap() >> 20).collect();
    assert_eq!(vram, [5, 6, 7, 8, 9]);
    // More memory is never slower.
    let ms = |point: &Value| point["objective_ms"].as_f64().unwrap();
    assert!(points.windows(2).all(|pair| ms(&pair[1]) <= ms(&pair[0]) * 1.0001), "{points:#?}");
    // Each point equals the prediction of a plan for that budget.
    let alone = planned(&["--vram", "5M"]).predictions;
    assert_eq!(points[0]["decode_ms"].as_f64(), Some(alone.decode_ms));
    assert_eq!(points[0]["time_to_first_token_ms"].as_f64(), Some(alone.time_to_first_token_ms));
}

#[test]
fn a_trace_has_one_lane_per_resource() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    // The planner would not use a GPU for a model this small.
    run(&[
        "--dry-run",
        "--vram",
        "6M",
        "--gpu-layers",
        "2",
        "--prompt-tokens",
        "64",
        "--trace",
        path.to_str().unwrap(),
    ])
    .success();
    let trace: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let lanes: Vec<&str> =
        events.iter().filter(|e| e["ph"] == "M").map(|e| e["args"]["name"].as_str().unwrap()).collect();
    assert!(lanes.contains(&"cpu") && lanes.contains(&"gpu0"), "{lanes:?}");
    let spans: Vec<&Value> = events.iter().filter(|e| e["ph"] == "X").collect();
    let number = |span: &Value, key: &str| span[key].as_f64().unwrap();
    assert!(spans.iter().all(|span| number(span, "ts") >= 0.0 && number(span, "dur") >= 0.0));
    // Spans of a lane do not overlap.
    for (tid, lane) in lanes.iter().enumerate() {
        let mut on: Vec<(f64, f64)> = (spans.iter().filter(|span| span["tid"] == tid))
            .map(|span| (number(span, "ts"), number(span, "ts") + number(span, "dur")))
            .collect();
        on.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert!(on.windows(2).all(|pair| pair[1].0 >= pair[0].1 - 1e-6), "{lane} overlaps: {on:?}");
    }
    let passes = spans.iter().map(|span| span["args"]["pass"].as_u64().unwrap()).max();
    assert_eq!(passes, Some(8), "one pass of the prompt and eight tokens");
    // No partial file is left, and a trace that cannot be written is an error.
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    run(&["--dry-run", "--trace", dir.path().to_str().unwrap()]).refusal(&["cannot write"]);
}

#[test]
fn an_explanation_lists_costs_of_other_devices() {
    let text = run(&["--dry-run", "--vram", "3500K", "--explain"]).success().stdout;
    for words in
        ["on the CPU: +", "bottleneck", "1 GiB more VRAM on gpu0: per token -", "tokens of context instead of 512"]
    {
        assert!(text.contains(words), "{words:?} is not in {text}");
    }
    let json = run(&["--dry-run", "--vram", "3500K", "--explain", "--json"]).success().json();
    assert_eq!(json["plan"]["hpp_plan"], 2);
    assert_eq!(json["explanation"]["partitions"].as_array().unwrap().len(), 2);
    let change = &json["explanation"]["changes"][0];
    assert!(change["decode_ms_change"].as_f64().unwrap() < 0.0, "{change}");
}

/// What `--explain` says of more memory and of another context is what plans for those are.
#[test]
fn an_explanation_agrees_with_the_plans_it_speaks_of() {
    let now = planned(&["--vram", "3500K", "--ram", "1G"]).predictions;
    let json = run(&["--dry-run", "--vram", "3500K", "--ram", "1G", "--explain", "--json"]).success().json();
    let vram = format!("{}B", (3500 << 10) + (1u64 << 30));
    let plans = [
        ("VRAM on gpu0", planned(&["--vram", &vram, "--ram", "1G"])),
        ("more RAM", planned(&["--vram", "3500K", "--ram", "2G"])),
        ("256 tokens of context", planned(&["--vram", "3500K", "--ram", "1G", "--context", "256"])),
    ];
    for (what, plan) in plans {
        let changes = json["explanation"]["changes"].as_array().unwrap();
        let change = changes.iter().find(|change| change["what"].as_str().unwrap().contains(what)).unwrap();
        let said = change["decode_ms_change"].as_f64().unwrap();
        let is = plan.predictions.decode_ms - now.decode_ms;
        assert!((said - is).abs() < 0.002 * now.decode_ms, "{what}: {said} said, {is} planned");
        let answer_ms = |predictions: &Predictions| predictions.objective.as_ref().unwrap().ms;
        let (said, is) = (change["answer_ms_change"].as_f64().unwrap(), answer_ms(&plan.predictions) - answer_ms(&now));
        assert!((said - is).abs() < 0.002 * answer_ms(&now), "{what}, whole answer: {said} said, {is} planned");
    }
}

/// With the throughput objective, the tokens per second of all sequences are compared, and the times of one alone.
#[test]
fn an_explanation_of_throughput_agrees_with_the_plans_it_speaks_of() {
    let with = |ram: &str, context: &str, more: &[&str]| {
        let model = fixture("genai/learned-llama-fp32-cpu");
        let args = [model.to_str().unwrap(), "--dry-run", "--json", "--objective", "throughput"];
        let args = [&args[..], &["--ram", ram, "--context", context], more].concat();
        split(&args).success().json()
    };
    let predictions = |json: &Value| serde_json::from_value::<Predictions>(json["predictions"].clone()).unwrap();
    let said = with("76M", "128", &["--explain"]);
    let now = predictions(&said["plan"]);
    let sequences = |predictions: &Predictions| predictions.throughput.as_ref().unwrap().sequences;
    let ram = format!("{}", (76 << 20) + (1u64 << 30));
    for (what, plan) in [("more RAM", with(&ram, "128", &[])), ("256 tokens of", with("76M", "256", &[]))] {
        let then = predictions(&plan);
        let changes = said["explanation"]["changes"].as_array().unwrap();
        let change = changes.iter().find(|change| change["what"].as_str().unwrap().contains(what)).unwrap();
        let rate = |predictions: &Predictions| predictions.throughput.as_ref().unwrap().tokens_per_second;
        for (name, of) in [
            ("tokens_per_second_change", &rate as &dyn Fn(&Predictions) -> f64),
            ("decode_ms_change", &|predictions| predictions.decode_ms),
            ("time_to_first_token_ms_change", &|predictions| predictions.time_to_first_token_ms),
        ] {
            let (said, is) = (change[name].as_f64().unwrap(), of(&then) - of(&now));
            assert!((said - is).abs() < 0.002 * of(&now), "{what}, {name}: {said} said, {is} planned");
        }
        let names = format!("for {} sequences together instead of {}", sequences(&then), sequences(&now));
        assert_eq!(change["what"].as_str().unwrap().contains(&names), sequences(&then) != sequences(&now), "{change}");
    }
    assert!(sequences(&now) < sequences(&predictions(&with(&ram, "128", &[]))));
    assert_eq!(said["explanation"]["scarce"], json!(["cpu"]));
}

/// A model that runs once has no tokens per second: the time of its run is compared, whatever the objective.
#[test]
fn an_explanation_of_a_model_that_runs_once_compares_its_time() {
    let model = fixture("optimum/bert");
    let args = [model.to_str().unwrap(), "--dry-run", "--explain", "--vram", "300K", "--margin", "0"];
    let explained = |objective| {
        let args = [&args[..], &["--json", "--objective", objective]].concat();
        let changes = split(&args).success().json()["explanation"].clone();
        (changes["scarce"].clone(), changes["changes"][0].clone())
    };
    let text = split(&args).success().stdout;
    assert!(text.contains("1 GiB more VRAM on gpu0: per run -") && text.contains("\nbottleneck: compute"), "{text}");
    let (scarce, change) = explained("throughput");
    assert!(change["time_to_first_token_ms_change"].as_f64().unwrap() < 0.0, "{change}");
    assert_eq!(change["tokens_per_second_change"], Value::Null);
    assert_eq!((scarce, change), explained("mixed"));
}

/// The planner keeps layers with states off the host, and streams their weights where they do not fit.
#[test]
fn caches_that_must_be_on_the_gpu_keep_their_layers_there() {
    let plan = planned(&["--vram", "2500K", "--kv", "gpu"]);
    assert!(plan.states.iter().all(|state| state.device == "gpu0"), "{:?}", plan.states);
    assert!(plan.partitions.iter().any(|partition| partition.residency == Residency::Streamed));
    run(&["--dry-run", "--vram", "1M", "--kv", "gpu"]).refusal(&["the budget of gpu0 is too small"]);
}

/// A shorter context also shortens the prompt that the predictions assume.
#[test]
fn a_shortened_prompt_is_named() {
    let text = run(&["--dry-run", "--vram", "3500K", "--explain"]).success().stdout;
    assert!(
        text.contains(
            "256 tokens of context instead of 512 (prompt of 192 instead of 384, answer of 64 instead of 128)"
        ),
        "{text}"
    );
    let done = run(&["--dry-run", "--vram", "0", "--prompt-tokens", "4000"]).success();
    assert!(done.stderr.contains("a prompt of 384 tokens, not 4000"), "{}", done.stderr);
    let short = planned(&["--vram", "0", "-c", "64"]);
    assert_eq!(short.budgets.context, 64);
}

/// The rows of a model whose embedding and head share a weight sum to more than the total, and the text says so.
/// Estimates from assumed rates say so, with two digits; the length of passes stands beside the memory that it changes.
#[test]
fn a_static_estimate_says_how_much_it_may_be_off() {
    let text = run(&["--dry-run", "--vram", "0", "--ram", "70M"]).success().stdout;
    assert!(
        text.contains(
            "expected (static estimate, may be off by up to 25x for so small a model; hpp-profile measures): "
        ),
        "{text}"
    );
    assert!(text.contains("of context (") && text.contains(" per pass at most)"), "{text}");
    let assumed = run(&["--dry-run", "--machine", "rtx4090", "--vram", "0"]).success().stdout;
    assert!(!assumed.contains("may be off by up to"), "{assumed}");
}

#[test]
fn inspect_folds_equal_layers() {
    let model = fixture(LLAMA);
    let inspect = |more: &[&str]| split(&[&["inspect", model.to_str().unwrap()], more].concat()).success().stdout;
    assert!(inspect(&[]).lines().any(|line| line.trim().starts_with("layers.1-2 ")), "{}", inspect(&[]));
    assert!(inspect(&["--all"]).lines().any(|line| line.trim().starts_with("layers.2 ")), "{}", inspect(&["--all"]));
}

#[test]
fn shared_weights_are_shown_by_inspect() {
    let inspect = |name: &str, json: &[&str]| {
        let model = fixture(name);
        split(&[&["inspect", model.to_str().unwrap()], json].concat()).success()
    };
    let tied = "genai/learned-llama-fp32-cpu";
    let json = inspect(tied, &["--json"]).json();
    let rows: u64 =
        json["blocks"].as_array().unwrap().iter().map(|block| block["weight_bytes"].as_u64().unwrap()).sum();
    let shared: u64 = json["shared"].as_array().unwrap().iter().map(|s| s["bytes"].as_u64().unwrap()).sum();
    assert!(shared > 0 && rows > json["weight_bytes"].as_u64().unwrap(), "{json:#}");
    let text = inspect(tied, &[]).stdout;
    assert!(text.contains("of weights are shared: embedding, head; each row counts them"), "{text}");
    assert!(!inspect(LLAMA, &[]).stdout.contains("shared: embedding"));
}

/// Reasons in the table and the explanation show the same times.
#[test]
fn the_explanation_and_the_table_agree() {
    let dir = tempfile::tempdir().unwrap();
    let machine = slow_host(&dir);
    // Streamed blocks are partitions of their own, each with a launch.
    let more =
        ["--machine", &machine, "--vram", "3500K", "--margin", "1B", "--mechanisms", "all", "--dry-run", "--explain"];
    let text = run(&more).success().stdout;
    let json = run(&[&more[..], &["--json"]].concat()).success().json();
    let mut compared = 0;
    for partition in json["plan"]["partitions"].as_array().unwrap() {
        let reason = partition["reason"].as_str().unwrap();
        // `on the CPU: +3.21 ms per answer`.
        if reason.contains(" per answer") {
            // Partitions that are compared together name their blocks first.
            let said = |line: &str| line.contains(" per answer") && reason.ends_with(line.trim());
            assert!(text.lines().any(said), "{reason:?} is not explained in\n{text}");
            compared += 1;
        }
    }
    assert!(compared > 0, "{text}");
    assert!(!text.contains("0.000000"), "{text}");
}

/// The cost of moving several partitions is not shown as that of each of them.
#[test]
fn a_reason_of_several_partitions_names_their_blocks() {
    let plan = planned(&["--vram", "24M", "--gpu-layers", "auto", "--partitions", "99", "--machine", "rtx4090"]);
    let shared: Vec<_> = plan.partitions.iter().filter(|partition| partition.reason.contains("per answer")).collect();
    assert!(shared.len() > 1, "{plan:#?}");
    for partition in shared {
        assert!(partition.reason.contains("layers.0-3, head together "), "{}", partition.reason);
    }
}

#[test]
fn equal_rows_of_a_sweep_are_folded() {
    let rows = |range: &str| {
        let text = run(&["--sweep-vram", range]).success().stdout;
        text.lines().skip(1).take_while(|line| !line.trim().is_empty()).map(str::to_owned).collect::<Vec<_>>()
    };
    // The model has 3 MiB, so budgets above that give equal results.
    let folded = rows("1G..9G:1G");
    assert_eq!(folded.len(), 1, "{folded:#?}");
    assert!(folded[0].contains("1 GiB to 9 GiB"), "{folded:#?}");
}

#[test]
fn targets_that_are_met_change_nothing() {
    let kept = planned(&["--vram", "6M", "--at-least", "1", "--first-token-within", "10000"]);
    assert_eq!(kept, planned(&["--vram", "6M"]));
}

#[test]
fn a_missed_target_reports_the_best_speed_and_a_sufficient_budget() {
    let asked = ["--dry-run", "--vram", "3500K", "--at-least", "12000", "--first-token-within", "0.2"];
    let done = run(&asked).refusal(&[
        "--at-least 12000",
        "--first-token-within 0.2",
        "expected",
        "MiB of VRAM",
        "is sufficient",
    ]);
    assert!(done.stdout.is_empty());
    run(&["--dry-run", "--vram", "6M", "--at-least", "1e12"]).refusal(&["no VRAM budget is sufficient"]);
    run(&["--dry-run", "--vram", "0", "--at-least", "1e12"]).refusal(&["the plan has no GPU"]);
    // The time is not rounded to 0, and the hint does not ask for the VRAM that does not help.
    let soon = run(&["--dry-run", "--machine", "rtx4090", "--vram", "6M", "--first-token-within", "0.0001"]);
    let soon = soon.refusal(&["expected after 0.", "no VRAM budget is sufficient", "hint: relax the target, or lower"]);
    assert!(!soon.stderr.contains("after 0 ms"), "{}", soon.stderr);
}

/// A model that does not fit, on a machine with a slow host: the planner streams blocks, each through a slot.
#[test]
fn streaming_is_planned_and_shown() {
    let dir = tempfile::tempdir().unwrap();
    let machine = slow_host(&dir);
    let more = ["--machine", &machine, "--vram", "3500K", "--margin", "1B", "--mechanisms", "all"];
    let plan = planned(&more);
    let streamed: Vec<_> = plan.partitions.iter().filter(|partition| partition.is_streamed()).collect();
    assert!(!streamed.is_empty(), "{plan:#?}");
    assert!(streamed.iter().all(|partition| partition.blocks.len() == 1), "a slot holds one block");
    let ring = plan.devices[1].ring.unwrap();
    let inputs =
        |variant: hpp_schema::PartitionVariant<'_>| variant.weights.iter().filter_map(WeightInput::bytes).sum::<u64>();
    let variants = streamed.iter().flat_map(|partition| partition.variants());
    let largest = variants.filter(|variant| variant.device == "gpu0").map(inputs).max().unwrap();
    assert!(ring.slots >= 1 && ring.slot_bytes.0 >= largest && largest > 0, "{ring:?} {largest}");
    let text = run(&[&["--dry-run"], &more[..]].concat()).success().stdout;
    assert!(text.contains("streamed") && (text.contains(" slot of") || text.contains(" slots of")), "{text}");
    let slots = |n: &str| planned(&[&more[..], &["--slots", n]].concat()).devices[1].ring.map(|ring| ring.slots);
    assert_eq!(slots("2").unwrap_or(2), 2);
    assert!(streamed.iter().any(|p| p.residency == Residency::Streamed || p.prefill.is_some()));
}

/// The laptop preset with a host that is slower than streaming.
fn slow_host(dir: &tempfile::TempDir) -> String {
    let text = fs::read_to_string(machine("rtx4060-laptop.yaml")).unwrap();
    let text = text.replace("memory_gb_per_s: 60", "memory_gb_per_s: 0.5").replace("tflops: 0.55", "tflops: 0.001");
    let text = text.replace("launch_us: 80", "launch_us: 1").replace("latency_us: 10", "latency_us: 1");
    let path = dir.path().join("machine.yaml");
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_plan_that_streams_is_written_and_valid() {
    let dir = tempfile::tempdir().unwrap();
    let (out, trace) = (dir.path().join("plan"), dir.path().join("trace.json"));
    let (path, trace) = (out.to_str().unwrap(), trace.to_str().unwrap());
    let machine = slow_host(&dir);
    let more = ["--machine", &machine, "--vram", "3500K", "--margin", "1B", "--mechanisms", "all"];
    run(&[&more[..], &["--trace", trace, "--out", path]].concat()).success();
    let plan = Plan::from_yaml(&fs::read_to_string(out.join("plan.yaml")).unwrap()).unwrap();
    assert_eq!(plan.check(), []);
    assert!(plan.partitions.iter().any(|partition| partition.is_streamed()));
    // `--stream auto` is equivalent.
    let auto = planned(&[&more[..6], &["--stream", "auto"]].concat());
    assert_eq!(auto, planned(&more));
}

/// A later layer may read the states of an earlier one, before or after this pass's tokens are in them. Both are in one partition then,
/// wherever they were placed.
#[test]
fn layers_that_share_a_state_share_a_partition() {
    for source in ["past_key_values.1", "present.1"] {
        share_a_state(source);
    }
}

/// The last layer of a model reads these keys and values instead of its own.
fn share_a_state(source: &str) {
    let dir = tempfile::tempdir().unwrap();
    let model = copied(LLAMA, dir.path()).join("model.onnx");
    let mut proto = hpp_onnx::Model::open(&model).unwrap().proto().clone();
    let nodes = &mut proto.graph.as_mut().unwrap().node;
    let last =
        nodes.iter_mut().rfind(|node| node.input.iter().any(|name| name.starts_with("past_key_values."))).unwrap();
    for name in last.input.iter_mut().filter(|name| name.starts_with("past_key_values.")) {
        let kind = name.rsplit('.').next().unwrap();
        *name = format!("{source}.{kind}");
    }
    hpp_onnx::write_model(&model, &proto).unwrap();
    for placement in [&["--stream", "all", "--gpu-layers", "1"][..], &["--gpu-layers", "1"], &["--partitions", "6"]] {
        let arguments = [&[model.to_str().unwrap(), "--dry-run", "--json"], placement].concat();
        let plan: Plan = serde_json::from_str(&split(&arguments).success().stdout).unwrap();
        let errors: Vec<_> = plan.check().into_iter().filter(|found| found.severity == Severity::Error).collect();
        assert_eq!(errors, [], "{source}, {placement:?}: {}", places(&plan));
    }
}

#[test]
fn options_that_change_nothing_are_named() {
    let unused =
        run(&["--dry-run", "--vram", "0", "--margin", "1G", "--slots", "4", "--compress", "always", "--movable"]);
    let (stderr, experts) = (unused.success().stderr, run(&["--dry-run", "--experts", "all"]).success().stderr);
    let stateless = fixture("torch/gpt-dynamo");
    let kv = split(&[stateless.to_str().unwrap(), "--dry-run", "--kv", "disk"]).success().stderr;
    for (words, text) in [
        ("--kv has no effect: the model keeps no states", &kv),
        ("--margin has no effect: the plan is for no GPU", &stderr),
        ("--slots has no effect: no weights are streamed to a GPU", &stderr),
        ("--compress has no effect: no weights are read from disk in each pass", &stderr),
        ("--movable has no effect: no layer computes on a GPU", &stderr),
        ("--experts has no effect: no mixture of experts was found", &experts),
    ] {
        assert!(text.contains(words), "{words:?} is not in {text}");
    }
    let used = ["--vram", "6M", "--gpu-layers", "2", "--margin", "100K", "--movable", "--providers", "cuda,cpu"];
    let used = run(&[&["--dry-run"], &used[..]].concat()).success().stderr;
    let many = run(&["--dry-run", "--partitions", "99"]).success().stderr;
    assert!(many.contains("--partitions 99: only 6 are possible"), "{many}");
    assert!(!run(&["--dry-run"]).success().stderr.contains("no effect"));
    assert!(!used.contains("no effect"), "{used}");
}

#[test]
fn providers_that_a_plan_without_gpus_does_not_list_are_named() {
    let said = |more: &[&str]| run(&[&["--dry-run", "--vram", "0"], more].concat()).success().stderr;
    let gpus = said(&["--providers", "cuda,webgpu,cpu"]);
    let why = "--providers cuda,webgpu has no effect: the plan is for no GPU; --vram SIZE plans for one";
    assert!(gpus.contains(why), "{gpus}");
    let host = said(&["--providers", "openvino,cpu"]);
    assert!(host.contains("--providers openvino has no effect: on the host only a --profile"), "{host}");
    let mini_pc = machine("mini-pc.yaml");
    let described = run(&["--dry-run", "--machine", &mini_pc, "--providers", "cuda"]).success().stderr;
    assert!(described.contains("--providers cuda has no effect") && !described.contains("--vram SIZE"), "{described}");
    assert!(!said(&["--providers", "cpu"]).contains("no effect"));
}

/// A plan for a GPU whose providers all compute on the CPU is planned as asked, with a note.
#[test]
fn providers_without_one_for_the_gpu_are_noted() {
    let said = |more: &[&str]| run(&[&["--dry-run", "--vram", "1G"], more].concat()).success().stderr;
    let note = "note: --providers lists none that computes on a GPU";
    assert!(said(&["--providers", "cpu"]).contains(note));
    assert!(!said(&["--providers", "webgpu"]).contains(note) && !said(&[]).contains(note));
}

#[test]
fn a_sweep_names_the_options_of_plans_that_it_does_not_use() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.json");
    let swept = run(&["--sweep-vram", "1M..2M:1M", "--explain", "--trace", trace.to_str().unwrap()]).success();
    for option in ["--explain", "--trace"] {
        assert!(swept.stderr.contains(&format!("note: {option} has no effect: --sweep-vram")), "{}", swept.stderr);
    }
    assert!(!trace.exists());
}

/// `auto` is the default, so it asks for no GPU.
#[test]
fn gpu_layers_auto_plans_as_without_the_option() {
    for vram in [&["--vram", "0"][..], &["--vram", "3M"]] {
        let planned = |more: &[&str]| run(&[&["--dry-run", "--json"], vram, more].concat()).success().stdout;
        assert_eq!(planned(&["--gpu-layers", "auto"]), planned(&[]));
    }
}

/// LongRoPE: an `If` on the length of the attention mask chooses the tables.
#[test]
fn a_model_that_changes_its_tables_is_planned_up_to_the_change() {
    let model = fixture("genai/phi4-mini-fp16-cuda");
    let planned = |more: &[&str]| {
        let done = split(&[&[model.to_str().unwrap(), "--dry-run", "--json"], more].concat()).success();
        (serde_json::from_str::<Plan>(&done.stdout).unwrap(), done.stderr)
    };
    let (plan, stderr) = planned(&[]);
    assert_eq!((plan.budgets.context, plan.model.tables_change_after), (128, Some(128)));
    assert!(stderr.contains("beyond 128 tokens the model uses other tables"), "{stderr}");
    let (plan, stderr) = planned(&["--context", "200"]);
    assert_eq!(plan.budgets.context, 200);
    assert!(stderr.contains("--context 128 avoids that"), "{stderr}");
    assert_eq!(crate::support::planned(&[]).model.tables_change_after, None);
}

#[test]
fn quiet_prints_nothing_but_the_table_and_errors() {
    let done = run(&["--dry-run", "--vram", "0", "--movable", "-q"]).success();
    assert_eq!(done.stderr, "");
    assert!(done.stdout.contains("cpu"), "{}", done.stdout);
    run(&["--dry-run", "-q", "--batch", "0"]).refusal(&["a batch of 0 sequences"]);
}

#[test]
fn the_name_of_a_quantized_plan_says_so() {
    let name = |plan: Plan| plan.model.name;
    let plain = name(planned(&[]));
    assert_eq!(name(planned(&["--quantize", "int8"])), format!("{plain}-int8"));
}

/// Several passes over a prompt compute less attention than one, which the planner prefers where memory is not short. More host memory is no
/// advice there.
#[test]
fn a_target_for_the_first_token_is_met_by_shorter_passes() {
    let workload = ["--machine", "mini-pc", "--prompt-tokens", "500", "--new-tokens", "10"];
    let whole = planned(&[&workload[..], &["--objective", "prefill"]].concat());
    assert_eq!(whole.schedule.prefill_chunk, None);
    let target = (0.98 * whole.predictions.time_to_first_token_ms).to_string();
    let met = planned(&[&workload[..], &["--first-token-within", &target]].concat());
    assert!(met.predictions.time_to_first_token_ms <= target.parse().unwrap(), "{:?}", met.predictions);
    assert!(met.schedule.prefill_chunk.is_some_and(|tokens| tokens < 500));
    let missed = run(&[&workload[..], &["--dry-run", "--first-token-within", "0.001"]].concat());
    let missed = missed.refusal(&["out of reach", "hint: relax the target, or lower"]);
    let earliest = missed.stderr.split("expected after ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    // Rounded up, so that it is within reach.
    assert!(earliest.parse::<f64>().unwrap() <= met.predictions.time_to_first_token_ms * 1.01, "{}", missed.stderr);
    run(&[&workload[..], &["--dry-run", "--first-token-within", earliest]].concat()).success();
}

/// Known before any budget is planned, which may take minutes.
#[test]
fn a_budget_beyond_the_machine_says_what_to_do() {
    for (option, size) in [("--vram", "32G"), ("--sweep-vram", "8G..32G:8G"), ("--ram", "200G")] {
        let refused =
            run(&["--dry-run", "--machine", "rtx4090", option, size]).refusal(&["requested", "hint: give at most"]);
        assert!(!refused.stderr.contains("planning:") && refused.stdout.is_empty(), "{}", refused.stderr);
    }
}

/// More host memory is advised only where it holds less than every placement may need.
#[test]
fn a_missed_target_of_a_plan_that_is_short_of_host_memory_advises_to_raise_it() {
    let missed = |ram: &str| run(&["--dry-run", "--vram", "0", "--ram", ram, "--at-least", "1e12"]);
    let refused = missed("66M").refusal(&["bytes) of --ram are enough"]);
    let smallest = refused.stderr.split(" bytes) of --ram").next().and_then(|text| text.rsplit('(').next()).unwrap();
    missed(&format!("{smallest}B")).refusal(&["the fastest plan", "is expected to reach", "raise --ram"]);
    let ample = missed("1G").refusal(&["is expected to reach"]);
    assert!(!ample.stderr.contains("raise --ram"), "{}", ample.stderr);
}

/// A speed that rounds to the one asked for is shown below it, and is within reach.
#[test]
fn the_speed_of_a_missed_target_is_shown_below_it() {
    let reached = planned(&["--vram", "0"]).predictions.decode_tokens_per_second;
    let target = reached * 1.0001;
    let refused = run(&["--dry-run", "--vram", "0", "--at-least", &target.to_string()]).refusal(&["is out of reach"]);
    let shown = refused.stderr.split("is expected to reach ").nth(1).and_then(|rest| rest.split(';').next()).unwrap();
    assert!(shown.parse::<f64>().unwrap() < target, "{}", refused.stderr);
    run(&["--dry-run", "--vram", "0", "--at-least", shown]).success();
}

/// Plans with layers divided before their experts are not compared, so the proof is not of them.
#[test]
fn a_proof_for_a_mixture_beside_a_gpu_is_of_undivided_layers() {
    let says = |model: &str, more: &[&str]| {
        let done = split(&[&[fixture(model).to_str().unwrap(), "--dry-run"], more].concat()).success();
        assert!(done.stdout.contains("by these estimates"), "{}", done.stdout);
        done.stdout.contains(" plan of undivided layers ")
    };
    let mixture = "genai/gpt-oss-int4-cpu";
    assert!(says(mixture, &["--vram", "8G"]));
    assert!(!says(mixture, &["--vram", "0"]) && !says(mixture, &["--vram", "8G", "--cpu-moe"]));
    assert!(!says(LLAMA, &["--vram", "8G"]));
}
