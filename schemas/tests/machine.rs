//! Machine files: round trip, and all errors reported at once.

use hpp_schema::{DocumentError, Machine, machine_json_schema};
use proptest::prelude::*;

const MACHINE: &str = "hpp_machine: 1
name: test
sources: [made up]
cpu: { memory: 64 GiB, memory_gb_per_s: 60, tflops: 1.5, launch_us: 20 }
gpus:
  - name: card
    provider: cuda
    memory: 24 GiB
    memory_gb_per_s: 900
    tflops: 120
    launch_us: 30
    link: { to_device_gb_per_s: 25, from_device_gb_per_s: 25.5, latency_us: 10 }
    contention: { compute: 1.2, link: 1.1 }
disk: { read_gb_per_s: 3.5 }
";

fn places(text: &str) -> Vec<String> {
    let error = Machine::from_yaml(text).unwrap_err();
    error.findings().iter().map(|finding| finding.place.clone()).collect()
}

/// The only error after one change.
#[track_caller]
fn error_after(from: &str, to: &str) -> String {
    assert!(MACHINE.contains(from), "{from:?}");
    let error = Machine::from_yaml(&MACHINE.replace(from, to)).unwrap_err();
    match error.findings() {
        [one] => one.to_string(),
        [] => error.to_string(),
        many => panic!("one change, {} findings: {many:#?}", many.len()),
    }
}

#[test]
fn a_machine_reads_back_as_it_was_written() {
    let machine = Machine::from_yaml(MACHINE).unwrap();
    assert_eq!(machine.check(), []);
    let text = machine.to_yaml().unwrap();
    assert!(text.starts_with("hpp_machine: 1\n"), "{text}");
    assert_eq!(Machine::from_yaml(&text).unwrap(), machine);
}

#[test]
fn the_committed_schema_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/machine.schema.json");
    if std::env::var_os("HPP_UPDATE_SCHEMAS").is_some() {
        std::fs::write(path, machine_json_schema()).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(committed == machine_json_schema(), "machine.schema.json is stale: run `make schemas`");
}

#[test]
fn each_error_names_its_place() {
    for (from, to, words) in [
        ("memory_gb_per_s: 60, ", "", "cpu.memory_gb_per_s: it is missing"),
        ("memory_gb_per_s: 60, ", "memory_gb_per_s: 0, ", "cpu.memory_gb_per_s: 0 is not more than 0"),
        ("tflops: 120", "tflops: -1", "gpus[0].tflops: -1 is not more than 0"),
        ("tflops: 120", "tflops: .nan", "gpus[0].tflops: \".nan\" is not a number"),
        ("tflops: 120", "tflops: fast", "gpus[0].tflops: \"fast\" is not a number"),
        ("latency_us: 10", "latency_us: -10", "gpus[0].link.latency_us: -10 is less than 0"),
        ("compute: 1.2", "compute: 0.8", "gpus[0].contention.compute: 0.8 is less than 1"),
        ("memory: 24 GiB", "memory: 24 pounds", "gpus[0].memory: cannot read size"),
        ("memory: 24 GiB", "memory: 0", "gpus[0].memory: memory of 0 bytes"),
        ("memory: 24 GiB", "memory: 24", "gpus[0].memory: memory of 24 bytes: did you mean 24 GiB?"),
        ("provider: cuda", "provider: TPU", "gpus[0].provider: \"TPU\" cannot be the name of a provider"),
        ("provider: cuda", "provider: cpu", "gpus[0].provider: the cpu provider computes on the host"),
        ("name: card", "nome: card\n    name: card", "gpus[0].nome: there is no such field"),
        ("name: test", "name: 7", "name: 7 is not text"),
        ("disk: { read_gb_per_s: 3.5 }", "disk: 3.5", "disk: 3.5 is not a mapping"),
    ] {
        let error = error_after(from, to);
        assert!(error.contains(words), "{words:?} is not in {error:?}");
    }
}

#[test]
fn all_errors_are_reported_at_once() {
    let text = MACHINE
        .replace("memory_gb_per_s: 60, ", "")
        .replace("tflops: 120", "tflops: -1")
        .replace("    launch_us: 30\n", "");
    let text = text.replace("memory: 64 GiB", "memory: 0").replace("disk:", "disc:");
    let found = places(&text);
    for place in ["cpu.memory_gb_per_s", "cpu.memory", "gpus[0].tflops", "gpus[0].launch_us", "disc"] {
        assert!(found.iter().any(|other| other == place), "{place} in {found:?}");
    }
    assert_eq!(found.len(), 5, "{found:?}");
}

#[test]
fn a_machine_made_in_memory_is_checked_by_the_same_rules() {
    let mut machine = Machine::from_yaml(MACHINE).unwrap();
    machine.cpu.tflops = f64::NAN;
    machine.gpus[0].link.latency_us = -1.0;
    let found: Vec<String> = machine.check().into_iter().map(|finding| finding.place).collect();
    assert_eq!(found, ["cpu.tflops", "gpus[0].link.latency_us"]);
}

#[test]
fn other_files_are_refused() {
    let error = |text: &str| Machine::from_yaml(text).unwrap_err();
    assert!(matches!(
        error(&MACHINE.replace("hpp_machine: 1", "hpp_machine: 9")),
        DocumentError::Version { found: 9, .. }
    ));
    for text in ["", "[]", "just words", "name: test", "hpp_plan: 1"] {
        assert!(matches!(error(text), DocumentError::Other { .. }), "{text:?}: {:?}", error(text));
    }
    for text in ["a: [", "\u{0}", "a: 1\na: 2", "hpp_machine: 1\nhpp_machine: 1"] {
        assert!(matches!(error(text), DocumentError::Syntax { .. }), "{text:?}: {:?}", error(text));
    }
    assert_eq!(places(&MACHINE.replace("hpp_machine: 1", "hpp_machine: one")), ["hpp_machine"]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// A damaged file is read or refused without a panic, and a machine that is read is valid.
    #[test]
    fn damage_never_panics(at in 0..MACHINE.len(), with in "\\PC{0,12}", cut in 0usize..80) {
        let mut text: Vec<u8> = MACHINE.as_bytes().to_vec();
        let end = (at + cut).min(text.len());
        text.splice(at..end, with.bytes());
        if let Ok(machine) = Machine::from_yaml(&String::from_utf8_lossy(&text)) {
            prop_assert_eq!(machine.check(), []);
        }
    }
}

/// Each preset is valid, and each rate has a source.
#[test]
fn presets_are_valid_and_have_sources() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/machines");
    let mut with_gpu = 0;
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|kind| kind == "yaml"));
    assert!(files.len() >= 4, "{files:?}");
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        let machine =
            Machine::from_yaml(&text).unwrap_or_else(|e| panic!("{}: {e}: {:#?}", path.display(), e.findings()));
        assert_eq!(machine.check(), [], "{}", path.display());
        for rate in ["host", "disk", "launch"].iter().chain(
            machine
                .gpus
                .first()
                .map(|_| &["GPU memory", "GPU arithmetic", "link", "contention"][..])
                .unwrap_or_default(),
        ) {
            assert!(
                machine.sources.iter().any(|source| source.starts_with(rate)),
                "{}: no source for {rate}",
                path.display()
            );
        }
        with_gpu += usize::from(!machine.gpus.is_empty());
    }
    assert!(with_gpu >= 3);
}
