//! The probe protocol: messages on one line, unknown fields refused, committed schema.

use hpp_schema::probe::{
    Carried, Case, Feed, Fill, MachineProbe, ObserveProbe, OutputSpec, PartitionProbe, Prompt, PromptContent, Reply,
    Request, Tap, TapKind, probe_json_schema,
};
use hpp_schema::{BandwidthCurve, BandwidthPath, BandwidthPoint, DType, HostKernels, Provider, TimingStats};
use serde::{Serialize, de::DeserializeOwned};

#[test]
fn the_committed_schema_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/probe.schema.json");
    if std::env::var_os("HPP_UPDATE_SCHEMAS").is_some() {
        std::fs::write(path, probe_json_schema()).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(committed == probe_json_schema(), "probe.schema.json is stale: run `make schemas`");
}

/// Serialises to one line and parses back to an equal value.
fn round_trip<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(what: &T) -> String {
    let line = serde_json::to_string(what).unwrap();
    assert!(!line.contains('\n'));
    assert_eq!(serde_json::from_str::<T>(&line).unwrap(), *what, "{line}");
    line
}

fn partition() -> Request {
    let fills = [
        Fill::Zeros,
        Fill::Ones,
        Fill::Positions { start: -1 },
        Fill::Integers { below: 7, seed: u64::MAX },
        Fill::Normal { seed: 1 },
        Fill::Values { values: vec![i64::MIN, i64::MAX] },
    ];
    let feed = |fill: Fill| Feed { name: "a \"quoted\"\nname".into(), dtype: DType::Bfloat16, shape: vec![1, 2], fill };
    Request::Partition(PartitionProbe {
        file: "block.onnx".into(),
        weights_dir: ".".into(),
        host_kernels: HostKernels { packed: true, ..HostKernels::default() },
        weight_bytes: 1 << 40,
        provider: Provider::WEBGPU,
        cases: vec![Case {
            name: "decode at 128".into(),
            inputs: fills.map(feed).into(),
            outputs: vec![OutputSpec { name: "y".into(), dtype: DType::Float16, shape: vec![] }],
            carried: vec![Carried { past: "past".into(), present: "present".into(), in_place: true }],
            evict_bytes: 0,
            warmup: 1,
            min_runs: 3,
            max_runs: 30,
            budget_ms: 0.5,
        }],
    })
}

#[test]
fn requests_round_trip_on_one_line() {
    let machine = |probe| round_trip(&Request::Machine(probe));
    assert!(round_trip(&partition()).starts_with(r#"{"request":"partition","file":"#));
    assert_eq!(machine(MachineProbe::Arithmetic), r#"{"request":"machine","path":"arithmetic"}"#);
    machine(MachineProbe::RamRead { bytes: vec![1, 2] });
    machine(MachineProbe::DiskRead { file: "weights".into(), bytes: vec![4096] });
    machine(MachineProbe::Link { provider: Provider::CUDA, bytes: vec![] });
    machine(MachineProbe::Contention { provider: Provider::WEBGPU, bytes: 1 });
    let contents =
        [PromptContent::Text("a\nb".into()), PromptContent::Messages(vec![]), PromptContent::Tokens(vec![7])];
    round_trip(&Request::Observe(ObserveProbe {
        plan: "plan.yaml".into(),
        prompts: contents.into_iter().map(|content| Prompt { line: 1, content }).collect(),
        decode_tokens: 3,
        taps: vec![Tap { name: "t".into(), block: "layers.0".into(), kind: TapKind::RouterScores { top_k: 2 } }],
    }));
}

#[test]
fn replies_round_trip_on_one_line() {
    let timing = TimingStats { runs: 3, median_ms: 1.25, p10_ms: 1.0, p90_ms: 2.0 };
    round_trip(&Reply::Measured { case: "c".into(), timing, peak_resident: None });
    let points = vec![BandwidthPoint { bytes: 1, gb_per_s: 0.5 }];
    let path = BandwidthPath::Link { provider: Provider::CUDA, to_device: true, pinned: false };
    round_trip(&Reply::Bandwidth { curves: vec![BandwidthCurve { path, points }] });
    round_trip(&Reply::Contention { compute: 1.0, link: 1.5 });
    round_trip(&Reply::Failed { reason: "no \"device\"\n".into() });
    assert_eq!(round_trip(&Reply::Done), r#"{"reply":"done"}"#);
}

#[test]
fn unknown_fields_and_requests_are_refused() {
    for line in [
        r#"{"request":"machine","path":"ram_read","bytes":[1],"surprise":1}"#,
        r#"{"request":"machine","path":"ram_read","bytes":[-1]}"#,
        r#"{"request":"machine","path":"moon"}"#,
        r#"{"request":"dance"}"#,
        r#"{"reply":"done"}"#,
        "[]",
    ] {
        assert!(serde_json::from_str::<Request>(line).is_err(), "{line}");
    }
    let line = serde_json::to_string(&partition()).unwrap();
    let spoiled = line.replacen(r#""warmup""#, r#""cooldown""#, 1);
    let error = serde_json::from_str::<Request>(&spoiled).unwrap_err().to_string();
    assert!(error.contains("cooldown"), "{error}");
}
