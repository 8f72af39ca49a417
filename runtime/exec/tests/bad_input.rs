//! Wrong plans, files, prompts and machines: each gives an error with a hint, and none a panic.

mod support;

use hpp_schema::{FileRole, Provider, Step};
use support::{PlanDir, Ran, command, record};

const LLAMA: &str = "genai/llama3-fp32-cpu";

fn rewrite(plan: &PlanDir, from: &str, to: &str) {
    let text = std::fs::read_to_string(plan.path()).unwrap();
    assert!(text.contains(from), "{from:?} is not in the plan");
    std::fs::write(plan.path(), text.replacen(from, to, 1)).unwrap();
}

fn flip(path: &std::path::Path, at: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at] ^= 0x40;
    std::fs::write(path, bytes).unwrap();
}

/// ONNX Runtime writes an identifier of the device and events of each process to the home directory, unless its telemetry is off.
#[test]
fn nothing_is_recorded_for_telemetry() {
    let home = tempfile::tempdir().unwrap();
    let mut devices = support::command(["devices"]);
    for variable in ["HOME", "XDG_CACHE_HOME", "USERPROFILE", "LOCALAPPDATA"] {
        devices.env(variable, home.path());
    }
    support::Ran::of(devices.env_remove("ORT_DISABLE_TELEMETRY").output().unwrap()).ok();
    let left: Vec<_> = std::fs::read_dir(home.path()).unwrap().flatten().map(|entry| entry.path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn files_that_differ_from_the_plans_records() {
    let plan = PlanDir::new(LLAMA, 64);
    let run = || plan.run(&["--tokens", "1,2"]);
    let data = plan.file("model.onnx.data");
    let whole = std::fs::read(&data).unwrap();

    flip(&data, 10);
    run().fails(1, &["model.onnx.data", "changed", "hint:"]);
    std::fs::write(&data, &whole[..whole.len() - 1]).unwrap();
    run().fails(1, &["model.onnx.data", "bytes", "hint:"]);
    std::fs::remove_file(&data).unwrap();
    run().fails(1, &["model.onnx.data", "hint:"]);
    std::fs::write(&data, &whole).unwrap();
    flip(&plan.file("model.onnx"), 100);
    run().fails(1, &["model.onnx", "changed"]);
}

#[test]
fn every_byte_of_a_small_model_is_compared_by_default() {
    let plan = PlanDir::new(LLAMA, 64);
    plan.run(&["--tokens", "1,2", "--max-new", "1", "--verify-weights"]).ok();
    // Of larger files only samples of 4 KiB are compared; this byte lies between the first two.
    let data = plan.file("model.onnx.data");
    assert!(std::fs::metadata(&data).unwrap().len() > 66 * 4096);
    flip(&data, 4096 + 64);
    plan.run(&["--tokens", "1,2"]).fails(1, &["model.onnx.data", "changed", "hint:"]);
}

#[test]
fn plans_that_are_not_plans() {
    let plan = PlanDir::new(LLAMA, 64);
    let run = || plan.run(&["--tokens", "1,2"]);
    let original = std::fs::read_to_string(plan.path()).unwrap();
    for (from, to, says) in [
        ("hpp_plan: 2", "hpp_plan: 1", "version 1"),
        ("hpp_plan: 2", "hpp_plan: one", "plan"),
        ("hpp_plan: 2", "something: else", "plan"),
        ("devices:", "gadgets:", "gadgets"),
        ("run: whole", "run: nothing", "changed after hpp-split wrote it, at schedule"),
        ("from: state", "from: gpu_7", "changed after hpp-split wrote it, at partitions[0] (whole)"),
        ("seal:", "sea:", "sea"),
    ] {
        std::fs::write(plan.path(), &original).unwrap();
        rewrite(&plan, from, to);
        run().fails(1, &["plan", says, "hint:"]);
    }
    for text in ["", "[", "\u{0}", "a: &a [*a]"] {
        std::fs::write(plan.path(), text).unwrap();
        run().fails(1, &["plan.yaml"]);
    }
    std::fs::write(plan.path(), [0xff, 0xfe, 0x00]).unwrap();
    run().fails(1, &["plan.yaml"]);
    let other = plan.file("notes.txt");
    for text in [&b"[package]\nname = 'x': y"[..], &[0xff, 0xfe, 0x00]] {
        std::fs::write(&other, text).unwrap();
        support::hpp_exec([other.to_str().unwrap(), "--tokens", "1"])
            .fails(1, &["notes.txt is neither a plan nor a model", "hint: give the plan.yaml"]);
    }
}

#[test]
fn a_plan_without_its_seal_is_refused_and_fields_that_users_may_edit_are_not_sealed() {
    let plan = PlanDir::new(LLAMA, 64);
    let run = || plan.run(&["--tokens", "1,2", "--max-new", "1"]);
    rewrite(&plan, "reason: a test", "reason: I want it so");
    rewrite(&plan, "context: 64", "context: 65");
    run().ok();
    let text = std::fs::read_to_string(plan.path()).unwrap();
    std::fs::write(plan.path(), text.split("\nseal:").next().unwrap()).unwrap();
    run().fails(1, &["has no seal", "hint: make the plan again"]);
}

#[test]
fn plans_that_contradict_themselves_or_name_files_outside() {
    type Change = fn(&mut hpp_schema::Plan);
    let changes: [(Change, &str); 8] = [
        (|plan| plan.schedule.decode[0] = hpp_schema::Step::Run("nothing".into()), "nothing"),
        (|plan| plan.partitions[0].inputs.last_mut().unwrap().from = "gpu_7".into(), "gpu_7"),
        (|plan| plan.model.weights_dir = "/etc".into(), "/etc"),
        (|plan| plan.partitions[0].file = "../../../etc/passwd".into(), "etc/passwd"),
        (|plan| plan.partitions[0].inputs[0].from = "whole".into(), "input_ids"),
        (|plan| plan.partitions[0].device = "gpu7".into(), "gpu7"),
        (|plan| drop(plan.partitions[0].outputs.remove(1)), "present"),
        (|plan| plan.partitions[0].name = "model".into(), "model"),
    ];
    for (change, says) in changes {
        let mut plan = PlanDir::new(LLAMA, 64);
        change(&mut plan.plan);
        plan.save();
        plan.run(&["--tokens", "1,2"]).fails(1, &["the plan cannot run", says, "hint:"]);
    }
}

#[test]
fn a_partition_whose_file_has_other_inputs_than_the_plan() {
    let mut plan = PlanDir::new(LLAMA, 64);
    plan.plan.partitions[0].inputs[0].name = "other_ids".into();
    plan.plan.model.inputs[0].name = "other_ids".into();
    plan.save();
    plan.run(&["--tokens", "1,2"]).fails(1, &["other_ids", "hint:"]);
}

#[test]
fn a_partition_that_is_not_a_model() {
    let mut plan = PlanDir::new(LLAMA, 64);
    for bytes in [&b""[..], b"not a model", &[0x0a; 300]] {
        std::fs::write(plan.file("model.onnx"), bytes).unwrap();
        let dir = plan.path().parent().unwrap().to_owned();
        plan.plan.files.retain(|f| f.path != "model.onnx");
        plan.plan.files.push(record(&dir, "model.onnx", FileRole::Source));
        plan.save();
        plan.run(&["--tokens", "1,2"]).fails(1, &["model.onnx"]);
    }
}

#[test]
fn a_model_needs_hpp_split() {
    let plan = PlanDir::new(LLAMA, 64);
    // A copy of the command without hpp-split beside it.
    let alone = plan.file("hpp-exec");
    let own = env!("CARGO_BIN_EXE_hpp-exec");
    std::fs::hard_link(own, &alone).or_else(|_| std::fs::copy(own, &alone).map(drop)).unwrap();
    let mut command = std::process::Command::new(alone);
    command.args([plan.file("model.onnx").to_str().unwrap(), "--tokens", "1"]).env("PATH", "");
    Ran::of(command.output().unwrap()).fails(1, &["is a model", "hpp-split", "neither beside", "hint:"]);
    support::hpp_exec(["nowhere/plan.yaml", "--tokens", "1"]).fails(1, &["nowhere/plan.yaml", "hpp-split"]);
}

#[test]
fn a_mistyped_subcommand_alone_is_no_plan_and_gets_a_hint() {
    let said =
        ["there is no plan or model at bensh", "hint: there is no subcommand 'bensh'; did you mean 'hpp-exec bench'?"];
    support::hpp_exec(["bensh"]).fails(1, &said);
    support::hpp_exec(["chat"]).fails(1, &["no plan or model at chat", "hint: write `hpp-exec MODEL --chat`"]);
    support::hpp_exec(["bench", "bensh"]).fails(1, &["no plan or model at bensh", "hint: give the plan.yaml"]);
}

#[test]
fn prompts_that_cannot_be_read() {
    let mut plan = PlanDir::new(LLAMA, 32);
    plan.plan.model.context_length = Some(512);
    plan.save();
    plan.run(&["--prompt", ""]).fails(1, &["the prompt is empty", "hint:"]);
    // Also where the tokenizer begins each text with a token of its own.
    PlanDir::new("genai/learned-llama-fp32-cpu", 32).run(&["--prompt", ""]).fails(1, &["the prompt is empty"]);
    let long = vec!["1"; 33].join(",");
    plan.run(&["--tokens", &long]).fails(1, &["33 tokens", "32", "hint:"]);
    plan.run(&["--tokens", "1,512"]).fails(1, &["512", "out of range"]);
    plan.run(&["--tokens", "1", "--context", "513"]).fails(1, &["513", "512"]);
    plan.run(&["--prompt-file", "no-such-file"]).fails(1, &["no-such-file"]);
    if cfg!(unix) {
        plan.run(&["--prompt-file", "/dev/zero"]).fails(1, &["/dev/zero", "larger than 64 MiB", "hint:"]);
        let zero = std::fs::File::open("/dev/zero").unwrap();
        let endless = command([plan.path().to_str().unwrap()]).stdin(zero).output().unwrap();
        Ran::of(endless).fails(1, &["stdin", "larger than 64 MiB", "hint:"]);
    }
    plan.run(&["--tokens", "1,2,x"]).fails(2, &["whole numbers"]);
    let ran = Ran::of(command([plan.path().to_str().unwrap()]).output().unwrap());
    ran.fails(1, &["the prompt is empty"]);
}

#[test]
fn results_that_cannot_be_written() {
    let plan = PlanDir::new(LLAMA, 32);
    let words = ["cannot write no/such/dir/x.npy", "there is no directory no/such/dir: create it"];
    let missing = plan.run(&["--tokens", "1", "--logits", "no/such/dir/x.npy"]).fails(1, &words);
    assert!(!missing.stderr.contains(".partial"), "{}", missing.stderr);
    let below = format!("{}/x.npy", plan.file("model.onnx").display());
    plan.run(&["--tokens", "1", "--logits", &below]).fails(1, &["model.onnx is not a directory"]);
    plan.run(&["--tokens", "1", "--logits", plan.path().parent().unwrap().to_str().unwrap()]).fails(1, &["directory"]);
}

#[test]
fn results_replace_no_file_of_another_kind() {
    let plan = PlanDir::new(LLAMA, 32);
    let (model, file) = (plan.file("model.onnx"), plan.path());
    let before = [&model, &file].map(|path| std::fs::read(path).unwrap());
    let [model, file] = [&model, &file].map(|path| path.to_str().unwrap());
    plan.run(&["--tokens", "1", "--max-new", "1", "--logits", model]).fails(1, &["model.onnx", "another kind of file"]);
    let few = ["--prompt-tokens", "4", "--new-tokens", "2", "--runs", "1", "--trace"];
    plan.command("bench", &[&few[..], &[file]].concat()).fails(1, &["plan.yaml", "another kind of file"]);
    assert_eq!([model, file].map(|path| std::fs::read(path).unwrap()), before);
    // A result of the same kind is replaced.
    let trace = plan.file("trace.json");
    for _ in 0..2 {
        plan.command("bench", &[&few[..], &[trace.to_str().unwrap()]].concat()).ok();
    }
}

/// A pipe with a thread that reads what comes.
#[cfg(unix)]
fn pipe(path: &std::path::Path) -> std::thread::JoinHandle<Vec<u8>> {
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    let path = path.to_owned();
    std::thread::spawn(move || std::fs::read(path).unwrap())
}

#[cfg(unix)]
#[test]
fn results_go_through_links_and_pipes_and_leave_them_there() {
    use std::os::unix::fs::{FileTypeExt, symlink};
    let kind = |path: &std::path::Path| std::fs::symlink_metadata(path).unwrap().file_type();
    let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let plan = PlanDir::new(LLAMA, 64);
    let run = |to: &std::path::Path| plan.run(&["--tokens", "1,2", "--max-new", "3", "--logits", &text(to)]).ok();
    let (file, link, fifo) = (plan.file("scores.npy"), plan.file("link"), plan.file("fifo"));
    symlink("scores.npy", &link).unwrap();
    run(&link);
    assert!(kind(&link).is_symlink() && kind(&file).is_file());
    let read = pipe(&fifo);
    run(&fifo);
    assert!(kind(&fifo).is_fifo(), "the pipe was replaced by a file");
    assert_eq!(read.join().unwrap(), std::fs::read(&file).unwrap());

    let trace = plan.file("trace");
    let read = pipe(&trace);
    let few = ["--prompt-tokens", "4", "--new-tokens", "2", "--runs", "1", "--trace"];
    plan.command("bench", &[&few[..], &[&text(&trace)]].concat()).ok();
    assert!(kind(&trace).is_fifo() && serde_json::from_slice::<serde_json::Value>(&read.join().unwrap()).is_ok());
}

#[cfg(target_os = "linux")]
#[test]
fn results_that_stdout_cannot_take() {
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let plan = PlanDir::new(LLAMA, 32);
    let path = plan.path();
    for args in [&["devices", "--json"][..], &[path.to_str().unwrap(), "--tokens", "1", "--max-new", "1"]] {
        let ran = command(args.iter().copied()).stdout(full()).output().unwrap();
        Ran::of(ran).fails(1, &["cannot write to stdout", "hint:"]);
    }
}

/// Tokenizers that make the library panic or loop.
#[test]
fn tokenizers_that_break_the_library() {
    let plan = PlanDir::new(LLAMA, 64);
    let file = plan.file("tokenizer.json");
    let original: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let replace =
        |pattern: &str| serde_json::json!({ "type": "Replace", "pattern": { "String": pattern }, "content": "hh" });
    let unknown = serde_json::json!({ "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "[NONE]", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": {} });
    for (part, value) in [
        ("post_processor", unknown),
        ("normalizer", serde_json::json!({ "type": "Precompiled", "precompiled_charsmap": "AAAA" })),
        ("normalizer", serde_json::json!({ "type": "Sequence", "normalizers": vec![replace("h"); 60] })),
        ("normalizer", serde_json::json!({ "type": "Sequence", "normalizers": vec![replace(""); 60] })),
    ] {
        let mut spoiled = original.clone();
        spoiled[part] = value;
        std::fs::write(&file, spoiled.to_string()).unwrap();
        plan.run(&["--prompt", "hello"]).fails(1, &["tokenizer.json", "hint:"]);
    }
}

#[test]
fn embeddings_for_a_model_that_takes_tokens() {
    let plan = PlanDir::new(LLAMA, 32);
    plan.run(&["--tokens", "1", "--embeddings", "x.npy"]).fails(1, &["takes token ids"]);
}

#[test]
fn libraries_that_are_missing_or_for_another_machine() {
    let plan = PlanDir::new(LLAMA, 32);
    let args = ["--tokens", "1", "--ort-lib"];
    let run = |path: &str| plan.run(&[&args[..], &[path]].concat());
    run("no/such/library.so").fails(1, &["no/such/library.so", "hint:"]);

    let mut header = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0];
    header.resize(64, 0);
    header[18] = 20; // PowerPC
    let other = plan.file("other.so");
    std::fs::write(&other, header).unwrap();
    run(other.to_str().unwrap()).fails(1, &["other.so", "hint:"]);

    let path = plan.path();
    let mut by_variable = command([path.to_str().unwrap(), "--tokens", "1"]);
    by_variable.env("ORT_DYLIB_PATH", plan.file("model.onnx"));
    Ran::of(by_variable.output().unwrap()).fails(1, &["ORT_DYLIB_PATH", "hint:"]);
}

#[test]
fn a_missing_provider_falls_back_with_a_warning_or_is_refused() {
    let plan = PlanDir::new(LLAMA, 32).for_gpu(vec![Provider::CUDA, Provider::CPU]);
    let ran = plan.run(&["--tokens", &plan.prompt(), "--max-new", "16", "--ignore-eos", "--json"]).ok();
    assert_eq!(support::tokens(&ran.json()), plan.model.tokens());
    assert!(ran.stderr.contains("warning:") && ran.stderr.contains("CUDA"), "{}", ran.stderr);
    plan.run(&["--tokens", "1", "--strict"]).fails(1, &["CUDA", "hint:"]);
    plan.run(&["--tokens", "1", "--strict", "--providers", "cpu", "--max-new", "1"]).ok();
    let prefers_cpu = PlanDir::new(LLAMA, 32).for_gpu(vec![Provider::CPU]);
    prefers_cpu.run(&["--tokens", "1", "--strict", "--max-new", "1"]).ok();
}

#[test]
fn providers_that_no_partition_can_use_are_pointed_out() {
    let mut plan = PlanDir::new(LLAMA, 32);
    // Not the unsplit model, whose providers are always its own.
    plan.plan.partitions[0].name = "cpu_0".into();
    plan.plan.states.iter_mut().for_each(|state| state.partition = "cpu_0".into());
    let schedule = &mut plan.plan.schedule;
    schedule
        .prefill
        .iter_mut()
        .chain(&mut schedule.decode)
        .for_each(|step| *step = hpp_schema::Step::Run("cpu_0".into()));
    plan.save();
    let one = ["--tokens", "1", "--max-new", "1", "--providers"];
    let ran = plan.run(&[&one[..], &["cuda"]].concat()).ok();
    assert!(ran.stderr.contains("no partition of this plan can compute with cuda"), "{}", ran.stderr);
    let strict = plan.run(&[&one[..], &["cuda,webgpu", "--strict"]].concat());
    strict.fails(1, &["no partition of this plan can compute with cuda or webgpu", "hint: ", "--vram"]);
    let ran = plan.run(&[&one[..], &["cuda,cpu", "--strict"]].concat()).ok();
    assert!(!ran.stderr.contains("no partition"), "{}", ran.stderr);
}

/// The library of the test plug-in (`examples/plugin_rig.rs` of hpp-backend), if it is built.
fn rig() -> Option<std::path::PathBuf> {
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_hpp-exec"));
    let rig = program.with_file_name("examples").join("libplugin_rig.so");
    if !rig.is_file() {
        eprintln!("SKIPPED: {} is not built", rig.display());
    }
    rig.is_file().then_some(rig)
}

#[test]
fn a_provider_that_is_not_here_is_named_with_those_that_are() {
    let plan = PlanDir::new(LLAMA, 32);
    let run = |options: &[&str]| plan.run(&[&["--tokens", "1", "--max-new", "1"], options].concat());
    run(&["--providers", "openvno,cpu"]).fails(1, &["\"openvno\"", "cuda, webgpu", "hint:", "--ep-lib"]);
    run(&["--ep-option", "openvno.a=b"]).fails(1, &["\"openvno\"", "cuda, webgpu"]);
    run(&["--providers", "Open VINO"]).fails(2, &["cannot be the name of a provider"]);
    run(&["--ep-option", "openvino"]).fails(2, &["NAME.KEY=VALUE"]);
    run(&["--ep-option", "cuda.device_id=1"]).fails(2, &["CUDA takes no options"]);
    run(&["--ep-lib", "npu"]).fails(2, &["NAME=PATH"]);
    let path = plan.path();
    let mut by_variable = command([path.to_str().unwrap(), "--tokens", "1"]);
    by_variable.env("HPP_EP_LIBS", "npu");
    Ran::of(by_variable.output().unwrap()).fails(1, &["HPP_EP_LIBS", "NAME=PATH", "hint:"]);
}

#[test]
fn a_library_that_is_no_plug_in_is_said_once_and_refused_if_strict() {
    let mut plan = PlanDir::new(LLAMA, 32);
    // The unsplit model always runs on the CPU provider, and the name of its partition says that it is one.
    let name = "cpu_0";
    plan.plan.partitions[0].name = name.into();
    plan.plan.states.iter_mut().for_each(|state| state.partition = name.into());
    plan.plan.schedule.prefill = vec![Step::Run(name.into())];
    plan.plan.schedule.decode = vec![Step::Run(name.into())];
    plan.save();
    let run = |library: &str, options: &[&str]| {
        let library = format!("npu={library}");
        let arguments = ["--tokens", "1", "--max-new", "1", "--providers", "npu,cpu", "--ep-lib", &library];
        plan.run(&[&arguments, options].concat())
    };
    let onnxruntime = std::env::var("ORT_DYLIB_PATH").unwrap_or_default();
    let dir = tempfile::tempdir().unwrap();
    let truncated = dir.path().join("truncated.so");
    std::fs::write(&truncated, &std::fs::read(&onnxruntime).unwrap()[..100_000]).unwrap();
    for (library, why) in [
        ("no/such.so", "no such file"),
        (truncated.to_str().unwrap(), "it is truncated: 100000 bytes of"),
        (
            concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bad_input.rs"),
            "npu (npu) cannot be used: it is not a Linux library",
        ),
        (&onnxruntime, "not a plug-in provider of ONNX Runtime"),
    ] {
        let devices = support::hpp_exec(["devices", "--ep-lib", &format!("npu={library}")]).ok();
        assert!(devices.stdout.contains(why), "{library}: {}", devices.stdout);
    }
    let ran = run("no/such.so", &[]).ok();
    assert_eq!(ran.stderr.matches("no such file").count(), 1, "{}", ran.stderr);
    run("no/such.so", &["--strict"]).fails(1, &["npu", "no such file"]);
}

#[test]
fn a_plug_in_without_a_provider_or_for_another_onnxruntime_is_explained() {
    let Some(rig) = rig() else { return };
    let library = format!("npu={}", rig.display());
    let devices = |mode: &str| {
        let mut devices = command(["devices", "--ep-lib", &library]);
        devices.env("HPP_PLUGIN_RIG", mode);
        Ran::of(devices.output().unwrap()).ok().stdout
    };
    let newer = devices("newer");
    assert!(newer.contains("built for another version of ONNX Runtime: "), "{newer}");
    assert!(newer.contains("API version 9999"), "the plug-in's own words: {newer}");
    let empty = devices("none");
    assert!(empty.contains("npu (npu) cannot be used: "), "{empty}");
}

#[test]
fn exit_codes_distinguish_a_wrong_command_line_from_a_failure() {
    support::hpp_exec([]).fails(2, &["<PLAN|MODEL>"]);
    support::hpp_exec(["--nonsense"]).fails(2, &["--nonsense"]);
    let plan = PlanDir::new(LLAMA, 32);
    plan.run(&["--tokens", "1", "--inputs", "x.npz", "--outputs", "y.npz"]).fails(1, &["--outputs"]);
    // Tensors in, tensors out: nothing is sampled, drafted or saved.
    for option in [
        &["--logits", "l.npy"][..],
        &["--session", "s"],
        &["--draft", "none"],
        &["--draft-tokens", "3"],
        &["--speculate", "ngram"],
        &["--json-schema", "none.json"],
        &["--temperature", "0.5"],
        &["--chat"],
        &["-n", "5"],
        &["--stop", "x"],
        &["--embeddings", "e.npy"],
    ] {
        let tensors = ["--inputs", "x.npz", "--outputs", "y.npz"];
        plan.run(&[&tensors[..], option].concat()).fails(2, &["--outputs <OUT.npz>", "cannot be used with"]);
    }
    plan.run(&["--tokens", "1", "--temperature", "-3"]).fails(2, &["--temperature"]);
    plan.run(&["--tokens", "1", "--seed", "-3"]).fails(2, &["--seed", "-1"]);
    plan.run(&["--tokens", "1", "--stop", ""]).fails(2, &["--stop", "empty"]);
    plan.command("bench", &["--prompt-tokens", "30", "--new-tokens", "30"]).fails(1, &["context of 32"]);
    let bench = plan.command("bench", &["-p", "4", "-n", "2", "-r", "1", "--adapt", "devices"]).ok();
    assert!(bench.stderr.contains("--adapt has no effect"), "{}", bench.stderr);
    plan.command("serve", &["--cors-origin", "localhost"]).fails(2, &["such as http://localhost:3000"]);
    plan.command("serve", &["--cors-origin", "http://a.example/page"]).fails(2, &["such as http://localhost:3000"]);
    plan.command("serve", &["--allowed-host", "http://box"]).fails(2, &["write the name alone"]);
    plan.command("serve", &["--port", "x"]).fails(2, &["invalid value 'x' for '--port <N>': it is a whole number"]);
}
