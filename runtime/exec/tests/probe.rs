//! `hpp-exec probe` as a process: its protocol, its errors, its measurements of recorded models and of this machine.

mod support;

use hpp_schema::probe::{
    Carried, Case, Feed, Fill, MachineProbe, OutputSpec, PROBE_VERSION, PartitionProbe, PassProbe, Reply, Request,
};
use hpp_schema::{BandwidthPath, Dim, HostKernels, InputRole, Provider, State, StateUpdate};
use std::io::Write;
use std::process::{Command, Stdio};
use support::PlanDir;

/// The replies to these lines, the greeting apart. Every line on stdout must be one.
fn ask(lines: &[String]) -> Vec<Reply> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_hpp-exec"))
        .args(["probe", "--threads", "2"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(lines.join("\n").as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut replies: Vec<Reply> =
        text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect();
    let Reply::Ready { version, host } = replies.remove(0) else { panic!("the first reply is Ready") };
    assert_eq!((version, host.threads), (PROBE_VERSION, 2));
    assert!(!host.cpu.is_empty() && host.memory.0 > 1 << 20 && host.cores > 0 && host.onnxruntime.starts_with("1."));
    assert!(host.devices.iter().any(|device| device.provider == Provider::CPU));
    replies
}

fn line(request: &Request) -> String {
    serde_json::to_string(request).unwrap()
}

fn machine(probe: MachineProbe) -> Vec<Reply> {
    ask(&[line(&Request::Machine(probe))])
}

/// A pass of `tokens` after `past` of them, as the engine would feed it.
fn case(plan: &PlanDir, name: &str, past: u64, tokens: u64) -> Case {
    let model = &plan.plan.model;
    let feed = |input: &hpp_schema::ModelInput| {
        let (shape, fill) = match input.role {
            InputRole::AttentionMask => (vec![1, past + tokens], Fill::Ones),
            InputRole::PositionIds => {
                let axes = (input.shape.len() == 3).then(|| input.shape[0].as_fixed().unwrap());
                let shape = axes.into_iter().chain([1, tokens]).collect();
                (shape, Fill::Positions { start: past as i64 })
            }
            InputRole::LogitPositions => (vec![1], Fill::Values { values: vec![tokens as i64 - 1] }),
            InputRole::UseCacheBranch => (vec![1], Fill::Ones),
            _ => (vec![1, tokens], Fill::Integers { below: model.vocab_size.unwrap_or(2), seed: 1 }),
        };
        Feed { name: input.name.clone(), dtype: input.dtype, shape, fill }
    };
    let mut inputs: Vec<Feed> = model.inputs.iter().map(feed).collect();
    let (mut outputs, mut carried) = (Vec::new(), Vec::new());
    for state in &plan.plan.states {
        let shape_with_length = |length| shape(state, length);
        let (was, is) = match state.update {
            StateUpdate::InPlace { capacity, .. } => (shape_with_length(capacity), shape_with_length(capacity)),
            _ => (shape_with_length(past), shape_with_length(past + tokens)),
        };
        inputs.push(Feed { name: state.past.clone(), dtype: state.dtype, shape: was, fill: Fill::Normal { seed: 2 } });
        outputs.push(OutputSpec { name: state.present.clone(), dtype: state.dtype, shape: is });
        let in_place = matches!(state.update, StateUpdate::InPlace { .. });
        carried.push(Carried { past: state.past.clone(), present: state.present.clone(), in_place });
    }
    Case {
        name: name.into(),
        inputs,
        outputs,
        carried,
        evict_bytes: 1 << 20,
        warmup: 1,
        min_runs: 3,
        max_runs: 6,
        budget_ms: 50.0,
    }
}

/// A state's sizes with so many tokens in it.
fn shape(state: &State, length: u64) -> Vec<u64> {
    let axis = match state.update {
        StateUpdate::InPlace { axis, .. } | StateUpdate::Append { axis, .. } => Some(axis),
        _ => None,
    };
    let size = |(at, dim): (usize, &Dim)| if Some(at) == axis { length } else { dim.as_fixed().unwrap_or(1) };
    state.shape.iter().enumerate().map(size).collect()
}

fn partition(plan: &PlanDir, provider: Provider, cases: Vec<Case>) -> Request {
    let file = plan.file("model.onnx");
    let (weights_dir, host_kernels) = (plan.file("."), HostKernels::default());
    Request::Partition(PartitionProbe { file, weights_dir, host_kernels, weight_bytes: 1 << 20, provider, cases })
}

fn measures(plan: &PlanDir, provider: Provider) {
    let cases = vec![case(plan, "decode", 8, 1), case(plan, "prefill", 0, 8)];
    let replies = ask(&[line(&partition(plan, provider, cases))]);
    assert!(matches!(&replies[0], Reply::Loaded { load_ms, .. } if *load_ms > 0.0), "{replies:?}");
    for (reply, name) in replies[1..].iter().zip(["decode", "prefill"]) {
        let Reply::Measured { case, timing, peak_resident } = reply else { panic!("{replies:?}") };
        assert_eq!(case, name);
        assert!((3..=6).contains(&timing.runs) && timing.median_ms > 0.0, "{timing:?}");
        assert!(timing.p10_ms <= timing.median_ms && timing.median_ms <= timing.p90_ms, "{timing:?}");
        assert!(peak_resident.is_none_or(|bytes| bytes > 1 << 20));
    }
    assert_eq!(replies[3..], [Reply::Done]);
}

#[test]
fn partitions_are_timed_whatever_their_states() {
    for name in ["genai/llama3-fp32-cpu", "genai/llama3-int4-cpu", "optimum/llama-with-past", "genai/qwen3.5-fp32-cpu"]
    {
        measures(&PlanDir::new(name, 32), Provider::CPU);
    }
}

/// What a token takes beside its partitions is timed: no run of the partition is in it.
#[test]
fn tokens_are_timed_beside_their_partitions() {
    let plan = PlanDir::new("optimum/mixtral-with-past", 64);
    let pass = |plan, tokens| line(&Request::Pass(PassProbe { plan, tokens, evict_bytes: 1 << 20 }));
    let alone = line(&partition(&plan, Provider::CPU, vec![case(&plan, "decode", 16, 1)]));
    let replies = ask(&[pass(plan.path(), 40), pass(plan.file("none.yaml"), 40), pass(plan.path(), 1), alone]);
    let (Reply::Pass { timing: beside }, Reply::Measured { timing: alone, .. }) = (&replies[0], &replies[6]) else {
        panic!("{replies:?}")
    };
    assert!(beside.runs == 32 && beside.p10_ms > 0.0 && beside.p10_ms < alone.p10_ms, "{beside:?} {alone:?}");
    assert!(matches!(&replies[2], Reply::Failed { reason } if reason.contains("none.yaml")), "{replies:?}");
    assert!(matches!(&replies[3], Reply::Pass { timing } if timing.runs == 1), "{replies:?}");
    let bert = PlanDir::new("optimum/bert", 64);
    let replies = ask(&[pass(bert.path(), 4)]);
    assert!(matches!(&replies[0], Reply::Failed { .. }), "{replies:?}");
}

#[test]
fn one_case_that_cannot_run_costs_that_case() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 32);
    let mut broken = case(&plan, "broken", 8, 1);
    broken.inputs.remove(0);
    // Past the cache's end: the operator itself refuses, or the shapes do.
    let beyond = Case { inputs: case(&plan, "", 8, 40).inputs, ..case(&plan, "beyond", 8, 1) };
    let cases = vec![broken, beyond, case(&plan, "decode", 8, 1)];
    let replies = ask(&[line(&partition(&plan, Provider::CPU, cases))]);
    assert!(
        matches!(&replies[1], Reply::CaseFailed { case, reason } if case == "broken" && reason.contains("input_ids"))
    );
    assert!(matches!(&replies[2], Reply::CaseFailed { case, .. } if case == "beyond"), "{replies:?}");
    assert!(matches!(&replies[3], Reply::Measured { case, .. } if case == "decode"), "{replies:?}");
    assert_eq!(replies[4], Reply::Done);
}

#[test]
fn what_is_not_here_fails_with_the_reason_and_the_next_request_is_answered() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 32);
    let Request::Partition(mut missing) = partition(&plan, Provider::CPU, vec![]) else { unreachable!() };
    missing.file = "no/such.onnx".into();
    let link = |provider| line(&Request::Machine(MachineProbe::Link { provider, bytes: vec![4096] }));
    let replies = ask(&[
        "nonsense".into(),
        String::new(),
        r#"{"request":"machine","path":"moon"}"#.into(),
        line(&Request::Partition(missing)),
        line(&partition(&plan, Provider::CUDA, vec![case(&plan, "decode", 8, 1)])),
        link(Provider::CPU),
        link(Provider::CUDA),
        line(&Request::Machine(MachineProbe::RamRead { bytes: vec![] })),
        line(&Request::Machine(MachineProbe::RamRead { bytes: vec![u64::MAX] })),
        "\u{fffd}".into(),
    ]);
    let says = [
        "not a request",
        "moon",
        "no/such.onnx",
        "CUDA",
        "no device",
        "CUDA",
        "no size",
        "are too much",
        "not a request",
    ];
    assert_eq!(replies.len(), says.len(), "{replies:#?}");
    for (reply, says) in replies.iter().zip(says) {
        assert!(matches!(reply, Reply::Failed { reason } if reason.contains(says)), "{says}: {reply:?}");
    }
}

#[test]
fn memory_and_arithmetic_are_measured() {
    let sizes = vec![1 << 20, 32 << 20];
    let replies = machine(MachineProbe::RamRead { bytes: sizes.clone() });
    let [Reply::Bandwidth { curves }, Reply::Done] = &replies[..] else { panic!("{replies:?}") };
    assert_eq!((curves.len(), curves[0].path), (1, BandwidthPath::RamRead));
    assert_eq!(curves[0].points.iter().map(|point| point.bytes).collect::<Vec<_>>(), sizes);
    assert!(curves[0].points.iter().all(|point| (0.01..1e5).contains(&point.gb_per_s)), "{curves:?}");
    let replies = machine(MachineProbe::Arithmetic);
    let [Reply::Arithmetic { tflops }, Reply::Done] = &replies[..] else { panic!("{replies:?}") };
    assert!((1e-4..1e3).contains(tflops), "{tflops}");
}

#[test]
#[cfg(target_os = "linux")]
fn the_disk_is_read_past_the_page_cache() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = dir.path().join("large");
    std::fs::write(&file, vec![7; 8 << 20]).unwrap();
    let replies = machine(MachineProbe::DiskRead { file: file.clone(), bytes: vec![100_000, 1 << 20, 1 << 30] });
    match &replies[..] {
        [Reply::Bandwidth { curves }, Reply::Done] => {
            assert_eq!(curves[0].path, BandwidthPath::DiskRead);
            let sizes: Vec<u64> = curves[0].points.iter().map(|point| point.bytes).collect();
            assert_eq!(sizes, [102_400, 1 << 20], "whole pages; what the file is too small for is left out");
            assert!(curves[0].points.iter().all(|point| point.gb_per_s > 0.0));
        }
        [Reply::Failed { reason }] if reason.contains("no direct reads") => {
            println!("SKIPPED: the_disk_is_read_past_the_page_cache: {reason}");
        }
        other => panic!("{other:?}"),
    }
    let replies = machine(MachineProbe::DiskContention { file: file.clone() });
    match &replies[..] {
        [Reply::Contention { compute, link }, Reply::Done] => {
            assert!((1.0..1e3).contains(compute) && (1.0..1e3).contains(link), "{compute} {link}");
        }
        [Reply::Failed { reason }] => assert!(reason.contains("no direct reads"), "{reason}"),
        other => panic!("{other:?}"),
    }
    let replies = machine(MachineProbe::DiskRead { file, bytes: vec![1 << 30] });
    assert!(matches!(&replies[..], [Reply::Failed { reason }] if reason.contains("too few")), "{replies:?}");
    let replies = machine(MachineProbe::DiskRead { file: "no/such".into(), bytes: vec![4096] });
    assert!(matches!(&replies[..], [Reply::Failed { reason }] if reason.contains("no/such")), "{replies:?}");
}

/// A request that keeps the child busy for seconds is under way when its parent is killed.
#[test]
#[cfg(target_os = "linux")]
fn it_ends_when_its_parent_is_killed() {
    use std::io::{BufRead, BufReader};
    let request = line(&Request::Machine(MachineProbe::RamRead { bytes: (1..=40).map(|n| n << 20).collect() }));
    let mut parent = Command::new("sh")
        .args(["-c", r#"exec 3<&0; "$0" probe <&3 >/dev/null & echo $!; wait"#, env!("CARGO_BIN_EXE_hpp-exec")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    writeln!(parent.stdin.take().unwrap(), "{request}").unwrap();
    let mut number = String::new();
    BufReader::new(parent.stdout.take().unwrap()).read_line(&mut number).unwrap();
    let lives = || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        std::fs::read_to_string(format!("/proc/{}/comm", number.trim())).is_ok_and(|name| name.starts_with("hpp-exec"))
    };
    assert!((0..10).all(|_| lives()), "no more requests come, and the last is answered all the same");
    parent.kill().unwrap();
    parent.wait().unwrap();
    assert!((0..50).any(|_| !lives()), "the child ends with whoever asked");
}

fn skipped(test: &str) -> bool {
    let skip = std::env::var_os("HPP_WEBGPU_TEST").is_none();
    if skip {
        println!("SKIPPED: {test}: HPP_WEBGPU_TEST is not set, see tools/scripts/with-webgpu.sh");
    }
    skip
}

#[test]
fn partitions_are_timed_on_a_device() {
    if !skipped("partitions_are_timed_on_a_device") {
        measures(&PlanDir::new("genai/llama3-fp32-cpu", 32), Provider::WEBGPU);
    }
}

#[test]
fn the_link_to_a_device_is_measured_both_ways() {
    if skipped("the_link_to_a_device_is_measured_both_ways") {
        return;
    }
    let (provider, bytes) = (Provider::WEBGPU, vec![4096, 1 << 20]);
    let replies = ask(&[
        line(&Request::Machine(MachineProbe::Link { provider, bytes: bytes.clone() })),
        line(&Request::Machine(MachineProbe::Contention { provider, bytes: 1 << 20 })),
    ]);
    let [Reply::Bandwidth { curves }, Reply::Done, Reply::Contention { compute, link }, Reply::Done] = &replies[..]
    else {
        panic!("{replies:?}")
    };
    let ways: Vec<_> = curves.iter().map(|curve| curve.path).collect();
    let way = |to_device| BandwidthPath::Link { provider, to_device, pinned: false };
    assert_eq!(ways[..2], [way(true), way(false)], "pinned only where it can be pinned");
    for curve in curves {
        assert_eq!(curve.points.iter().map(|point| point.bytes).collect::<Vec<_>>(), bytes);
        assert!(curve.points.iter().all(|point| (1e-4..1e4).contains(&point.gb_per_s)), "{curve:?}");
    }
    assert!((1.0..1e3).contains(compute) && (1.0..1e3).contains(link), "{compute} {link}");
}
