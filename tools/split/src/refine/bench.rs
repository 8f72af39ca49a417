//! Measuring a plan: writes it to a temporary directory and runs `hpp-exec bench` there as a child process.

use crate::cli::SplitArgs;
use crate::error::{RefineError, SplitError};
use crate::exec::{find_exec, wait};
use crate::files::{PlanWriter, WriteOptions};
use crate::interrupt::Interrupt;
use crate::predicted::PredictedTimes;
use crate::request::PlanningRequest;
use hpp_graph::PartitionGraph;
use hpp_io::WorkDir;
use hpp_model::Analysis;
use hpp_schema::{DiskTelemetry, Plan, Provider, TokenTelemetry};
use serde::Deserialize;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Interval at which a running child and the interrupt flag are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Measured times of a plan.
#[derive(Clone, Debug)]
pub struct BenchResult {
    /// Of the whole plan.
    pub times: PredictedTimes,
    /// Each partition's part of them, in the order of the placement.
    pub stages: Vec<StageTimes>,
    /// All copies of a run, milliseconds.
    pub transfer_ms: f64,
    /// Tokens decoded in a run, without the first one.
    pub decoded: f64,
    /// Weights read from disk in the last run, if any were.
    pub reads: Option<MeasuredReads>,
    /// Percent of the machine's CPU time that other processes took, if so much that it disturbs.
    pub others_cpu_percent: Option<u64>,
}

/// Weights that a run read from disk, prompt included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredReads {
    /// Their rate while they were in progress, bytes per millisecond.
    pub bytes_per_ms: f64,
    /// The part of a decoded token's time in which they were in progress, milliseconds.
    pub busy_ms: f64,
    /// A decoded token's time outside of partitions, copies and waits for reads, milliseconds.
    pub rest_ms: f64,
}

/// Times of one partition, milliseconds.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct StageTimes {
    /// In all passes of the prompt.
    pub prefill_ms: f64,
    /// Per generated token.
    #[serde(rename = "decode_ms_per_token")]
    pub decode_ms: f64,
}

/// The fields of `hpp-exec bench --json` that `--refine` uses.
#[derive(Debug, Deserialize)]
struct BenchReport {
    time_to_first_token_ms: Spread,
    decode_tokens_per_second: Option<Spread>,
    transfer_ms: Spread,
    stages: Vec<BenchStage>,
    token: Option<TokenTelemetry>,
    disk: Option<DiskTelemetry>,
    others_cpu_percent: Option<u64>,
}

impl BenchReport {
    fn reads(&self) -> Option<MeasuredReads> {
        let (token, disk) = (self.token?, self.disk?);
        let reads = MeasuredReads {
            bytes_per_ms: disk.gb_per_second * 1e6,
            busy_ms: token.disk?.busy_ms,
            rest_ms: token.rest_ms,
        };
        (reads.bytes_per_ms > 0.0).then_some(reads)
    }
}

/// A partition's device and times.
#[derive(Debug, Deserialize)]
struct BenchStage {
    partition: String,
    /// Its device in the plan.
    device: String,
    /// The execution provider that ran it.
    provider: String,
    #[serde(flatten)]
    times: StageTimes,
}

#[derive(Debug, Deserialize)]
struct Spread {
    median: f64,
}

/// Runs plans with `hpp-exec bench`.
pub struct BenchRunner {
    exec: PathBuf,
    prompt: u64,
    tokens: u64,
    /// Removed with its contents on drop.
    dir: WorkDir,
    interrupt: Interrupt,
}

impl BenchRunner {
    /// Creates a work directory beside `target`, the directory that the chosen plan will go to.
    pub fn new(request: &PlanningRequest, tokens: u64, target: &Path) -> Result<Self, SplitError> {
        let failed = |source| RefineError::Run { path: PathBuf::from("hpp-split"), source };
        let interrupt = Interrupt::install().map_err(failed)?;
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| SplitError::Io { action: "create a directory beside", path, source }
        };
        let absolute = std::path::absolute(target).map_err(io(target))?;
        let parent = absolute.parent().unwrap_or(&absolute);
        fs::create_dir_all(parent).map_err(io(parent))?;
        let name = absolute.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let dir = WorkDir::new(parent, &format!(".{name}.refine-")).map_err(io(parent))?;
        // The last new token is not fed back, so a run takes one token of context less than prompt + tokens.
        let max_prompt = (request.scenario.context + 1).saturating_sub(tokens);
        let prompt = request.scenario.prompt.min(max_prompt).max(1);
        let exec = find_exec().map_err(RefineError::from)?;
        Ok(BenchRunner { exec, prompt, tokens, dir, interrupt })
    }

    /// Writes the plan, runs it, runs it again if other processes disturbed the run, and removes it. The less disturbed run
    /// counts.
    pub fn run(
        &self,
        args: &SplitArgs,
        analysis: &Analysis,
        parts: &[PartitionGraph],
        plan: Plan,
    ) -> Result<BenchResult, SplitError> {
        let target = self.dir.path().join("plan");
        let options = WriteOptions { movable: args.movable, ..WriteOptions::default() };
        let has_experts: Vec<bool> = plan.partitions.iter().map(|partition| partition.experts.is_some()).collect();
        PlanWriter::begin(options, analysis, None, &target)?.finish(parts, plan)?;
        let result = match self.interrupt.is_requested() {
            true => Err(RefineError::Interrupted),
            false => least_disturbed(|| self.bench(args, &target)),
        };
        let remove_failed = |source| SplitError::Io { action: "remove", path: target.clone(), source };
        fs::remove_dir_all(&target).map_err(remove_failed)?;
        let result = result?;
        Ok(BenchResult { stages: joined(&result.stages, &has_experts), ..result })
    }

    fn bench(&self, args: &SplitArgs, plan: &Path) -> Result<BenchResult, RefineError> {
        let failed = |source| RefineError::Run { path: self.exec.clone(), source };
        let (out, err) = (self.dir.path().join("stdout"), self.dir.path().join("stderr"));
        let context = args.context.map(|context| ["--context".to_owned(), context.to_string()]);
        let child = Command::new(&self.exec)
            .arg("bench")
            .arg(plan)
            .args(["--json", "--runs", "3"])
            .args(["--prompt-tokens".to_owned(), self.prompt.to_string()])
            .args(["--new-tokens".to_owned(), self.tokens.to_string()])
            .args(context.into_iter().flatten())
            .stdin(Stdio::null())
            .stdout(File::create(&out).map_err(failed)?)
            .stderr(File::create(&err).map_err(failed)?)
            .spawn()
            .map_err(failed)?;
        let cancelled = || self.interrupt.is_requested();
        let status = wait(child, POLL_INTERVAL, cancelled).map_err(failed)?.ok_or(RefineError::Interrupted)?;
        if !status.success() {
            let stderr = fs::read_to_string(&err).unwrap_or_default();
            return Err(RefineError::Failed(stderr.trim().to_owned()));
        }
        parse(&fs::read_to_string(&out).map_err(failed)?, self.tokens)
    }
}

/// A measurement, or the less disturbed one of two where other processes disturbed the first.
fn least_disturbed(bench: impl Fn() -> Result<BenchResult, RefineError>) -> Result<BenchResult, RefineError> {
    let first = bench()?;
    let Some(percent) = first.others_cpu_percent else { return Ok(first) };
    tell!("running this plan again: other processes took {percent} % of the CPU time");
    let second = match bench() {
        Err(RefineError::Interrupted) => return Err(RefineError::Interrupted),
        // The first run was disturbed, but it is a measurement.
        Err(_) => return Ok(first),
        Ok(second) => second,
    };
    // `None` (not disturbed) is less than any share.
    Ok(if second.others_cpu_percent < first.others_cpu_percent { second } else { first })
}

/// The measurement of a run of `tokens` new tokens. Refuses one in which the CPU ran a partition that the plan has on a
/// GPU: its times are not those of the planned device.
fn parse(text: &str, tokens: u64) -> Result<BenchResult, RefineError> {
    let report: BenchReport = serde_json::from_str(text).map_err(|error| RefineError::Output(error.to_string()))?;
    let on_cpu = |stage: &&BenchStage| stage.device != "cpu" && stage.provider == Provider::CPU.name();
    if let Some(BenchStage { partition, device, .. }) = report.stages.iter().find(on_cpu) {
        return Err(RefineError::OtherDevice { partition: partition.clone(), device: device.clone() });
    }
    let reads = report.reads();
    let rate = report.decode_tokens_per_second.map(|spread| spread.median).filter(|rate| *rate > 0.0);
    let rate = rate.ok_or_else(|| RefineError::Output("it decoded no tokens".to_owned()))?;
    Ok(BenchResult {
        times: PredictedTimes { decode_ms: 1e3 / rate, prefill_ms: report.time_to_first_token_ms.median },
        stages: report.stages.into_iter().map(|stage| stage.times).collect(),
        transfer_ms: report.transfer_ms.median,
        decoded: tokens.saturating_sub(1) as f64,
        reads,
        others_cpu_percent: report.others_cpu_percent,
    })
}

/// Adds the times of a partition that begins with experts to those of the partition before, which is the other half of its block.
fn joined(stages: &[StageTimes], has_experts: &[bool]) -> Vec<StageTimes> {
    let mut joined: Vec<StageTimes> = Vec::with_capacity(stages.len());
    for (times, has_experts) in stages.iter().zip(has_experts) {
        match joined.last_mut().filter(|_| *has_experts) {
            Some(before) => {
                before.prefill_ms += times.prefill_ms;
                before.decode_ms += times.decode_ms;
            }
            None => joined.push(*times),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn report(provider: &str) -> String {
        let spread = |ms: f64| serde_json::json!({ "median": ms });
        let stage = |partition: &str, device: &str, provider: &str| {
            serde_json::json!({
                "partition": partition, "device": device, "provider": provider, "prefill_ms": 3.0, "decode_ms_per_token": 1.5
            })
        };
        serde_json::json!({
            "time_to_first_token_ms": spread(4.0),
            "decode_tokens_per_second": spread(500.0),
            "transfer_ms": spread(0.1),
            "stages": [stage("cpu_0", "cpu", "CPU"), stage("gpu0_1", "gpu0", provider)],
        })
        .to_string()
    }

    #[test]
    fn a_measurement_of_the_planned_devices_is_read() {
        let result = parse(&report("WebGPU"), 8).unwrap();
        assert_eq!((result.times.decode_ms, result.stages.len(), result.stages[1].decode_ms), (2.0, 2, 1.5));
        assert_eq!(result.reads, None);
        let mut reading: serde_json::Value = serde_json::from_str(&report("WebGPU")).unwrap();
        reading["token"] = serde_json::json!({ "rest_ms": 0.25, "disk": { "busy_ms": 1.25 } });
        reading["disk"] = serde_json::json!({ "gb_per_second": 2.0 });
        let result = parse(&reading.to_string(), 8).unwrap();
        assert_eq!(result.reads, Some(MeasuredReads { bytes_per_ms: 2e6, busy_ms: 1.25, rest_ms: 0.25 }));
    }

    #[test]
    fn a_disturbed_run_is_repeated_once() {
        let kept = |shares: &[Option<u64>]| {
            let runs = Cell::new(0);
            let bench = || {
                let others_cpu_percent = shares[runs.get()];
                runs.set(runs.get() + 1);
                parse(&report("WebGPU"), 8).map(|result| BenchResult { others_cpu_percent, ..result })
            };
            (least_disturbed(bench).unwrap().others_cpu_percent, runs.get())
        };
        assert_eq!(kept(&[None]), (None, 1));
        assert_eq!(kept(&[Some(40), None]), (None, 2));
        assert_eq!(kept(&[Some(40), Some(20)]), (Some(20), 2));
        assert_eq!(kept(&[Some(20), Some(40)]), (Some(20), 2));
    }

    #[test]
    fn times_of_the_cpu_are_not_taken_for_those_of_a_gpu() {
        let error = parse(&report("CPU"), 8).unwrap_err().to_string();
        assert!(error.contains("gpu0_1") && error.contains("planned for gpu0"), "{error}");
    }
}
