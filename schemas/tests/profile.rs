//! Profiles: round trip, and all errors reported at once.

use hpp_schema::{DocumentError, Profile, profile_json_schema};
use proptest::prelude::*;

const PROFILE: &str = "hpp_profile: 1
model:
  name: tiny
  hash: '00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff'
  weight_bytes: 4 MiB
  blocks:
    - { label: embedding, class: 0, weight_bytes: 1 MiB }
    - { label: layers.0, class: 1, weight_bytes: 1 MiB }
    - { label: layers.1, class: 1, weight_bytes: 1 MiB }
    - { label: head, class: 2, weight_bytes: 1 MiB }
host: { cpu: some, cores: 2, memory: 8 GiB, system: linux x86_64, threads: 2, onnxruntime: 1.31.1, hpp: 0.1.0, devices: [] }
date: '2026-01-31T12:00:00Z'
settings: { providers: [cpu], contexts: [128, 256], prefill_tokens: [64], quick: true, all_blocks: false, decode_tokens: 8 }
machine:
  rates:
    hpp_machine: 1
    name: here
    cpu: { memory: 8 GiB, memory_gb_per_s: 20, tflops: 0.2, launch_us: 50 }
  curves:
    - path: { kind: ram_read }
      points: [{ bytes: 1048576, gb_per_s: 30 }, { bytes: 67108864, gb_per_s: 20 }]
    - path: { kind: link, provider: webgpu, to_device: true, pinned: false }
      points: []
pass: { timing: { runs: 40, median_ms: 0.09, p10_ms: 0.08, p90_ms: 0.12 } }
classes:
  - class: 0
    block: embedding
    providers: [{ provider: cpu, run_length: 1, decode: { points: [] }, prefill: { points: [] }, failure: it crashed }]
  - class: 1
    block: layers.0
    providers:
      - provider: cpu
        run_length: 2
        launch_ms: 0.05
        decode:
          points:
            - tokens: 128
              ms: 0.5
              single: { runs: 9, median_ms: 0.55, p10_ms: 0.5, p90_ms: 0.7 }
              run: { runs: 9, median_ms: 1.05, p10_ms: 1.0, p90_ms: 1.1 }
            - tokens: 256
              failure: it hung
          fit: { constant_ms: 0.5, linear_ms: 0, quadratic_ms: 0, worst_relative_error: 0, r2: 1 }
        prefill: { points: [] }
  - class: 2
    block: head
    providers: [{ provider: cpu, run_length: 1, decode: { points: [] }, prefill: { points: [] } }]
corpus: { hash: abc, prompts_done: 1, skipped_in_all: 0, statistics: { prompts: 1, prompt_tokens: 3, generated_tokens: 2 } }
sensitivity: [{ block: layers.0, bits: 4, positions: 8, kl: 0.01, top1_changed: 0.5 }]
";

/// The errors after one change; a wrong class also makes another class missing.
#[track_caller]
fn error_after(from: &str, to: &str) -> String {
    assert!(PROFILE.contains(from), "{from:?}");
    let error = Profile::from_yaml(&PROFILE.replacen(from, to, 1)).unwrap_err();
    assert!((1..=3).contains(&error.findings().len()), "{error}: {:#?}", error.findings());
    error.findings().iter().map(|finding| format!("{finding}\n")).collect()
}

#[test]
fn a_profile_reads_back_as_it_was_written() {
    let profile = Profile::from_yaml(PROFILE).unwrap_or_else(|e| panic!("{e}: {:#?}", e.findings()));
    assert_eq!(profile.check(), []);
    let text = profile.to_yaml().unwrap();
    assert!(text.starts_with("hpp_profile: 1\n"), "{text}");
    assert_eq!(Profile::from_yaml(&text).unwrap(), profile);
}

#[test]
fn a_profile_without_pass_costs_is_valid() {
    let pass = PROFILE.lines().find(|line| line.starts_with("pass: ")).unwrap();
    let profile = Profile::from_yaml(&PROFILE.replace(pass, "")).unwrap();
    assert_eq!(profile.pass, None);
    assert!(!profile.to_yaml().unwrap().contains("pass:"));
}

#[test]
fn the_committed_schema_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/profile.schema.json");
    if std::env::var_os("HPP_UPDATE_SCHEMAS").is_some() {
        std::fs::write(path, profile_json_schema()).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(committed == profile_json_schema(), "profile.schema.json is stale: run `make schemas`");
}

#[test]
fn each_error_names_its_place() {
    let second = "{ label: layers.1, class: 1, weight_bytes: 1 MiB }";
    for (from, to, words) in [
        ("ms: 0.5\n", "ms: -0.5\n", "classes[1].providers[0].decode.points[0].ms: -0.5 is less than 0"),
        ("ms: 0.5\n", "ms: .nan\n", "classes[1].providers[0].decode.points[0].ms: \".nan\" is not a number"),
        ("launch_ms: 0.05", "launch_ms: -1", "classes[1].providers[0].launch_ms: -1 is less than 0"),
        ("median_ms: 0.55", "median_ms: 0.1", "points[0].single: the median 0.1 ms is not between"),
        ("median_ms: 0.09", "median_ms: 0.9", "pass.timing: the median 0.9 ms is not between"),
        ("runs: 40, ", "", "pass.timing.runs: it is missing"),
        ("tokens: 256", "tokens: 128", "decode.points: points must be in increasing order of tokens, but 128"),
        ("tokens: 128", "tokens: 0", "decode.points[0].tokens: 0 is less than 1"),
        ("runs: 9", "runs: 0", "single.runs: 0 is less than 1"),
        ("run_length: 2", "run_length: 5", "run_length: the model has only 4 blocks"),
        ("run_length: 2", "run_length: 0", "run_length: 0 is less than 1"),
        ("r2: 1 }", "r2: 2 }", "decode.fit.r2: 2 is more than 1"),
        ("block: head\n", "block: tail\n", "classes[2].block: the model has no block \"tail\""),
        ("class: 2\n    block: head", "class: 1\n    block: layers.1", "no entry for: head"),
        (
            second,
            "{ label: layers.0, class: 1, weight_bytes: 1 MiB }",
            "model.blocks[2].label: \"layers.0\" occurs twice",
        ),
        (second, "{ label: layers.1, class: 7, weight_bytes: 1 MiB }", "no entry for: layers.1"),
        ("providers: [cpu]", "providers: [cpu, webgpu]", "\"webgpu\" is missing"),
        ("class: 2\n    block: head", "class: 1\n    block: layers.1", "classes[2].class: class 1 occurs twice"),
        ("contexts: [128, 256]", "contexts: [128, 128]", "settings.contexts: an entry occurs twice"),
        ("prefill_tokens: [64]", "prefill_tokens: [0]", "settings.prefill_tokens: 0 tokens cannot be measured"),
        ("hash: '00112233", "hash: '0011", "model.hash: \"0011"),
        ("date: '2026-01-31T12:00:00Z'", "date: yesterday", "date: \"yesterday\" is not a date"),
        ("memory_gb_per_s: 20", "memory_gb_per_s: 0", "machine.rates.cpu.memory_gb_per_s: 0 is not more than 0"),
        ("cpu: { memory: 8 GiB", "cpu: { memory: 0", "machine.rates.cpu.memory: memory of 0 bytes"),
        (
            "bytes: 1048576",
            "bytes: 1048576000",
            "machine.curves[0].points: points must be in increasing order of bytes",
        ),
        ("gb_per_s: 30", "gb_per_s: -30", "machine.curves[0].points[0].gb_per_s: -30 is not more than 0"),
        (
            "sensitivity: [{ block: layers.0",
            "sensitivity: [{ block: layers.9",
            "sensitivity[0].block: the model has no block",
        ),
        ("top1_changed: 0.5", "top1_changed: 1.5", "sensitivity[0].top1_changed: 1.5 is more than 1"),
        ("threads: 2", "threads: 0", "host.threads: 0 is less than 1"),
        ("quick: true", "quick: perhaps", "settings.quick: \"perhaps\" is not true or false"),
        ("quick: true, ", "", "settings.quick: it is missing"),
        ("prompts_done: 1", "prompts_dun: 1, prompts_done: 1", "corpus.prompts_dun: there is no such field"),
        ("prompt_tokens: 3", "prompt_tokens: -3", "corpus.statistics.prompt_tokens: -3 is less than 0"),
    ] {
        let error = error_after(from, to);
        assert!(error.contains(words), "{words:?} is not in {error:?}");
    }
}

#[test]
fn all_errors_are_reported_at_once() {
    let text = PROFILE
        .replace("ms: 0.5\n", "ms: -0.5\n")
        .replace("  - class: 2\n    block: head\n    providers: [{ provider: cpu, run_length: 1, decode: { points: [] }, prefill: { points: [] } }]\n", "")
        .replace("date: '2026", "date: 'MMXX")
        .replace("class: 0\n    block: embedding", "class: 1\n    block: layers.1");
    let error = Profile::from_yaml(&text).unwrap_err();
    let found: Vec<&str> = error.findings().iter().map(|finding| finding.place.as_str()).collect();
    for place in ["classes[1].providers[0].decode.points[0].ms", "classes", "date", "classes[1].class"] {
        assert!(found.contains(&place), "{place} in {found:?}");
    }
    assert_eq!(found.len(), 4, "{found:?}");
    let missing = error.findings().iter().find(|finding| finding.place == "classes").unwrap();
    assert!(missing.message.contains("embedding") && missing.message.contains("head"), "{missing}");
}

/// With `all_blocks`, blocks of one class each have an entry.
#[test]
fn every_block_may_have_an_entry_of_its_own() {
    let text = PROFILE.replace("all_blocks: false", "all_blocks: true");
    let error = Profile::from_yaml(&text).unwrap_err();
    assert!(error.findings()[0].message.contains("layers.1"), "{:?}", error.findings());
    let own = "  - class: 1\n    block: layers.1\n    providers: [{ provider: cpu, run_length: 1, decode: { points: [] }, prefill: { points: [] } }]\n  - class: 2\n";
    assert!(Profile::from_yaml(&text.replace("  - class: 2\n", own)).is_ok());
}

#[test]
fn other_files_are_refused() {
    let error = |text: &str| Profile::from_yaml(text).unwrap_err();
    assert!(matches!(
        error(&PROFILE.replace("hpp_profile: 1", "hpp_profile: 9")),
        DocumentError::Version { found: 9, .. }
    ));
    for text in ["", "[]", "just words", "hpp_plan: 1", "hpp_machine: 1"] {
        assert!(matches!(error(text), DocumentError::Other { .. }), "{text:?}");
    }
    assert!(matches!(error("a: ["), DocumentError::Syntax { .. }));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// A damaged file is read or refused without a panic, and a profile that is read is valid.
    #[test]
    fn damage_never_panics(at in 0..PROFILE.len(), with in "\\PC{0,12}", cut in 0usize..80) {
        let mut text: Vec<u8> = PROFILE.as_bytes().to_vec();
        let end = (at + cut).min(text.len());
        text.splice(at..end, with.bytes());
        if let Ok(profile) = Profile::from_yaml(&String::from_utf8_lossy(&text)) {
            prop_assert_eq!(profile.check(), []);
        }
    }
}
