//! Invalid settings and files: all errors are reported at once and nothing is written.

use crate::support::{LLAMA, fixture, machine, profile, split};
use std::fs;

fn run(more: &[&str]) -> crate::support::Done {
    let model = fixture(LLAMA);
    split(&[&[model.to_str().unwrap(), "--out", "never-written"], more].concat())
}

#[test]
fn all_invalid_settings_are_reported_at_once() {
    let all = ["--vram", "0,0", "--ram", "0", "--batch", "0", "--new-tokens", "0", "--slots", "0", "--at-least", "-1"];
    let words = ["VRAM budget of 0", "RAM budget of 0", "batch of 0", "answer of 0", "ring of 0", "--at-least"];
    let done = run(&all).refusal(&words);
    assert!(done.stderr.matches("error: ").count() >= 6, "{}", done.stderr);
}

#[test]
fn contradictory_settings_are_refused() {
    for (more, words) in [
        (&["--slots", "3", "--mechanisms", "resident,cpu,disk"][..], &["--slots", "--stream"][..]),
        (&["--refine", "8", "--dry-run"], &["--refine"]),
        (&["--refine", "0"], &["fewer than 2 tokens"]),
        (&["--refine", "1"], &["fewer than 2 tokens"]),
        (&["--refine", "8", "--machine", &machine("mini-pc.yaml")], &["--refine", "--machine"]),
        (&["--sweep-vram", "1M..2M", "--gpu-layers", "2"], &["manually"]),
        (&["--sweep-vram", "1M..2M", "--vram", "3M,2M"], &["every GPU the same size", "equal sizes"]),
        (&["--sweep-vram", "1M..2M", "--at-least", "5"], &["--at-least", "are for one plan"]),
        (&["--first-token-within", "nan"], &["--first-token-within"]),
        (&["--vram", "0", "--gpu-layers", "2"], &["--vram 0", "--gpu-layers"]),
        (&["--assign", "layers.0-99=gpu"], &["layers.0-99", "no layers.99", "layers.3"]),
        (&["--assign", "layer.1=gpu"], &["did you mean layers.1"]),
        (&["--machine", "rtx5090"], &["rtx5090", "rtx4060-laptop, rtx4090-desktop"]),
    ] {
        run(more).refusal(words);
    }
    for usage in [
        &["--profile", "a", "--machine", "b"][..],
        &["--allow-other-machine"],
        &["--sweep-vram", "8G..4G"],
        &["--planner", "lucky"],
        &["--mechanisms", "resident"],
        &["--vram", "24"],
        &["--ram", "1.5"],
        &["--sweep-vram", "4..24"],
        &["--context", "lots"],
    ] {
        let done = run(usage);
        assert_eq!(done.status, Some(2), "{usage:?}: {}", done.stderr);
    }
}

/// A small number without a unit most likely means gibibytes.
#[test]
fn a_number_without_a_unit_gets_a_suggestion() {
    assert!(run(&["--vram", "24"]).stderr.contains("did you mean 24G"));
    assert!(run(&["--context", "lots"]).stderr.contains("8k"));
}

#[test]
fn a_mistyped_subcommand_is_named() {
    assert!(split(&["plan", "no/such/model"]).stderr.contains("splitting needs no subcommand"));
    assert!(split(&["inspekt", "no/such/model"]).stderr.contains("did you mean 'hpp-split inspect'?"));
    assert!(!split(&["--help"]).stdout.is_empty());
}

#[test]
fn budgets_beyond_the_machine_are_refused_with_numbers() {
    let laptop = machine("rtx4060-laptop.yaml");
    let done = run(&["--machine", &laptop, "--vram", "24G,1G", "--ram", "64G", "--dry-run"]);
    done.refusal(&["24 GiB", "8 GiB", "2 GPUs", "64 GiB", "32 GiB"]);
    run(&["--machine", &machine("mini-pc.yaml"), "--vram", "1G", "--dry-run"]).refusal(&[
        "1 GPU, but",
        "has none",
        "leave out --vram",
    ]);
    let swept = run(&["--machine", &machine("mini-pc.yaml"), "--sweep-vram", "1G..4G"]);
    swept.refusal(&["1 GPU, but", "leave out --sweep-vram"]);
}

#[test]
fn a_gpu_that_is_too_small_is_not_needed() {
    let done = run(&["--vram", "64K", "--dry-run"]).success();
    assert!(done.stderr.contains("all blocks compute on the CPU: gpu0 may use 64 KiB"), "{}", done.stderr);
    run(&["--vram", "64K", "--gpu-layers", "2"]).refusal(&["gpu0 is too small", "the smallest sufficient --vram"]);
}

/// Shorter passes than those that the plan begins with may fit it.
#[test]
fn a_gpu_that_the_plan_uses_is_not_called_too_small() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("profile.json");
    fs::write(&file, serde_json::to_string(&profile(LLAMA, 100.0, 0.1)).unwrap()).unwrap();
    let mut used = 0;
    for vram in (1..12).map(|mib| format!("{mib}M")) {
        let done = run(&["--profile", file.to_str().unwrap(), "--vram", &vram, "--dry-run"]).success();
        let is_noted = done.stderr.contains("all blocks compute on the CPU");
        assert!(!(is_noted && done.stdout.contains("gpu_0")), "{}{}", done.stdout, done.stderr);
        used += usize::from(done.stdout.contains("gpu_0"));
    }
    assert!(used > 0);
}

#[test]
fn all_errors_in_a_machine_file_are_reported_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("machine.yaml");
    let text = fs::read_to_string(machine("rtx4090-desktop.yaml")).unwrap();
    let text =
        text.replace("  memory_gb_per_s: 70\n", "").replace("tflops: 82", "tflops: -1").replace("disk:", "disc:");
    fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap();
    // An invalid setting is reported with them.
    let done = run(&["--machine", path, "--batch", "0"]);
    done.refusal(&[
        "cpu.memory_gb_per_s: it is missing",
        "gpus[0].tflops: -1",
        "disc: there is no such field",
        "batch of 0",
    ]);
}

/// Other formats are recognised and refused with the command that exports them.
#[test]
fn other_formats_than_onnx_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let builder = "onnxruntime_genai.models.builder";
    let gguf = write("model-q4.gguf", b"GGUF\x03\0\0\0");
    split(&[&gguf]).refusal(&["a GGUF file", builder, "quantized"]);
    let weights = write("hf/model.safetensors", b"\x02\0\0\0\0\0\0\0{}");
    split(&[&weights]).refusal(&["a safetensors file", builder]);
    write("hf/config.json", b"{}");
    let checkpoint = dir.path().join("hf");
    let path = checkpoint.to_str().unwrap();
    split(&[path]).refusal(&["a Hugging Face checkpoint", &format!("{builder} -i {path}"), "optimum-cli"]);
    split(&["inspect", path]).refusal(&["a Hugging Face checkpoint"]);
}

#[test]
fn a_batch_that_overflows_64_bits_is_refused() {
    run(&["--batch", "9223372036854775807", "--context", "64"]).refusal(&["the largest batch is 1048576"]);
}

/// hpp-exec jobs gives each sequence tensors of its own, so a plan for rows of one tensor predicts nothing for it.
#[test]
fn a_batch_predicts_each_of_its_sequences_and_nothing_for_jobs() {
    let text = run(&["--batch", "4", "--context", "64", "--dry-run"]).success().stdout;
    assert!(text.contains("tokens/s for each of 4 sequences in one pass") && !text.contains("hpp-exec jobs"), "{text}");
    run(&["--batch", "4", "--objective", "throughput"]).refusal(&["--batch fixes", "omit one of them"]);
}

#[test]
fn calibration_without_quantizing_says_that_nothing_is_quantized() {
    run(&["--calibration", "corpus.jsonl"]).refusal(&["--quantize was not given", "give --quantize int4"]);
    run(&["--calibration", "corpus.jsonl", "--quantize", "int8"]).refusal(&["with 8 there is little to gain"]);
}

#[test]
fn limits_of_quantize_auto_are_refused_without_it() {
    let limits = &["which was not given", "hint: give --quantize auto"][..];
    run(&["--bits-budget", "3G"]).refusal(&[limits, &["--bits-budget 3 GiB limits"]].concat());
    for more in [&[][..], &["--quantize", "int4"], &["--quantize", "auto"]] {
        let refused = run(&[&["--max-kl", "0.02"], more].concat());
        assert_eq!(refused.stderr.matches("error:").count(), 1, "{}", refused.stderr);
        refused.refusal(&["--max-kl 0.02 limits", "hint: give --quantize auto with --calibration PROMPTS.jsonl"]);
    }
    run(&["--max-kl", "0.02"]).refusal(limits);
    run(&["--max-kl", "0.02", "--quantize", "auto"]).refusal(&["with --calibration, which was not given"]);
    run(&["--max-kl", "0.02", "--calibration", "c.jsonl", "--quantize", "int4"])
        .refusal(&["--max-kl 0.02 limits", "--quantize int4 chooses nothing"]);
    for (value, said) in [("0.0", "0"), ("-1", "-1"), ("nan", "NaN")] {
        let options = ["--max-kl", value, "--calibration", "c.jsonl", "--quantize", "auto"];
        run(&options).refusal(&[&format!("--max-kl {said} is no divergence"), "hint: give nats above 0"]);
    }
    assert!(run(&["--max-kl", "little"]).stderr.contains("a number of nats, such as 0.02"));
}

/// What is no model gets a hint at what to give instead.
#[test]
fn paths_without_a_model_get_a_hint() {
    split(&["nope"]).refusal(&["there is no model at nope", "hint: give an ONNX file, or"]);
    let models = fixture("");
    split(&[models.to_str().unwrap()]).refusal(&["there is no ONNX file in", "hint: give the directory of one model"]);
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    write("genai_config.json", r#"{"model": {"decoder": {"filename": "model.onnx"}}}"#);
    let path = dir.path().to_str().unwrap();
    split(&[path]).refusal(&["names the model file", "hint: correct model.decoder.filename"]);
    write("plan.yaml", "");
    write("whole.onnx", "");
    split(&[path]).refusal(&["is a plan, not a model", "its unsplit model is", "whole.onnx"]);
}

#[test]
fn unreadable_and_foreign_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (empty, binary, plan) = (file("empty", b""), file("binary", &[0xff, 0xfe, 0]), file("plan", b"hpp_plan: 2\n"));
    let cut_short = file("cut_short", b"hpp_profile: 1\nmodel: {\n");
    run(&["--profile", &cut_short])
        .refusal(&["cut_short", "hint: give the file that hpp-profile wrote, or measure again"]);
    for (option, hint) in [("--machine", "hint: give the name of a preset"), ("--profile", "hint: give the file")] {
        for more in [&[][..], &["--quantize", "auto"]] {
            run(&[&[option, "no/such/file"], more].concat()).refusal(&["no/such/file", hint]);
        }
        run(&[option, &empty]).refusal(&["empty", "has no line", hint]);
        run(&[option, &binary]).refusal(&["not valid UTF-8", hint]);
        run(&[option, &plan]).refusal(&["has no line", hint]);
        run(&[option, dir.path().to_str().unwrap()]).refusal(&["cannot read", hint]);
    }
    assert!(!std::path::Path::new("never-written").exists());
}

/// A copy of the fixture's files.
fn copied_model() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    for file in fs::read_dir(fixture(LLAMA)).unwrap() {
        let file = file.unwrap().path();
        fs::copy(&file, dir.path().join(file.file_name().unwrap())).unwrap();
    }
    let data = dir.path().join("model.onnx.data");
    (dir, data)
}

/// The last weight's end counts, not that of the first one that is missing.
#[test]
fn a_short_weight_file_is_refused_with_both_sizes_and_advice() {
    let (dir, data) = copied_model();
    let model = dir.path().to_str().unwrap();
    let whole = fs::metadata(&data).unwrap().len();
    fs::File::options().write(true).open(&data).unwrap().set_len(1000).unwrap();
    let advice = ["model.onnx.data", "has 1000 bytes", &format!("take {whole}"), "hint: ", "download or copy it again"];
    split(&[model, "--dry-run"]).refusal(&advice);
    fs::write(&data, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n").unwrap();
    split(&[model, "--dry-run"]).refusal(&["model.onnx.data", "Git LFS pointer", "git lfs pull"]);
}

#[test]
fn a_json_file_is_no_model_but_names_the_one_beside_it() {
    let (dir, _) = copied_model();
    for (name, is) in [("tokenizer.json", "tokenizer"), ("genai_config.json", "configuration of ONNX Runtime GenAI")] {
        let file = dir.path().join(name);
        split(&[file.to_str().unwrap(), "--dry-run"]).refusal(&[name, is, "give the model's directory", "model.onnx"]);
    }
    split(&[dir.path().to_str().unwrap(), "--dry-run"]).success();
}

/// What no memory mends is refused before memory that is too small, whose hint would lead to it.
#[test]
fn what_a_plan_without_gpus_cannot_do_is_refused_before_its_memory() {
    let refused = |model: &str, more: &[&str], words: &[&str]| {
        let done = split(&[&[fixture(model).to_str().unwrap(), "--vram", "0", "--ram", "1M"], more].concat());
        assert!(!done.refusal(words).stderr.contains("--ram"));
    };
    let paged = "genai/llama3-fp16-cuda-paged";
    refused(paged, &["--dry-run"], &["PagedAttention has no CPU kernel", "without paged attention"]);
    refused(LLAMA, &["--dry-run", "--kv", "gpu"], &["--kv gpu, but 4 layers with a KV cache compute on the CPU"]);
    // Nor is the time that the CPU would take a reason, where it cannot compute a partition.
    let on_gpu = split(&[fixture(paged).to_str().unwrap(), "--vram", "8G", "--dry-run"]).success();
    let table = &on_gpu.stdout;
    assert!(table.contains("gpu_0") && !table.contains("on the CPU"), "{table}");
    let unchecked = ["--vram", "0", "--ram", "1M", "--dry-run", "--allow-unknown-operators"];
    split(&[&[fixture(paged).to_str().unwrap()], &unchecked[..]].concat()).refusal(&["the smallest sufficient --ram"]);
}
