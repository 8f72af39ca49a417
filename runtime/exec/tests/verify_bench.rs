//! `verify` and `bench` on recorded models.

mod support;

use hpp_schema::Provider;
use serde_json::json;
use support::PlanDir;

#[test]
fn a_model_is_bit_identical_to_itself() {
    for name in ["genai/llama3-fp32-cpu", "optimum/llama-with-past", "torch/gpt-dynamo", "genai/qwen3.5-fp32-cpu"] {
        let plan = PlanDir::new(name, 64);
        let prompt = plan.prompt();
        let report = plan.command("verify", &["--tokens", &prompt, "--json"]).ok().json();
        assert_eq!((&report["bit_identical"], &report["within_tolerance"]), (&json!(true), &json!(true)), "{name}");
        let tokens: Vec<_> = report["steps"].as_array().unwrap().iter().map(|s| s["token"].clone()).collect();
        assert_eq!(json!(tokens), json!(plan.model.tokens()), "{name}");
    }
}

#[test]
fn models_that_run_once_are_verified_on_random_inputs() {
    let plan = PlanDir::new("optimum/bert", 64);
    let ran = plan.command("verify", &[]).ok();
    assert!(ran.stdout.contains("bit-identical"), "{}", ran.stdout);
    for prompt in [["-p", "hello"], ["--tokens", "1,2"], ["-f", "/nonexistent"]] {
        plan.command("verify", &prompt).fails(1, &["the model generates no text", "--inputs"]);
    }
}

/// The plan's partition has some weights changed; the unsplit model has the original ones.
#[test]
fn a_changed_weight_is_found_and_fails() {
    let mut plan = PlanDir::new("genai/llama3-fp32-cpu", 64);
    let other = plan.file("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::copy(plan.file("model.onnx"), plan.file("part.onnx")).unwrap();
    let mut weights = std::fs::read(plan.file("model.onnx.data")).unwrap();
    // Halves a run of weights in the middle of the file: exponents of little-endian f32.
    let middle = weights.len() / 2 / 4 * 4;
    for at in (middle..middle + 40_000).step_by(4) {
        weights[at + 3] ^= 0x01;
    }
    std::fs::write(other.join("model.onnx.data"), weights).unwrap();
    let partition = &mut plan.plan.partitions[0];
    (partition.file, partition.weights_dir) = ("part.onnx".into(), "other".into());
    let mut record = plan.plan.files.iter().find(|f| f.path == "model.onnx").unwrap().clone();
    (record.path, record.role) = ("part.onnx".into(), hpp_schema::FileRole::Partition);
    plan.plan.files.push(record);
    plan.save();
    let ran = plan.command("verify", &["--tokens", &plan.prompt(), "--steps", "4"]);
    assert_eq!(ran.code, Some(1), "{}\n{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.contains("DIFFERENT") && ran.stdout.contains("first difference"), "{}", ran.stdout);
}

#[test]
fn distributions_are_compared_over_a_file_of_prompts() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 64);
    let prompts = plan.file("prompts.jsonl");
    let lines =
        [r#"{"id": 1, "tokens": [5, 6, 7]}"#, r#"{"tokens": [9]}"#, r#"{"id": 3, "tokens": [1000000]}"#, "not JSON"];
    std::fs::write(&prompts, lines.join("\n")).unwrap();
    let prompts = prompts.to_str().unwrap();
    let ran = plan.command("verify", &["--kl", prompts, "--json"]);
    let (stderr, report) = (ran.stderr.clone(), ran.ok().json());
    assert!(stderr.contains("prompt 3 is left out") && stderr.contains("line 4 is left out: not a job"), "{stderr}");
    assert_eq!((&report["prompts"], &report["positions"]), (&json!(2), &json!(4)));
    assert_eq!(
        (&report["kl"]["max"], &report["same_top1"], &report["perplexity_ratio"]),
        (&json!(0.0), &json!(1.0), &json!(1.0))
    );
    let page = plan.file("kl.html");
    let page = page.to_str().unwrap();
    let reported = plan.command("verify", &["--kl", prompts, "--report", page]).ok();
    let table = reported.stdout;
    assert!(table.contains("KL divergence, nats") && table.contains("same most likely token: 100.00 %"), "{table}");
    assert!(reported.stderr.contains(&format!("wrote {page}")), "{}", reported.stderr);
    let written = std::fs::read_to_string(page).unwrap();
    assert!(written.starts_with("<!DOCTYPE html>") && written.contains("No position diverges"), "{written}");
    // A page is replaced, any other file is not.
    plan.command("verify", &["--kl", prompts, "--report", page]).ok();
    let refused = plan.command("verify", &["--kl", prompts, "--report", prompts]);
    assert!(refused.code == Some(1) && refused.stderr.contains("prompts.jsonl"), "{}", refused.stderr);
    assert!(std::fs::read_to_string(prompts).unwrap().contains("not JSON"));
    let without = plan.command("verify", &["--report", page]);
    assert!(without.code == Some(2) && without.stderr.contains("--kl"), "{}", without.stderr);
    // Nor with a prompt, which --kl takes the place of.
    for option in ["--report", "--against"] {
        let with_prompt = ["--tokens", "1", "--steps", "1", option, page];
        plan.command("verify", &with_prompt).fails(2, &[&format!("{option} needs --kl"), "add --kl PROMPTS.jsonl"]);
    }
}

#[test]
fn distributions_that_cannot_be_compared_are_refused() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 64);
    let other = PlanDir::new("genai/learned-llama-fp32-cpu", 64);
    let prompts = plan.file("prompts.jsonl");
    let missing = plan.command("verify", &["--kl", prompts.to_str().unwrap()]);
    assert!(missing.code == Some(1) && missing.stderr.contains("cannot read prompts"), "{}", missing.stderr);
    std::fs::write(&prompts, "\n{}\n").unwrap();
    let empty = plan.command("verify", &["--kl", prompts.to_str().unwrap()]);
    assert!(empty.code == Some(1) && empty.stderr.contains("no prompt that can be compared"), "{}", empty.stderr);
    std::fs::write(&prompts, json!({ "prompt": "far too long ".repeat(40) }).to_string()).unwrap();
    let long = plan.command("verify", &["--kl", prompts.to_str().unwrap()]);
    assert!(long.code == Some(1) && long.stderr.contains("divide a long text into several lines"), "{}", long.stderr);
    std::fs::write(&prompts, "\n{}\n").unwrap();
    let against = other.file("plan.yaml");
    let arguments = ["--kl", prompts.to_str().unwrap(), "--against", against.to_str().unwrap()];
    let ran = plan.command("verify", &arguments);
    assert!(ran.code == Some(1) && ran.stderr.contains("a vocabulary of"), "{}", ran.stderr);
}

#[test]
fn a_benchmark_reports_its_measurements() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 64);
    let args = ["--prompt-tokens", "16", "--new-tokens", "8", "--runs", "2"];
    let report = plan.command("bench", &[&args[..], &["--json"]].concat()).ok().json();
    assert_eq!((&report["prompt_tokens"], &report["new_tokens"], &report["runs"]), (&json!(16), &json!(8), &json!(2)));
    for field in ["time_to_first_token_ms", "prefill_tokens_per_second", "decode_tokens_per_second"] {
        assert!(report[field]["median"].as_f64().unwrap() > 0.0, "{field}: {report}");
    }
    let whole = plan.command("bench", &[&args[..], &["--unsplit"]].concat()).ok();
    assert!(whole.stdout.contains("unsplit") && whole.stdout.contains("decode, tokens/s (mean)"), "{}", whole.stdout);
    let once = plan.command("bench", &["--prompt-tokens", "16", "--new-tokens", "1", "--runs", "1"]).ok().stdout;
    assert!(once.contains("(1 partition): 16 prompt tokens, 1 new token, median of 1 run\n"), "{once}");
}

#[test]
fn a_benchmark_holds_the_tokenizer_but_needs_none() {
    let mut plan = PlanDir::new("genai/llama3-fp32-cpu", 64);
    let args = ["--prompt-tokens", "8", "--new-tokens", "2", "--runs", "1"];
    let warning = "measuring without a tokenizer in memory";
    let with = plan.command("bench", &args).ok();
    assert!(!with.stderr.contains(warning), "{}", with.stderr);
    std::fs::write(plan.file("broken.json"), "{}").unwrap();
    plan.plan.generation.as_mut().unwrap().tokenizer = Some("broken.json".into());
    plan.save();
    let without = plan.command("bench", &args).ok();
    assert!(without.stderr.contains(warning) && without.stderr.contains("broken.json"), "{}", without.stderr);
}

#[test]
fn a_benchmark_reports_gpu_partitions_that_ran_on_the_cpu() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 64).for_gpu(vec![Provider::CUDA]);
    let trace = plan.file("trace.json");
    let args = ["--prompt-tokens", "8", "--new-tokens", "4", "--runs", "1", "--json", "--trace"];
    let report = plan.command("bench", &[&args[..], &[trace.to_str().unwrap()]].concat()).ok().json();
    let computed = &report["token"]["compute_ms"];
    assert!(computed["gpu0 on the CPU"].as_f64().unwrap() > 0.0 && computed["gpu0"].is_null(), "{report}");
    assert!(report["stages"][0]["decode_ms_median"].as_f64().unwrap() > 0.0, "{report}");
    assert!(std::fs::read_to_string(trace).unwrap().contains("gpu0 on the CPU"));
}

#[test]
fn a_verification_that_fills_the_context_warns() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 16);
    let ran = plan.command("verify", &["--tokens", "1,2,3", "--steps", "600"]).ok();
    assert_eq!(ran.stderr, "warning: the context of 16 is full after 14 steps of 600\n");
    let ran = plan.command("verify", &["--tokens", "1,2,3", "--steps", "14"]).ok();
    assert_eq!(ran.stderr, "");
}

#[test]
fn a_benchmark_reports_each_token_and_writes_its_trace() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 64);
    let trace = plan.file("trace.json");
    let args = ["--prompt-tokens", "16", "--new-tokens", "9", "--runs", "2", "--json", "--trace"];
    let report = plan.command("bench", &[&args[..], &[trace.to_str().unwrap()]].concat()).ok().json();
    let number = |value: &serde_json::Value| value.as_f64().unwrap_or_else(|| panic!("{report}"));
    assert_eq!((number(&report["decode_context"]), number(&report["context"])), (19.5, 64.0));
    let token = number(&report["decode_ms_per_token"]["median"]);
    let stage = number(&report["stages"][0]["decode_ms_median"]);
    assert!(stage > 0.0 && token > stage, "{report}");
    let tokens = report["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), 8);
    // Medians of parts do not add up to the median of the whole; each lies between the extremes of its part.
    for part in ["ms", "rest_ms"] {
        let values = || tokens.iter().map(|token| number(&token[part]));
        let (least, most) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
        assert!((least..=most).contains(&number(&report["token"][part])), "{part}: {report}");
    }
    for token in tokens {
        let sum = number(&token["compute_ms"]["cpu"]) + number(&token["rest_ms"]);
        assert!((sum - number(&token["ms"])).abs() < 1e-6, "{token}");
    }
    assert!(report["links"].is_null(), "nothing is streamed: {report}");
    assert!(number(&report["prefill_ms"]["median"]) > 0.0);
    assert!(number(&report["prefill_ms"]["median"]) < number(&report["time_to_first_token_ms"]["max"]));

    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    let events: Vec<_> = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X").collect();
    let count = |kind: &str| events.iter().filter(|event| event["cat"] == kind).count();
    assert_eq!((count("pass"), count("compute"), count("transfer")), (9, 9, 0), "the prompt and eight tokens");
}

#[test]
fn a_trace_that_cannot_be_written_fails_before_measuring() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 64);
    let args = ["--prompt-tokens", "8", "--new-tokens", "8", "--trace", "no/such/dir/trace.json"];
    plan.command("bench", &args).fails(1, &["no/such/dir/trace.json", "create it"]);
}

#[test]
fn devices_lists_library_and_providers() {
    let ran = support::hpp_exec(["devices"]).ok();
    assert!(ran.stdout.contains("ONNX Runtime") && ran.stdout.contains("CPU"), "{}", ran.stdout);
    let json = support::hpp_exec(["devices", "--json"]).ok().json();
    assert!(json.is_object());
    support::hpp_exec(["devices", "--ort-lib", "no/such.so"]).fails(1, &["no/such.so", "hint:"]);
}
