//! The result of a benchmark: JSON for programs, two tables for people.

use super::BenchRun;
use super::spread::Spread;
use super::token_times::TokenTimes;
use super::weight_paths::WeightPath;
use crate::cli::BenchArgs;
use crate::numbers::{counted, millis, significant};
use crate::report::disk::{self, DiskReads};
use crate::report::streaming::{self, Streaming};
use crate::report::{Bytes, StageTimes, memory, table};
use crate::runtime::OrtBackend;
use hpp_engine::{StageTelemetry, Telemetry};
use hpp_generate::{PlanFile, SingleSequence};
use hpp_schema::{ByteSize, Plan, Span, SpanKind};
use serde::Serialize;
use std::fmt::Write;

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
pub(super) struct BenchReport {
    model: String,
    unsplit: bool,
    partitions: usize,
    prompt_tokens: u64,
    new_tokens: u64,
    /// Mean number of tokens before a decoded token.
    decode_context: Option<f64>,
    /// Tokens of context.
    context: u64,
    runs: u32,
    /// Percent of the machine's CPU time that other processes took during the runs; absent if too little to disturb the measurement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub others_cpu_percent: Option<u64>,
    load_ms: f64,
    time_to_first_token_ms: Spread,
    /// The passes of the prompt, without allocating state and sampling.
    prefill_ms: Spread,
    /// Tokens of the prompt over the time to the first token, which includes allocating state and sampling.
    prefill_tokens_per_second: Spread,
    /// For each run, the median over its tokens after the first. In `stages` this field is the mean, and `decode_ms_median` the median.
    decode_ms_per_token: Option<Spread>,
    decode_tokens_per_second: Option<Spread>,
    /// Where the time of decoded tokens goes: the median of each field over all of them.
    token: Option<TokenTimes>,
    /// Each token of the last run.
    tokens: Vec<TokenTimes>,
    transfers_per_run: f64,
    transfer_ms: Spread,
    transferred_bytes_per_run: f64,
    /// Weights read from disk in the last run; absent if none were.
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<DiskReads>,
    /// Weights streamed to devices in the last run; absent if none were.
    #[serde(skip_serializing_if = "Option::is_none")]
    streaming: Option<Streaming>,
    /// Transfer rates of weights in the last run's decoded tokens, each compared with the bandwidth of its path measured alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<WeightPath>,
    stages: Vec<BenchStage>,
    bytes: Bytes,
}

/// Times of one partition, medians over runs. In each run, `prefill_ms` is the sum over the passes of the prompt, `decode_ms_per_token` the mean.
#[derive(Debug, Serialize)]
struct BenchStage {
    #[serde(flatten)]
    times: StageTimes,
    /// Labels of its blocks.
    blocks: Vec<String>,
    /// Median over all decoded tokens.
    decode_ms_median: Option<f64>,
}

/// Summarises the runs.
pub(super) fn report(
    args: &BenchArgs,
    prompt_tokens: u64,
    plan: &PlanFile,
    partitions: usize,
    runs: &[BenchRun],
    sequence: &mut SingleSequence<OrtBackend>,
) -> BenchReport {
    let over_runs = |value: &dyn Fn(&BenchRun) -> f64| Spread::of(runs.iter().map(value));
    let telemetry = sequence.engine().telemetry();
    let decoded = args.new_tokens - 1;
    let when_decoding = |spread: &dyn Fn() -> Spread| (decoded > 0).then(spread);
    let tokens: Vec<TokenTimes> = runs.iter().flat_map(|run| run.tokens.clone()).collect();
    BenchReport {
        model: plan.plan.model.name.clone(),
        unsplit: args.unsplit,
        partitions,
        prompt_tokens,
        new_tokens: args.new_tokens,
        decode_context: (decoded > 0).then(|| prompt_tokens as f64 + (decoded - 1) as f64 / 2.0),
        context: sequence.engine().context(),
        runs: args.runs,
        others_cpu_percent: None,
        load_ms: millis(telemetry.load),
        time_to_first_token_ms: over_runs(&|run| run.first_token_ms),
        prefill_ms: over_runs(&|run| run.telemetry.prefill.millis()),
        prefill_tokens_per_second: over_runs(&|run| prompt_tokens as f64 / run.first_token_ms * 1e3),
        decode_ms_per_token: when_decoding(&|| {
            over_runs(&|run| Spread::of(run.tokens.iter().map(|token| token.ms)).median)
        }),
        decode_tokens_per_second: when_decoding(&|| {
            over_runs(&|run| decoded as f64 / run.tokens.iter().map(|token| token.ms).sum::<f64>() * 1e3)
        }),
        token: TokenTimes::median(&tokens),
        tokens: runs.last().map_or(vec![], |run| run.tokens.clone()),
        transfers_per_run: over_runs(&|run| run.telemetry.copies.count as f64).median,
        transfer_ms: over_runs(&|run| run.telemetry.copies.millis()),
        transferred_bytes_per_run: over_runs(&|run| run.telemetry.copied_bytes as f64).median,
        disk: runs.last().and_then(|run| DiskReads::new(&run.telemetry)),
        streaming: runs.last().and_then(|run| Streaming::new(&run.telemetry)),
        links: vec![],
        stages: stages(&plan.plan, runs),
        bytes: Bytes::new(&telemetry, sequence.state_bytes()),
    }
}

/// Adds the milliseconds of each of `stages` to `times`, `[token][stage]`. Pass `first` computed the first of these tokens, each pass after it
/// one more.
pub(super) fn add_stage_times(times: &mut [Vec<f64>], stages: &[StageTelemetry], first: u64, spans: &[Span]) {
    for span in spans.iter().filter(|span| span.kind == SpanKind::Compute && span.pass >= first) {
        let stage = stages.iter().position(|stage| stage.partition == span.name && stage.track() == span.lane);
        if let (Some(stage), Some(token)) = (stage, times.get_mut((span.pass - first) as usize)) {
            token[stage] += span.duration_us / 1e3;
        }
    }
}

/// Milliseconds of a stage in the passes of the prompt. In a model without states each pass computes the whole text, and telemetry counts all passes
/// as prefill: the passes of later tokens are subtracted.
fn prefill_millis(run: &BenchRun, stage: usize) -> f64 {
    let all = run.telemetry.stages[stage].prefill.millis();
    let later = || run.stages.iter().map(|token| token[stage]).sum::<f64>();
    if run.telemetry.decode.count == 0 { all - later() } else { all }
}

/// The medians of each stage.
fn stages(plan: &Plan, runs: &[BenchRun]) -> Vec<BenchStage> {
    let Some(first) = runs.first() else { return vec![] };
    let tokens: Vec<&Vec<f64>> = runs.iter().flat_map(|run| &run.stages).collect();
    let median = |value: &dyn Fn(&Telemetry) -> f64| Spread::of(runs.iter().map(|run| value(&run.telemetry))).median;
    let stage = |(at, stage): (usize, &StageTelemetry)| BenchStage {
        times: StageTimes {
            prefill_ms: Spread::of(runs.iter().map(|run| prefill_millis(run, at))).median,
            decode_ms_per_token: median(&|telemetry| telemetry.stages[at].decode.millis_each()),
            ..StageTimes::new(stage)
        },
        blocks: plan
            .partitions
            .iter()
            .find(|partition| partition.name == stage.partition)
            .map_or(vec![], |partition| partition.blocks.clone()),
        decode_ms_median: (!tokens.is_empty()).then(|| Spread::of(tokens.iter().map(|token| token[at])).median),
    };
    first.telemetry.stages.iter().enumerate().map(stage).collect()
}

/// Ratio of mean to median token time from which on a note says that token times vary.
const UNEVEN: f64 = 1.5;

/// The tables for people.
pub(super) fn text(report: &BenchReport) -> String {
    let what = if report.unsplit { "unsplit".to_owned() } else { counted(report.partitions as u64, "partition") };
    let mut out = format!(
        "{} ({what}): {}, {}, median of {}\n\n",
        report.model,
        counted(report.prompt_tokens, "prompt token"),
        counted(report.new_tokens, "new token"),
        counted(report.runs.into(), "run")
    );
    let row = |name: &str, spread: &Spread| {
        let cells = [spread.median, spread.min, spread.max].map(significant);
        [vec![name.to_owned(), String::new()], cells.to_vec()].concat()
    };
    let mut rows = vec![
        row("time to first token, ms", &report.time_to_first_token_ms),
        row("prefill, tokens/s", &report.prefill_tokens_per_second),
    ];
    rows.extend(report.decode_ms_per_token.as_ref().map(|spread| row("decode, ms/token (median)", spread)));
    rows.extend(report.decode_tokens_per_second.as_ref().map(|spread| row("decode, tokens/s (mean)", spread)));
    rows.push(row("transfers, ms", &report.transfer_ms));
    out.push_str(&table(&["", "", "median", "min", "max"], rows));
    if let (Some(median), Some(mean)) = (&report.decode_ms_per_token, &report.decode_tokens_per_second)
        && mean.median * median.median < 1e3 / UNEVEN
    {
        out.push_str("note: some tokens took much longer than the median one, and the mean counts them (--json lists each): other programs, or the disk\n");
    }
    let stage = |stage: &BenchStage| {
        let times = &stage.times;
        let decode = stage.decode_ms_median.map_or("-".to_owned(), significant);
        let on = format!("{} ({})", times.provider, times.processor);
        vec![times.partition.clone(), on, significant(times.prefill_ms), decode]
    };
    let _ = write!(
        out,
        "\n{}",
        table(&["stage", "runs on", "prefill ms", "decode ms/token"], report.stages.iter().map(stage))
    );
    let moved = ByteSize(report.transferred_bytes_per_run as u64).human();
    let _ = writeln!(out, "\ntransfers: {:.0} a run, {moved}", report.transfers_per_run);
    out.push_str(&report.token.as_ref().map(TokenTimes::line).unwrap_or_default());
    out.push_str(&disk::line(report.disk.as_ref()));
    out.push_str(&streaming::line(report.streaming.as_ref()));
    report.links.iter().for_each(|link| out.push_str(&link.line()));
    let _ = writeln!(out, "load {} ms", significant(report.load_ms));
    let _ = writeln!(out, "memory: {}", memory(&report.bytes));
    out
}
