//! One row for each rule: changes one thing in a valid plan and expects a finding.

use super::Severity;
use crate::{
    Achieved, ByteSize, CopyStep, DType, Dim, Experts, FileRecord, FileRole, InputRole, ModelKind, NextExperts,
    ObjectiveKind, OutputUse, OwnDraft, Plan, PrefillVariant, Provider, Residency, Ring, SelectedBy, StateUpdate, Step,
    WeightInput,
};

fn valid_plan() -> Plan {
    Plan::from_yaml(include_str!("../../tests/plan.yaml")).unwrap()
}

/// Changes the valid plan and expects a finding at `place` that contains `words`.
#[track_caller]
fn expect_finding(severity: Severity, place: &str, words: &str, change: impl FnOnce(&mut Plan)) {
    let mut plan = valid_plan();
    change(&mut plan);
    let found = plan.check();
    let hit = found.iter().any(|f| f.severity == severity && f.place.contains(place) && f.message.contains(words));
    assert!(hit, "no {severity:?} at {place:?} about {words:?} in {found:#?}");
}

#[track_caller]
fn refuses(place: &str, words: &str, change: impl FnOnce(&mut Plan)) {
    expect_finding(Severity::Error, place, words, change);
}

#[track_caller]
fn warns(place: &str, words: &str, change: impl FnOnce(&mut Plan)) {
    expect_finding(Severity::Warning, place, words, change);
}

#[test]
fn names() {
    refuses("hpp_plan", "not 1", |p| p.hpp_plan = 1);
    refuses("partitions", "empty", |p| p.partitions.clear());
    refuses("partitions[1]", "twice", |p| p.partitions[1].name = "gpu_0".into());
    refuses("partitions[0]", "reserved", |p| p.partitions[0].name = "state".into());
    refuses("partitions[0].device", "no device", |p| p.partitions[0].device = "gpu7".into());
    refuses("partitions[0].providers", "empty", |p| p.partitions[0].providers.clear());
    refuses("partitions[0].providers", "twice", |p| p.partitions[0].providers.push(Provider::CPU));
    refuses("partitions[1].providers", "on the host", |p| p.partitions[1].providers.push(Provider::CUDA));
    let mut plan = valid_plan();
    plan.partitions[1].providers.insert(0, Provider::OPENVINO);
    assert_eq!(plan.check(), [], "its tensors lie in host memory");
    refuses("partitions[0].inputs[1]", "twice", |p| p.partitions[0].inputs[1].name = "input_ids".into());
    refuses("model.inputs[0]", "name is empty", |p| p.model.inputs[0].name.clear());
    refuses("buffers[0]", "no partition", |p| p.buffers[0].value = "elsewhere".into());
    refuses("buffers[0]", "no device", |p| p.buffers[0].device = "tpu".into());
}

#[test]
fn provider_options() {
    let option = |plan: &mut Plan, provider: &str, key: &str, value: &str| {
        let options = [(key.to_owned(), value.to_owned())].into();
        plan.devices[0].provider_options.insert(provider.parse().unwrap(), options);
        plan.partitions[0].providers.insert(0, "mystery".parse().unwrap());
    };
    let mut plan = valid_plan();
    option(&mut plan, "mystery", "precision", "F32");
    assert_eq!(plan.check(), []);
    let read = Plan::from_yaml(&plan.to_yaml().unwrap()).unwrap();
    assert_eq!(read, plan);
    let edited = plan.to_yaml().unwrap().replace("precision: F32", "precision: F16");
    assert!(Plan::from_yaml(&edited).unwrap_err().to_string().contains("devices"), "options are sealed");
    refuses("devices[0].provider_options.absent", "no partition", |p| option(p, "absent", "precision", "F32"));
    for (key, value) in
        [("cache_dir", "x"), ("backend_path", "x"), ("a", "/etc/x"), ("load_config", r#"{"CACHE_DIR":"x"}"#)]
    {
        refuses("devices[0].provider_options.mystery", "may not name files", |p| option(p, "mystery", key, value));
    }
    refuses("devices[0].provider_options.mystery", "not empty", |p| option(p, "mystery", "", "x"));
    refuses("devices[0].provider_options.mystery", "exceeds", |p| option(p, "mystery", "a", &"x".repeat(5000)));
}

#[test]
fn paths() {
    for path in ["/etc/passwd", "C:/x.onnx", "..\\x.onnx", "", "a/../../x.onnx"] {
        refuses("partitions[0].file", "", |p| p.partitions[0].file = path.into());
        refuses("model.source", "", |p| p.model.source = path.into());
        refuses("partitions[0].weights_dir", "", |p| p.partitions[0].weights_dir = path.into());
        refuses("generation.tokenizer", "", |p| p.generation.as_mut().unwrap().tokenizer = Some(path.into()));
        refuses("files[2]", "", |p| p.files[2].path = path.into());
    }
    refuses("partitions[0].file", "out of the plan's directory", |p| p.partitions[0].file = "../gpu_0.onnx".into());
    refuses("model.tapped", "out of the plan's directory", |p| p.model.tapped = Some("../t.onnx".into()));
    refuses("partitions[1].file", "missing from files", |p| p.files.truncate(2));
    refuses("files[0].sampled", "hexadecimal", |p| p.files[0].sampled = "A".repeat(64));
    refuses("files[1].blake3", "hexadecimal", |p| p.files[1].blake3 = Some("0".repeat(63)));
    refuses("files[2]", "twice", |p| p.files[1].path = "cpu_0.onnx".into());
}

#[test]
fn sizes() {
    refuses("budgets.context", "must hold a token", |p| p.budgets.context = 0);
    refuses("budgets.context", "built for 512", |p| p.budgets.context = 513);
    refuses("budgets.batch", "must hold", |p| p.budgets.batch = 0);
    refuses("schedule.prefill_chunk", "take a token", |p| p.schedule.prefill_chunk = Some(0));
    refuses("model.vocab_size", "empty", |p| p.model.vocab_size = Some(0));
    refuses("files", "64 bits", |p| p.files[0].bytes = ByteSize(u64::MAX));
    refuses("partitions[0].bytes", "64 bits", |p| p.partitions[0].bytes.weights = ByteSize(u64::MAX));
    refuses("devices.gpu0", "64 bits", |p| p.budgets.margin = ByteSize(u64::MAX));
    warns("devices.gpu0", "the budget is 2 MiB", |p| p.partitions[0].bytes.weights = ByteSize(3 << 20));
    refuses("predictions.decode_ms", "finite number", |p| p.predictions.decode_ms = f64::NAN);
    refuses("predictions.decode_tokens", "finite number", |p| p.predictions.decode_tokens_per_second = -1.0);
    refuses("sampling.top_p", "number", |p| p.generation.as_mut().unwrap().sampling.top_p = Some(f64::INFINITY));
}

#[test]
fn flow() {
    refuses("partitions[0].inputs[0]", "int32 here", |p| p.partitions[0].inputs[0].dtype = DType::Int32);
    refuses("partitions[0].inputs[0]", "not an input of the model", |p| p.partitions[0].inputs[0].name = "ids".into());
    refuses("partitions[1].inputs[0]", "neither model", |p| p.partitions[1].inputs[0].from = "gpu_9".into());
    refuses("partitions[0].inputs[0]", "does not run earlier", |p| p.partitions[0].inputs[0].from = "cpu_0".into());
    refuses("partitions[1].inputs[0]", "does not run earlier", |p| p.partitions[1].inputs[0].from = "cpu_0".into());
    refuses("partitions[1].inputs[0]", "for other partitions", |p| p.partitions[1].inputs[0].name = "hidden.1".into());
    refuses("partitions[1].inputs[0]", "float16 here", |p| p.partitions[1].inputs[0].dtype = DType::Float16);
    refuses("partitions[1].outputs[0]", "not an output of the model", |p| p.model.outputs[0].name = "scores".into());
    refuses("model.outputs[0]", "0 partitions", |p| p.partitions[1].outputs[0].to = OutputUse::Boundary);
    warns("partitions[1].outputs[0]", "no partition reads", |p| p.partitions[1].outputs[0].to = OutputUse::Boundary);
    refuses("model.inputs", "role TokenIds", |p| p.model.inputs[1].role = InputRole::TokenIds);
    refuses("model.inputs", "takes token ids", |p| p.model.inputs[0].role = InputRole::Free);
    refuses("model.outputs", "one logits output", |p| p.model.outputs.clear());
}

#[test]
fn states() {
    refuses("states[0]", "no partition", |p| p.states[0].partition = "gpu_9".into());
    refuses("states[0]", "no state input", |p| p.states[0].past = "elsewhere".into());
    refuses("states[0]", "no state output", |p| p.states[0].present = "elsewhere".into());
    refuses("states[0]", "another type", |p| p.states[0].dtype = DType::Float16);
    refuses("states[0]", "no device", |p| p.states[0].device = "tpu".into());
    refuses("states[0]", "no axis 4", |p| p.states[0].update = StateUpdate::InPlace { axis: 4, capacity: 64 });
    refuses("states[0]", "0 tokens", |p| p.states[0].update = StateUpdate::InPlace { axis: 2, capacity: 0 });
    refuses("states[1]", "the context is 64", |p| p.states[1].update = StateUpdate::Append { axis: 2, capacity: 63 });
    refuses("states[0]", "no axis 4", |p| p.states[0].update = StateUpdate::Sliding { axis: 4, capacity: 64 });
    refuses("states[0]", "0 tokens", |p| p.states[0].update = StateUpdate::Sliding { axis: 2, capacity: 0 });
    refuses("states[0]", "its shape has", |p| p.states[0].update = StateUpdate::Sliding { axis: 2, capacity: 63 });
    refuses("states[0]", "its shape has", |p| p.states[0].bytes = ByteSize(8191));
    refuses("states[0]", "is unknown", |p| p.states[0].shape[3] = Dim::Unknown);
    refuses("states[0]", "is unknown", |p| p.states[0].shape[3] = Dim::symbol("head"));
    refuses("states[0]", "64 bits", |p| p.states[0].shape[3] = Dim::fixed(u64::MAX / 4));
    refuses("partitions[0].bytes.kv", "its states need", |p| p.partitions[0].bytes.kv = ByteSize(8191));
    refuses("partitions[0].inputs[2]", "0 states", |p| {
        p.states.remove(0);
    });
    refuses("partitions[0].outputs[1]", "2 states", |p| p.states.push(p.states[0].clone()));
    refuses("states", "has no states", |p| p.model.kind = ModelKind::DecoderWithoutCache);
}

#[test]
fn schedules() {
    refuses("schedule.decode", "no step runs", |p| p.schedule.decode.truncate(2));
    refuses("schedule.prefill[1]", "runs twice", |p| p.schedule.prefill[1] = Step::Run("gpu_0".into()));
    refuses("schedule.prefill[1]", "no step copies", |p| {
        p.schedule.prefill.remove(1);
    });
    refuses("schedule.prefill[0]", "which has not run", |p| p.schedule.prefill.reverse());
    refuses("schedule.prefill[0]", "no partition", |p| p.schedule.prefill[0] = Step::Run("gpu_9".into()));
    let copy = |from: &str, to: &str, value: &str| {
        Step::Copy(CopyStep { values: vec![value.into()], from: from.into(), to: to.into() })
    };
    refuses("schedule.decode[1]", "no device", |p| p.schedule.decode[1] = copy("gpu0", "tpu", "hidden.0"));
    refuses("schedule.decode[1]", "from gpu0 to gpu0", |p| p.schedule.decode[1] = copy("gpu0", "gpu0", "hidden.0"));
    refuses("schedule.decode[1]", "no partition that ran", |p| p.schedule.decode[1] = copy("gpu0", "cpu", "logits"));
    warns("schedule.decode[2]", "already", |p| p.schedule.decode.insert(2, p.schedule.decode[1].clone()));
}

/// The first of two partitions with experts predicts the experts of the second.
#[test]
fn experts_are_predicted_before_they_run() {
    let experts = |next| Experts {
        router: "hidden.0".into(),
        count: 64,
        active: 2,
        selected_by: SelectedBy::Logits,
        weights: vec!["w".into()],
        apart: false,
        bytes: ByteSize(1),
        next,
    };
    let predict = |plan: &mut Plan| {
        let next = NextExperts { partition: "cpu_0".into(), router: "hidden.0".into() };
        plan.partitions[0].experts = Some(experts(Some(next)));
        plan.partitions[1].experts = Some(experts(None));
    };
    refuses("schedule.decode[2]", "predicts experts of \"cpu_0\", which has run already", |p| {
        predict(p);
        p.schedule.decode.reverse();
    });
    let mut plan = valid_plan();
    predict(&mut plan);
    let found = plan.check();
    assert!(!found.iter().any(|f| f.place.contains("schedule") || f.message.contains("later partition")), "{found:#?}");
}

const RING: Option<Ring> = Some(Ring { slots: 3, slot_bytes: ByteSize(256 << 10) });

/// Weight inputs in the weight file that the plan records.
fn weight_inputs() -> Vec<WeightInput> {
    let file = "model.onnx".to_owned();
    let weight = |name: &str, offset| WeightInput {
        name: name.into(),
        dtype: DType::Uint8,
        shape: vec![4],
        file: file.clone(),
        offset,
    };
    vec![weight("w", 0), weight("v", 4)]
}

/// Streams the first partition of the valid plan.
fn stream_first(plan: &mut Plan) {
    plan.partitions[0].residency = Residency::Streamed;
    plan.partitions[0].weights = weight_inputs();
    plan.partitions[0].bytes.weights = ByteSize(8);
    plan.devices[0].ring = RING;
}

fn prefill(plan: &Plan, device: &str) -> Option<PrefillVariant> {
    let (file, weights) = (plan.partitions[0].file.clone(), weight_inputs());
    Some(PrefillVariant {
        device: device.into(),
        residency: Residency::Streamed,
        file,
        providers: vec![Provider::CUDA],
        weights,
        host_file: None,
    })
}

#[test]
fn placements() {
    let mut plan = valid_plan();
    stream_first(&mut plan);
    assert_eq!(plan.check(), []);
    assert_eq!(plan.slot("gpu0"), [4, 4]);
    refuses("partitions[0]", "must be inputs", |p| {
        stream_first(p);
        p.partitions[0].weights.clear();
    });
    refuses("partitions[0].host_file", "missing from files", |p| p.partitions[0].host_file = Some("other.onnx".into()));
    refuses("partitions[1].prefill", "no ring", |p| p.partitions[1].prefill = prefill(p, "gpu0"));
    refuses("partitions[1].prefill", "no device", |p| p.partitions[1].prefill = prefill(p, "gpu7"));
    refuses("partitions[1].prefill", "constants on the host", |p| p.partitions[1].prefill = prefill(p, "cpu"));
    refuses("devices[0].ring", "too small", |p| {
        stream_first(p);
        p.devices[0].ring = Some(Ring { slots: 1, slot_bytes: ByteSize(7) });
    });
    let weight = |place: &str, words: &str, change: fn(&mut WeightInput)| {
        refuses(&format!("partitions[0].weights[1]{place}"), words, |p| {
            stream_first(p);
            change(&mut p.partitions[0].weights[1]);
        });
    };
    weight("", "twice", |w| w.name = "w".into());
    weight("", "no size", |w| w.shape = vec![u64::MAX, 2]);
    weight("", "missing from files", |w| w.file = "elsewhere.bin".into());
    weight("", "ends at byte", |w| w.offset = 1 << 40);
    weight("", "no size", |w| w.offset = u64::MAX);
    weight(".file", "out of the plan's directory", |w| w.file = "../x".into());
    refuses("devices[1].ring", "the host has no ring", |p| p.devices[1].ring = RING);
    refuses("partitions[1]", "no window", |p| p.partitions[1].residency = Residency::Streamed);
    refuses("partitions[0]", "cannot map", |p| p.partitions[0].residency = Residency::Mapped);
    refuses("devices[0].window", "only the host", |p| p.devices[0].window = Some(ByteSize(1)));
    refuses("devices[1].window", "needs bytes", |p| p.devices[1].window = Some(ByteSize(0)));
    refuses("partitions[1].bytes.locked", "larger than the weights", |p| {
        p.partitions[1].bytes.locked = Some(ByteSize(p.partitions[1].bytes.weights.0 + 1));
    });
    let mut reads = valid_plan();
    reads.partitions[1].residency = Residency::Streamed;
    reads.devices[1].window = Some(ByteSize(1 << 20));
    assert_eq!(reads.check(), []);
    refuses("devices[0].ring", "needs slots", |p| {
        p.devices[0].ring = Some(Ring { slots: 0, slot_bytes: ByteSize(1) });
    });
    warns("devices.gpu0", "the budget is", |p| {
        p.devices[0].ring = Some(Ring { slots: 3, slot_bytes: ByteSize(1 << 20) });
    });
    refuses("devices.gpu0", "64 bits", |p| p.devices[0].ring = Some(Ring { slots: 3, slot_bytes: ByteSize(u64::MAX) }));
    refuses("predictions.objective.ms", "finite number", |p| {
        let objective = Achieved { kind: ObjectiveKind::Mixed, ms: f64::NAN, bound_ms: 0.0, proven: false };
        p.predictions.objective = Some(objective);
    });
}

/// Constants of files with weight inputs count once per file; own slots and constants of other files count per
/// partition.
#[test]
fn resident_weights_are_counted_per_file_or_partition() {
    let mut plan = valid_plan();
    stream_first(&mut plan);
    plan.partitions[0].bytes.weights = ByteSize(8 + 100);
    assert_eq!(plan.weights_on("gpu0"), Some(100));
    plan.partitions.push(plan.partitions[0].clone());
    assert_eq!(plan.weights_on("gpu0"), Some(100));
    plan.partitions[0].residency = Residency::Resident;
    assert_eq!(plan.weights_on("gpu0"), Some(100 + 8));
    plan.partitions[0].file = "other.onnx".into();
    plan.partitions[0].weights.clear();
    assert_eq!(plan.weights_on("gpu0"), Some(100 + 108));
    plan.partitions[0].bytes.weights = ByteSize(u64::MAX);
    assert_eq!(plan.weights_on("gpu0"), None);
}

/// A partition with another device in prefill needs copies of its inputs there, in that phase only.
#[test]
fn each_phase_has_its_own_copies() {
    let mut plan = valid_plan();
    plan.devices[0].ring = RING;
    plan.partitions[1].prefill = prefill(&plan, "gpu0");
    let about = |plan: &Plan, place: &str| plan.check().iter().any(|found| found.place.starts_with(place));
    plan.schedule.prefill.remove(1);
    assert!(!about(&plan, "schedule"), "{:#?}", plan.check());
    plan.schedule.decode.remove(1);
    assert!(about(&plan, "schedule.decode"));
}

#[test]
fn every_finding_is_reported_at_once() {
    let mut plan = valid_plan();
    plan.budgets.context = 0;
    plan.partitions[0].file = "/x".into();
    plan.schedule.decode.clear();
    let places: Vec<_> = plan.check().into_iter().map(|finding| finding.place).collect();
    for place in ["budgets.context", "partitions[0].file", "schedule.decode"] {
        assert!(places.iter().any(|found| found == place), "{place} in {places:?}");
    }
}

/// The valid plan with a draft.
fn with_draft(plan: &mut Plan) {
    let record = FileRecord { path: "draft/plan.yaml".into(), role: FileRole::Draft, ..plan.files[0].clone() };
    plan.files.push(record);
    let [all, one] = [64 << 20, 1 << 20].map(ByteSize);
    let own = OwnDraft { plan: "draft/plan.yaml".into(), bits: 4, host_memory: all, sequence_memory: one };
    plan.draft = Some(own);
    plan.budgets.ram = Some(ByteSize(1 << 30));
}

#[test]
fn drafts() {
    let mut plan = valid_plan();
    with_draft(&mut plan);
    let errors: Vec<_> = plan.check().into_iter().filter(|found| found.severity == Severity::Error).collect();
    assert!(errors.is_empty(), "{errors:#?}");
    let refuses = |place: &str, words: &str, change: &dyn Fn(&mut OwnDraft)| {
        refuses(place, words, |plan| {
            with_draft(plan);
            change(plan.draft.as_mut().unwrap());
        });
    };
    refuses("draft.plan", "out of the plan's directory", &|draft| draft.plan = "../plan.yaml".into());
    refuses("draft.plan", "with the role draft", &|draft| draft.plan = "gpu_0.onnx".into());
    refuses("draft.bits", "4 or 8", &|draft| draft.bits = 3);
    refuses("draft.sequence_memory", "for a sequence", &|draft| draft.sequence_memory = ByteSize(65 << 20));
    refuses("draft.host_memory", "nothing of budgets.ram", &|draft| draft.host_memory = ByteSize(1 << 30));
    // A draft that is added, changed or removed breaks the seal.
    let sealed = crate::Seal::of(&plan).unwrap();
    plan.draft.as_mut().unwrap().bits = 8;
    assert_eq!(sealed.differences(&plan).unwrap(), ["draft"]);
    plan.draft = None;
    assert_eq!(sealed.differences(&plan).unwrap(), ["draft"]);
}
