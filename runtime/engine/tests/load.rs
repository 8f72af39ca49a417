//! Loading: what is wrong is said before the first token, all at once.

mod support;

use hpp_engine::port::MemoryId;
use hpp_engine::{CancelHandle, EngineError, EngineOptions, Fallback, LogitRows, Reporter, StepInput, Verify};
use hpp_schema::{ByteSize, DType, Provider};
use std::sync::Mutex;
use support::{Toy, answer, best};

#[track_caller]
fn refused(toy: &Toy) -> String {
    let error = toy.load().map(|_| ()).unwrap_err();
    assert!(error.hint().is_some(), "{error}");
    error.to_string()
}

#[test]
fn a_bad_plan_is_refused_with_all_that_is_wrong() {
    let mut toy = Toy::new();
    toy.plan.schedule.decode.remove(0);
    toy.plan.partitions[0].device = "tpu".into();
    let words = refused(&toy);
    assert!(words.contains("tpu") && words.contains("no step runs"), "{words}");
}

#[test]
fn files_that_changed_or_are_gone_are_all_named() {
    let toy = Toy::new();
    std::fs::write(toy.dir.path().join("gpu_0.onnx"), "gpu_1.onnx").unwrap();
    std::fs::write(toy.dir.path().join("model.onnx"), "short").unwrap();
    std::fs::remove_file(toy.dir.path().join("cpu_0.onnx")).unwrap();
    let words = refused(&toy);
    assert!(words.contains("gpu_0.onnx: its contents have changed"), "{words}");
    assert!(words.contains("model.onnx: it has 5 bytes, the plan says 10"), "{words}");
    assert!(words.contains("cpu_0.onnx: cannot be read"), "{words}");
}

/// The engine does not read the tokenizer.
#[test]
fn a_tokenizer_that_is_gone_is_no_matter_and_one_that_changed_is() {
    let mut toy = Toy::new();
    let path = toy.dir.path().join("tokenizer.json");
    let mut record = toy.plan.files[0].clone();
    std::fs::copy(toy.dir.path().join(&record.path), &path).unwrap();
    (record.path, record.role) = ("tokenizer.json".into(), hpp_schema::FileRole::Text);
    toy.plan.files.push(record);
    toy.load().unwrap();
    std::fs::write(&path, "other").unwrap();
    assert!(refused(&toy).contains("tokenizer.json"));
    std::fs::remove_file(&path).unwrap();
    toy.load().unwrap();
}

#[test]
fn a_change_between_samples_is_found() {
    let mut toy = Toy::new();
    let path = toy.dir.path().join("weights.data");
    let mut bytes = vec![0u8; 1 << 20];
    std::fs::write(&path, &bytes).unwrap();
    let ranges = hpp_schema::sample_ranges(1 << 20);
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(1u64 << 20).to_le_bytes());
    for (_, length) in &ranges {
        hasher.update(&vec![0; *length as usize]);
    }
    toy.plan.files.push(hpp_schema::FileRecord {
        path: "weights.data".into(),
        role: hpp_schema::FileRole::Weights,
        bytes: ByteSize(1 << 20),
        sampled: hasher.finalize().to_hex().to_string(),
        blake3: Some(blake3::hash(&bytes).to_hex().to_string()),
    });
    let full = || EngineOptions { verify: Verify::Full, ..Default::default() };
    toy.load_with(full()).unwrap();
    let between = (ranges[0].0 + ranges[0].1 + 1) as usize;
    bytes[between] = 1;
    std::fs::write(&path, &bytes).unwrap();
    for options in [EngineOptions::default(), full()] {
        assert!(matches!(toy.load_with(options), Err(EngineError::Files { .. })));
    }
}

#[test]
fn weights_written_to_while_tokens_are_computed_end_the_answer() {
    let mut toy = Toy::new();
    let path = toy.dir.path().join("weights.data");
    std::fs::write(&path, b"weights").unwrap();
    toy.plan.files.push(hpp_schema::FileRecord {
        path: "weights.data".into(),
        role: hpp_schema::FileRole::Weights,
        bytes: ByteSize(7),
        sampled: blake3::hash(b"\x07\0\0\0\0\0\0\0weights").to_hex().to_string(),
        blake3: Some(blake3::hash(b"weights").to_hex().to_string()),
    });
    let mut engine = toy.load().unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    engine.step(&mut sequence, StepInput::Tokens(&[5, 6]), LogitRows::Last).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::io::Write::write_all(&mut &file, b"W").unwrap();
    let error = engine.step(&mut sequence, StepInput::Tokens(&[7]), LogitRows::Last).unwrap_err();
    assert!(matches!(error, EngineError::Changed { .. }), "{error}");
    assert!(error.to_string().contains("weights.data was changed while it was in use"), "{error}");
    assert!(error.hint().is_some_and(|hint| hint.contains("hpp-split")));
    // No sequence gets another token.
    let mut other = engine.new_sequence().unwrap();
    let error = engine.step(&mut other, StepInput::Tokens(&[5]), LogitRows::Last).unwrap_err();
    assert!(matches!(error, EngineError::Changed { .. }), "{error}");
}

#[test]
fn a_file_that_is_not_what_the_plan_says_is_refused() {
    let toy = Toy::new();
    let mut model = support::second();
    model.inputs[1].dtype = DType::Int32;
    model.inputs.push(support::port("extra", DType::Int64, &[None], MemoryId::HOST));
    model.outputs.remove(1);
    toy.backend.model("cpu_0.onnx", model);
    let words = refused(&toy);
    for part in ["\"position_ids\" is int32 in the file", "an input \"extra\"", "no output \"present.1.key\""] {
        assert!(words.contains(part), "{part} in {words}");
    }
}

#[derive(Default)]
struct Heard(Mutex<Vec<String>>);

impl Reporter for Heard {
    fn fallback(&self, partition: &str, wanted: Provider, got: Provider, reason: &str) {
        self.0.lock().unwrap().push(format!("{partition}: {wanted:?} -> {got:?}: {reason}"));
    }

    fn warning(&self, message: &str) {
        self.0.lock().unwrap().push(message.to_owned());
    }
}

#[test]
fn a_missing_provider_is_reported_and_the_partition_runs_on_the_host() {
    let toy = Toy::new();
    toy.backend.without(Provider::WEBGPU);
    toy.backend.model("gpu_0.onnx", support::first(MemoryId::HOST));
    let heard = Heard::default();
    let options = EngineOptions::default();
    let mut engine = hpp_engine::Engine::load(&toy.plan, toy.dir.path(), &toy.backend, options, &heard).unwrap();
    assert_eq!(*heard.0.lock().unwrap(), ["gpu_0: webgpu -> cpu: it was taken away"]);
    let mut sequence = engine.new_sequence().unwrap();
    let logits = engine.step(&mut sequence, StepInput::Tokens(&[5, 6]), LogitRows::Last).unwrap();
    assert_eq!(best(logits.last()), answer(&[5, 6]));
    let telemetry = engine.telemetry();
    assert_eq!(telemetry.stages[0].provider, Provider::CPU);
    assert_eq!(telemetry.copies.count, 0, "nothing crosses when all is on the host");
    let lanes: Vec<&str> = engine.last_pass().compute.iter().map(|(lane, _)| lane.as_str()).collect();
    assert_eq!(lanes, ["gpu0 on the CPU", "cpu"]);
}

/// A run needs all weights of its partition at once, and a partition of a GPU may be larger than the host's budget.
#[test]
fn a_partition_of_a_gpu_that_exceeds_host_memory_is_named() {
    const MIB: u64 = 1 << 20;
    let mut toy = Toy::new();
    toy.backend.without(Provider::WEBGPU);
    toy.backend.model("gpu_0.onnx", support::first(MemoryId::HOST));
    toy.backend.set_resident(60 * MIB);
    toy.plan.budgets.ram = Some(ByteSize(150 * MIB));
    toy.plan.partitions[0].bytes.weights = ByteSize(168 * MIB);
    let heard = Heard::default();
    let load = |toy: &Toy| {
        hpp_engine::Engine::load(&toy.plan, toy.dir.path(), &toy.backend, EngineOptions::default(), &heard).map(|_| ())
    };
    load(&toy).unwrap();
    let said = std::mem::take(&mut *heard.0.lock().unwrap()).join("\n");
    for part in [
        "gpu_0 was planned for a GPU",
        "168 MiB of weights at once",
        "instead of the planned 150 MiB",
        "plan for this machine with --vram 0",
    ] {
        assert!(said.contains(part), "{part} in {said}");
    }
    toy.backend.limit_memory(200 * MIB);
    let error = load(&toy).unwrap_err();
    assert!(matches!(error, EngineError::FallbackTooLarge { .. }), "{error}");
    assert!(error.to_string().contains("this process may use 200 MiB") && error.hint().is_some(), "{error}");
    heard.0.lock().unwrap().clear();
    toy.plan.partitions[0].bytes.weights = ByteSize(80 * MIB);
    load(&toy).unwrap();
    assert!(!heard.0.lock().unwrap().join("\n").contains("at once"));
}

#[test]
fn a_missing_provider_is_an_error_when_strict() {
    let toy = Toy::new();
    toy.backend.without(Provider::WEBGPU);
    let options = EngineOptions { fallback: Fallback::Refuse, ..Default::default() };
    let error = toy.load_with(options).map(|_| ()).unwrap_err();
    assert!(matches!(error, EngineError::Load { .. }));
    assert!(error.hint().is_some_and(|hint| hint.contains("--strict")));
}

#[test]
fn a_load_can_be_cancelled() {
    let toy = Toy::new();
    let cancel = CancelHandle::new();
    cancel.cancel();
    let options = EngineOptions { cancel: Some(cancel), ..Default::default() };
    assert!(matches!(toy.load_with(options), Err(EngineError::Cancelled)));
}
