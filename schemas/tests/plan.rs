//! Plans as text: round trip, schema, versions, damage, seals.

use hpp_schema::{
    ByteSize, DType, DeviceKind, ModelKind, OutputUse, Plan, PlanError, Seal, Severity, SourceModel, State,
    StateUpdate, WeightInput, Whole, plan_json_schema,
};
use proptest::prelude::*;

const PLAN: &str = include_str!("plan.yaml");

fn plan() -> Plan {
    Plan::from_yaml(PLAN).unwrap()
}

#[test]
fn a_plan_reads_back_as_it_was_written() {
    let text = plan().to_yaml().unwrap();
    assert_eq!(Plan::from_yaml(&text).unwrap(), plan());
    assert_eq!(Plan::from_yaml(&text).unwrap().to_yaml().unwrap(), text);
    assert!(text.starts_with("hpp_plan: 2\n"), "the version comes first: {}", &text[..40]);
    assert!(text.contains("bytes: 866.25 KiB (887040 B)"), "sizes are for people and exact: {text}");
}

#[test]
fn a_model_that_runs_once_takes_and_gives_its_states() {
    let names = |plan: &Plan| plan.user_inputs().into_iter().map(|input| input.name).collect::<Vec<_>>();
    let mut plan = plan();
    assert_eq!(names(&plan), [""; 0], "the runtime fills the inputs of a decoder");
    plan.model.kind = ModelKind::SingleRun;
    assert_eq!(names(&plan), ["input_ids", "attention_mask", "past.0.key", "past.1.key"]);
    assert_eq!(plan.result_names().collect::<Vec<_>>(), ["logits", "present.0.key", "present.1.key"]);
}

/// Bytes at half and at three halves of the planned context.
#[test]
fn states_take_the_memory_of_another_context() {
    let mut plan = plan();
    let sliding = |capacity| StateUpdate::Sliding { axis: 2, capacity };
    let others =
        [StateUpdate::Replace, sliding(16), sliding(48), sliding(1000), StateUpdate::InPlace { axis: 2, capacity: 16 }];
    let others = others.map(|update| State { update, ..plan.states[0].clone() });
    plan.states.extend(others);
    let at = |context: u64| {
        let plan = plan.for_context(context);
        assert_eq!(plan.budgets.context, context);
        plan.states.iter().map(|state| state.bytes.0 >> 10).collect::<Vec<u64>>()
    };
    assert_eq!(at(64), [8; 7]);
    assert_eq!(at(32), [4, 4, 8, 8, 5, 4, 8], "a window of 48 of 64 tokens takes 32 of 48");
    assert_eq!(at(96), [12, 12, 8, 8, 8, 12, 8], "a window of 1000 tokens takes 96 of 64");
    assert_eq!(plan.for_context(96).states[1].update, StateUpdate::Append { axis: 2, capacity: 96 });
}

#[test]
fn the_vocabulary_is_the_last_dimension_of_the_logits() {
    let mut plan = plan();
    assert_eq!(plan.model.vocabulary(), Some(512));
    plan.model.outputs.clear();
    assert_eq!(plan.model.vocabulary(), None);
}

#[test]
fn the_valid_plan_has_no_findings() {
    assert_eq!(plan().check(), []);
}

#[test]
fn a_context_beyond_the_tables_of_positions_is_an_error() {
    let mut plan = plan();
    plan.model.positions = Some(plan.budgets.context);
    assert_eq!(plan.check(), []);
    plan.model.positions = Some(plan.budgets.context - 1);
    let found: Vec<String> = plan.check().iter().map(ToString::to_string).collect();
    assert!(found.len() == 1 && found[0].contains("the plan's tables have"), "{found:?}");
    assert_eq!(plan.model.longest_context(), plan.model.positions);
}

#[test]
fn the_committed_schema_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/plan.schema.json");
    if std::env::var_os("HPP_UPDATE_SCHEMAS").is_some() {
        std::fs::write(path, plan_json_schema()).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(committed == plan_json_schema(), "plan.schema.json is stale: run `make schemas`");
}

#[test]
fn a_newer_version_is_named_before_its_unknown_fields() {
    let newer = PLAN.replace("hpp_plan: 2", "hpp_plan: 7\nfrom_the_future: true");
    let error = Plan::from_yaml(&newer).unwrap_err();
    assert!(matches!(error, PlanError::Version { found: 7 }), "{error}");
    assert!(error.hint().unwrap().contains("newer"));
}

#[test]
fn an_unknown_field_is_refused_with_its_name() {
    let error = Plan::from_yaml(&format!("{PLAN}\nsurprise: 1\n")).unwrap_err();
    assert!(error.to_string().contains("surprise"), "{error}");
}

#[test]
fn other_files_are_refused() {
    for text in ["", "a: 1", "[]", "hpp_plan: one", "\u{0}", "hpp_plan: -1", "just words", "&a [*a]"] {
        assert!(Plan::from_yaml(text).is_err(), "{text:?}");
    }
    assert!(matches!(Plan::from_yaml("model: {}"), Err(PlanError::NotAPlan)));
}

#[test]
fn yaml_alias_bombs_are_refused() {
    let mut bomb = String::from("hpp_plan: 2\na: &a [x, x, x, x, x, x, x, x, x]\n");
    for (level, name) in ["b", "c", "d", "e", "f", "g", "h", "i"].iter().enumerate() {
        let before = ["a", "b", "c", "d", "e", "f", "g", "h"][level];
        bomb += &format!("{name}: &{name} [{}]\n", vec![format!("*{before}"); 9].join(", "));
    }
    assert!(Plan::from_yaml(&bomb).is_err());
}

#[test]
fn the_unsplit_plan_is_valid() {
    let whole = plan().unsplit(Whole::Source).unwrap();
    assert_eq!(whole.check(), []);
    assert_eq!(whole.partitions.len(), 1);
    assert_eq!(whole.partitions[0].file, "../small/model.onnx");
    assert_eq!(whole.states.len(), 2);
    assert!(whole.devices.iter().all(|device| device.kind == DeviceKind::Cpu));
    assert!(whole.model.inputs.iter().all(|input| input.name != "hpp.logit_positions"));
    assert_eq!(plan().unsplit(Whole::Tapped), None);
}

#[test]
fn the_tapped_plan_has_every_boundary_once() {
    let mut tapped = plan();
    tapped.model.tapped = Some("tapped.onnx".into());
    let whole = tapped.unsplit(Whole::Tapped).unwrap();
    assert_eq!(whole.partitions[0].file, "tapped.onnx");
    let crossing = whole.partitions[0].outputs.iter().filter(|output| output.to == OutputUse::Boundary);
    assert_eq!(crossing.map(|output| output.name.as_str()).collect::<Vec<_>>(), ["hidden.0"]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// A damaged file is read and checked, or refused, without a panic.
    #[test]
    fn damage_never_panics(at in 0..PLAN.len(), with in "\\PC{0,12}", cut in 0usize..80) {
        let mut text: Vec<u8> = PLAN.as_bytes().to_vec();
        let end = (at + cut).min(text.len());
        text.splice(at..end, with.bytes());
        let text = String::from_utf8_lossy(&text);
        if let Ok(plan) = Plan::from_yaml(&text) {
            let _ = plan.check();
            let _ = plan.unsplit(Whole::Source);
            let _ = plan.unsplit(Whole::Tapped);
        }
    }

    /// Extreme numbers cause no overflow.
    #[test]
    fn extreme_numbers_never_panic(line in 0usize..200, number in prop::sample::select(vec![0, 1, u64::MAX, u64::MAX / 2, 1 << 63, 1 << 32])) {
        let lines = PLAN.lines().enumerate().map(|(at, text)| match text.rsplit_once(": ") {
            Some((key, value)) if at == line && value.starts_with(|c: char| c.is_ascii_digit()) => format!("{key}: {number}"),
            _ => text.to_owned(),
        });
        if let Ok(plan) = Plan::from_yaml(&lines.collect::<Vec<_>>().join("\n")) {
            let _ = plan.check();
            let _ = plan.unsplit(Whole::Source);
        }
    }
}

/// Parses the text of a sealed plan after one replacement.
fn edited(from: &str, to: &str) -> Result<Plan, PlanError> {
    let text = plan().to_yaml().unwrap();
    assert!(text.contains(from), "{from:?} is not in {text}");
    Plan::from_sealed_yaml(&text.replacen(from, to, 1))
}

#[test]
fn edits_of_sealed_fields_are_detected() {
    for (from, to, place) in [
        ("layers: 2", "layers: 3", "model"),
        ("name: gpu0", "name: gpu1", "devices"),
        ("file: gpu_0.onnx", "file: cpu_0.onnx", "partitions[0] (gpu_0)"),
        ("name: hidden.0", "name: hidden.1", "partitions[0] (gpu_0)"),
        ("kind: in_place", "kind: append", "states"),
        ("from: gpu0", "from: cpu", "schedule"),
        ("bytes_per_token: 256", "bytes_per_token: 512", "buffers"),
        ("sampled: aa", "sampled: ab", "files"),
    ] {
        let error = edited(from, to).unwrap_err();
        assert!(matches!(&error, PlanError::Changed { places } if places[0] == place), "{from}: {error}");
        assert!(error.to_string().contains("changed after hpp-split wrote it"), "{error}");
        assert!(error.hint().unwrap().contains("hpp-split"));
    }
}

#[test]
fn removed_partitions_and_swapped_weights_are_named() {
    let plan = plan();
    let seal = Seal::of(&plan).unwrap();
    assert_eq!(seal.differences(&plan).unwrap(), Vec::<String>::new());
    let mut fewer = plan.clone();
    fewer.partitions.pop();
    assert_eq!(seal.differences(&fewer).unwrap(), ["partitions"]);
    let weight = |name: &str, offset| WeightInput {
        name: name.into(),
        dtype: DType::Float32,
        shape: vec![2, 3],
        file: "model.onnx.data".into(),
        offset,
    };
    let mut lifted = plan;
    lifted.partitions[0].weights = vec![weight("q", 0), weight("k", 24)];
    let seal = Seal::of(&lifted).unwrap();
    (lifted.partitions[0].weights[0].offset, lifted.partitions[0].weights[1].offset) = (24, 0);
    let name = &lifted.partitions[0].name;
    assert_eq!(seal.differences(&lifted).unwrap(), [format!("partitions[0].weights ({name})")]);
}

#[test]
fn editable_fields_are_not_sealed() {
    let mut other = plan();
    let seal = Seal::of(&other).unwrap();
    other.model.name = "mine".into();
    other.budgets.context += 1;
    other.predictions.decode_ms += 1.0;
    other.generation = None;
    other.partitions[0].reason = "I want it here".into();
    other.partitions[0].providers = vec![];
    assert_eq!(seal.differences(&other).unwrap(), Vec::<String>::new());
}

#[test]
fn a_plan_to_run_needs_a_seal() {
    assert!(matches!(Plan::from_sealed_yaml(PLAN), Err(PlanError::NoSeal)));
    assert_eq!(Plan::from_sealed_yaml(&plan().to_yaml().unwrap()).unwrap(), plan());
}

/// Where layers are divided by rows, the unsplit model has the states of the exported model, and the tapped one those of the plan.
#[test]
fn the_unsplit_plan_of_divided_layers_has_the_states_of_the_model() {
    let mut plan = plan();
    plan.model.states =
        plan.states.iter().map(|state| State { past: format!("whole.{}", state.past), ..state.clone() }).collect();
    assert!(plan.check().iter().all(|finding| finding.severity != Severity::Error), "{:?}", plan.check());
    let tapped = SourceModel { tapped: Some("tapped.onnx".into()), ..plan.model.clone() };
    let with_tapped = Plan { model: tapped, ..plan.clone() };
    let pasts = |whole: Whole| -> Vec<String> {
        with_tapped.unsplit(whole).unwrap().states.into_iter().map(|state| state.past).collect()
    };
    assert!(pasts(Whole::Source).iter().all(|past| past.starts_with("whole.")));
    assert!(pasts(Whole::Tapped).iter().all(|past| !past.starts_with("whole.")));
    let unsplit = plan.unsplit(Whole::Source).unwrap();
    assert!(unsplit.check().iter().all(|finding| finding.severity != Severity::Error), "{:?}", unsplit.check());
    plan.model.states[0].bytes = ByteSize(1);
    assert!(plan.check().iter().any(|finding| finding.place == "model.states[0]"));
}
