//! Missing devices, stopped runs and damaged files: each gives a fallback or an error, and no crash.

mod support;

#[cfg(target_os = "linux")]
use hpp_engine::port::Backend as _;
use hpp_engine::{
    BackendError, CancelHandle, Engine, EngineError, EngineOptions, Fallback, LogitRows, Logits, Reporter, Silent,
    StepInput,
};
use hpp_schema::{ByteSize, Device, DeviceKind, FileRole, Plan, Provider};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use support::{Recorded, backend, recorded};

fn small() -> Recorded {
    recorded().into_iter().find(|model| model.dir.ends_with("llama3-fp32-cpu")).unwrap()
}

/// The plan moved to a GPU whose first provider does not exist on this machine.
fn for_cuda(mut plan: Plan) -> Plan {
    plan.devices = vec![Device::new("gpu0", DeviceKind::Gpu)];
    plan.budgets.vram = vec![ByteSize(1 << 30)];
    plan.partitions[0].device = "gpu0".into();
    plan.partitions[0].providers = vec![Provider::CUDA, Provider::CPU];
    plan.states.iter_mut().for_each(|state| state.device = "gpu0".into());
    plan
}

#[derive(Default)]
struct RecordingReporter(Mutex<Vec<String>>);

impl Reporter for RecordingReporter {
    fn fallback(&self, partition: &str, wanted: Provider, got: Provider, reason: &str) {
        self.0.lock().unwrap().push(format!("{partition}: {wanted:?} -> {got:?}: {reason}"));
    }
}

#[test]
fn a_gpu_partition_without_a_gpu_falls_back_to_the_host_with_a_reason() {
    let backend = backend();
    if backend.devices().providers.iter().any(|p| p.provider == Provider::CUDA && p.problem.is_none()) {
        println!("SKIPPED: a_gpu_partition_without_a_gpu_falls_back_to_the_host_with_a_reason: there is a GPU");
        return;
    }
    let model = small();
    let plan = for_cuda(model.plan(64));
    let reporter = RecordingReporter::default();
    let mut engine = Engine::load(&plan, &model.dir, &backend, EngineOptions::default(), &reporter).unwrap();
    let reported = reporter.0.lock().unwrap().join("\n");
    assert!(reported.starts_with("whole: cuda -> cpu: "), "{reported}");
    assert!(reported.contains("onnxruntime-gpu") || reported.contains("device"), "{reported}");
    let mut sequence = engine.new_sequence().unwrap();
    engine.step(&mut sequence, StepInput::Tokens(&model.prompt()), LogitRows::Last).unwrap();
    let strict = EngineOptions { fallback: Fallback::Refuse, ..Default::default() };
    let error = Engine::load(&plan, &model.dir, &backend, strict, &Silent).map(|_| ()).unwrap_err();
    let refused =
        matches!(&error, EngineError::Load { source: BackendError::NoProvider { refused }, .. } if refused.len() == 1);
    assert!(refused, "{error:?}");
}

#[test]
fn a_run_is_stopped_from_another_thread() {
    let model = small();
    let mut engine = Engine::load(&model.plan(512), &model.dir, &backend(), EngineOptions::default(), &Silent).unwrap();
    let handle = engine.cancel_handle();
    let stopper = std::thread::spawn({
        let handle = handle.clone();
        move || {
            std::thread::sleep(Duration::from_millis(100));
            handle.cancel();
        }
    });
    let started = Instant::now();
    let text = vec![7; 512];
    let mut logits = Logits::default();
    let outcome = loop {
        let mut sequence = engine.new_sequence().unwrap();
        let step = engine.step_into(&mut sequence, StepInput::Tokens(&text), LogitRows::All, &mut logits);
        if step.is_err() || started.elapsed() > Duration::from_secs(30) {
            break step;
        }
    };
    assert!(matches!(outcome, Err(EngineError::Cancelled)), "{outcome:?}");
    stopper.join().unwrap();
    handle.reset();
    let mut sequence = engine.new_sequence().unwrap();
    engine.step_into(&mut sequence, StepInput::Tokens(&[7]), LogitRows::Last, &mut logits).unwrap();
}

#[test]
fn a_load_that_is_already_cancelled_does_not_start() {
    let cancel = CancelHandle::new();
    cancel.cancel();
    let model = small();
    let options = EngineOptions { cancel: Some(cancel), ..Default::default() };
    let outcome = Engine::load(&model.plan(64), &model.dir, &backend(), options, &Silent).map(|_| ());
    assert!(matches!(outcome, Err(EngineError::Cancelled)), "{outcome:?}");
}

/// A copy of a model with its file changed, and a plan with the changed file's hash.
fn damaged(change: impl FnOnce(&mut Vec<u8>)) -> (tempfile::TempDir, Plan) {
    let model = small();
    let dir = tempfile::tempdir().unwrap();
    for file in ["model.onnx", "model.onnx.data", "reference.json", "genai_config.json"] {
        std::fs::copy(model.dir.join(file), dir.path().join(file)).unwrap();
    }
    let mut bytes = std::fs::read(dir.path().join("model.onnx")).unwrap();
    change(&mut bytes);
    std::fs::write(dir.path().join("model.onnx"), bytes).unwrap();
    let copy = Recorded { dir: dir.path().to_owned(), facts: model.facts.clone() };
    let plan = copy.plan(64);
    (dir, plan)
}

#[test]
fn a_damaged_model_is_an_error_and_not_a_crash() {
    for cut in [0, 1, 100, 5000] {
        let (dir, plan) = damaged(|bytes| bytes.truncate(cut));
        let outcome = Engine::load(&plan, dir.path(), &backend(), EngineOptions::default(), &Silent).map(|_| ());
        assert!(matches!(outcome, Err(EngineError::Load { .. } | EngineError::Mismatch { .. })), "{cut}: {outcome:?}");
    }
}

#[test]
fn missing_weights_are_an_error_that_names_them() {
    let (dir, mut plan) = damaged(|_| {});
    std::fs::remove_file(dir.path().join("model.onnx.data")).unwrap();
    plan.files.retain(|file| file.role != FileRole::Weights);
    let error = Engine::load(&plan, dir.path(), &backend(), EngineOptions::default(), &Silent).map(|_| ()).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("model.onnx.data"), "{cause}");
}

/// Attention over a long prompt takes tens of megabytes, which the arena keeps until it is trimmed.
#[test]
#[cfg(target_os = "linux")]
fn trim_memory_frees_the_arena() {
    let model = recorded().into_iter().find(|model| model.dir.ends_with("llama3-fp32-cpu")).unwrap();
    let backend = backend();
    // An engine whose model appends to its caches frees the arena after each run anyway.
    let mut engine = Engine::load(&model.plan(512), &model.dir, &backend, EngineOptions::default(), &Silent).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    engine.step(&mut sequence, StepInput::Tokens(&[1; 400]), LogitRows::Last).unwrap();
    let resident = || backend.memory_use().resident.expect("Linux reports it") >> 20;
    let before = resident();
    backend.trim_memory().unwrap();
    assert!(resident() + 1 < before, "{before} MiB before, {} after", resident());
    engine.step(&mut sequence, StepInput::Tokens(&[1; 100]), LogitRows::Last).unwrap();
}
