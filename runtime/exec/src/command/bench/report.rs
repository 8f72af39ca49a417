//! What a bench says: one JSON object for programs, two tables for people.

use super::Run;
use super::spread::Spread;
use crate::cli::BenchArgs;
use crate::disk::{self, DiskReads};
use crate::machine::OrtBackend;
use crate::plan_file::PlanFile;
use crate::report::{Bytes, StageTimes, memory, millis, rate, table};
use crate::session::Session;
use crate::streaming::{self, Streaming};
use hpp_engine::Telemetry;
use hpp_schema::{ByteSize, Span, SpanKind};
use serde::Serialize;
use std::fmt::Write;

/// What `--json` prints.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    model: String,
    unsplit: bool,
    partitions: usize,
    prompt_tokens: u64,
    new_tokens: u64,
    /// Tokens already there when a token was decoded, on average over the tokens decoded.
    decode_context: Option<f64>,
    /// Most tokens one text could have had.
    context: u64,
    runs: u32,
    load_ms: f64,
    time_to_first_token_ms: Spread,
    /// Passes of the prompt alone, without making room for a text and choosing a token.
    prefill_ms: Spread,
    prefill_tokens_per_second: Spread,
    /// Each run's median over its tokens after the first.
    decode_ms_per_token: Option<Spread>,
    decode_tokens_per_second: Option<Spread>,
    /// What of a decoded token no partition and no transfer accounts for: the median over all tokens.
    rest_ms_per_token: Option<f64>,
    transfers_per_run: f64,
    transfer_ms: Spread,
    transferred_bytes_per_run: f64,
    /// Reading weights from disk in the last run; absent where all are in memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<DiskReads>,
    /// Weights streamed to devices in the last run; absent where none were.
    #[serde(skip_serializing_if = "Option::is_none")]
    streaming: Option<Streaming>,
    stages: Vec<Stage>,
    bytes: Bytes,
}

/// One partition's part. `prefill_ms` and `decode_ms_per_token` are medians over runs of a run's sum and mean.
#[derive(Debug, Serialize)]
struct Stage {
    #[serde(flatten)]
    times: StageTimes,
    /// Median over all tokens decoded.
    decode_ms_median: Option<f64>,
}

/// Puts the runs together.
pub(super) fn report(
    args: &BenchArgs,
    plan: &PlanFile,
    partitions: usize,
    runs: &[Run],
    session: &mut Session<OrtBackend>,
) -> Report {
    let of = |value: &dyn Fn(&Run) -> f64| Spread::of(runs.iter().map(value));
    let telemetry = session.engine().telemetry();
    let decoded = args.new_tokens - 1;
    let when_decoding = |spread: &dyn Fn() -> Spread| (decoded > 0).then(spread);
    let tokens: Vec<Token> = runs.iter().flat_map(tokens).collect();
    Report {
        model: plan.plan.model.name.clone(),
        unsplit: args.unsplit,
        partitions,
        prompt_tokens: args.prompt_tokens,
        new_tokens: args.new_tokens,
        decode_context: (decoded > 0).then(|| args.prompt_tokens as f64 + (decoded - 1) as f64 / 2.0),
        context: session.engine().context(),
        runs: args.runs,
        load_ms: millis(telemetry.load),
        time_to_first_token_ms: of(&|run| run.first_token_ms),
        prefill_ms: of(&|run| run.telemetry.prefill.millis()),
        prefill_tokens_per_second: of(&|run| args.prompt_tokens as f64 / run.first_token_ms * 1e3),
        decode_ms_per_token: when_decoding(&|| of(&|run| Spread::of(run.token_ms.iter().copied()).median)),
        decode_tokens_per_second: when_decoding(&|| of(&|run| decoded as f64 / run.token_ms.iter().sum::<f64>() * 1e3)),
        rest_ms_per_token: (!tokens.is_empty()).then(|| Spread::of(tokens.iter().map(|token| token.rest_ms)).median),
        transfers_per_run: of(&|run| run.telemetry.copies.count as f64).median,
        transfer_ms: of(&|run| run.telemetry.copies.millis()),
        transferred_bytes_per_run: of(&|run| run.telemetry.copied_bytes as f64).median,
        disk: runs.last().and_then(|run| DiskReads::new(&run.telemetry)),
        streaming: runs.last().and_then(|run| Streaming::new(&run.telemetry)),
        stages: stages(runs, &tokens),
        bytes: Bytes::new(&telemetry, session.state_bytes()),
    }
}

/// The lane of what goes on beside everything else; waiting for it has spans of its own.
const DISK: &str = "disk";

/// A decoded token, taken apart.
struct Token {
    /// In the order of stages.
    stage_ms: Vec<f64>,
    rest_ms: f64,
}

/// The tokens a run decoded: its last passes.
fn tokens(run: &Run) -> Vec<Token> {
    let mut passes: Vec<Vec<&Span>> = Vec::new();
    for span in run.timeline.spans.iter().filter(|span| span.kind != SpanKind::Pass) {
        let pass = span.pass as usize;
        passes.resize_with(passes.len().max(pass + 1), Vec::new);
        passes[pass].push(span);
    }
    let prompt = passes.len().saturating_sub(run.token_ms.len());
    passes[prompt..].iter().zip(&run.token_ms).map(|(spans, whole)| token(run, spans, *whole)).collect()
}

fn token(run: &Run, spans: &[&Span], whole: f64) -> Token {
    let sum = |of: &dyn Fn(&Span) -> bool| {
        spans.iter().filter(|span| of(span)).map(|span| span.duration_us / 1e3).sum::<f64>()
    };
    let ran = |partition: &str| sum(&|span| span.kind == SpanKind::Compute && span.name == partition);
    let stage_ms = run.telemetry.stages.iter().map(|stage| ran(&stage.partition)).collect();
    Token { stage_ms, rest_ms: (whole - sum(&|span| span.lane != DISK)).max(0.0) }
}

/// Each stage's medians.
fn stages(runs: &[Run], tokens: &[Token]) -> Vec<Stage> {
    let Some(first) = runs.first() else { return vec![] };
    let median = |value: &dyn Fn(&Telemetry) -> f64| Spread::of(runs.iter().map(|run| value(&run.telemetry))).median;
    let stage = |(at, stage): (usize, &hpp_engine::StageTelemetry)| Stage {
        times: StageTimes {
            prefill_ms: median(&|telemetry| telemetry.stages[at].prefill.millis()),
            decode_ms_per_token: median(&|telemetry| telemetry.stages[at].decode.millis_each()),
            ..StageTimes::new(stage)
        },
        decode_ms_median: (!tokens.is_empty())
            .then(|| Spread::of(tokens.iter().map(|token| token.stage_ms[at])).median),
    };
    first.telemetry.stages.iter().enumerate().map(stage).collect()
}

/// The report for people.
pub(super) fn text(report: &Report) -> String {
    let what = if report.unsplit { "unsplit".to_owned() } else { format!("{} partitions", report.partitions) };
    let mut out = format!(
        "{} ({what}): {} prompt tokens, {} new tokens, median of {} runs\n\n",
        report.model, report.prompt_tokens, report.new_tokens, report.runs
    );
    let row = |name: &str, spread: &Spread| {
        let cells = [spread.median, spread.min, spread.max].map(|v| format!("{v:.1}"));
        [vec![name.to_owned(), String::new()], cells.to_vec()].concat()
    };
    let mut rows = vec![
        row("time to first token, ms", &report.time_to_first_token_ms),
        row("prefill, tokens/s", &report.prefill_tokens_per_second),
    ];
    rows.extend(report.decode_ms_per_token.as_ref().map(|spread| row("decode, ms/token", spread)));
    rows.extend(report.decode_tokens_per_second.as_ref().map(|spread| row("decode, tokens/s", spread)));
    rows.push(row("transfers, ms", &report.transfer_ms));
    out.push_str(&table(&["", "", "median", "least", "most"], rows));
    let stage = |stage: &Stage| {
        let times = &stage.times;
        let decode = stage.decode_ms_median.map_or("-".to_owned(), |ms| format!("{ms:.2}"));
        let on = format!("{} ({})", times.provider, times.processor);
        vec![times.partition.clone(), on, format!("{:.1}", times.prefill_ms), decode]
    };
    let _ = write!(
        out,
        "\n{}",
        table(&["stage", "runs on", "prefill ms", "decode ms/token"], report.stages.iter().map(stage))
    );
    let moved = ByteSize(report.transferred_bytes_per_run as u64).human();
    let _ = writeln!(out, "\ntransfers: {:.0} a run, {moved}", report.transfers_per_run);
    out.push_str(&disk::line(report.disk.as_ref()));
    out.push_str(&streaming::line(report.streaming.as_ref()));
    let _ = writeln!(out, "load {} ms", rate(Some(report.load_ms)));
    let _ = writeln!(out, "memory: {}", memory(&report.bytes));
    out
}
