//! What a bench says: one JSON object for programs, two tables for people.

use super::Run;
use super::links::Link;
use super::spread::Spread;
use super::tokens::Token;
use crate::cli::BenchArgs;
use crate::disk::{self, DiskReads};
use crate::machine::OrtBackend;
use crate::numbers::{counted, figures};
use crate::plan_file::PlanFile;
use crate::report::{Bytes, StageTimes, memory, millis, table};
use crate::session::Session;
use crate::streaming::{self, Streaming};
use hpp_engine::Telemetry;
use hpp_schema::{ByteSize, SpanKind};
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
    /// Decoded tokens taken apart: each number's median over all of them.
    token: Option<Token>,
    /// Those of the last run, one by one.
    tokens: Vec<Token>,
    transfers_per_run: f64,
    transfer_ms: Spread,
    transferred_bytes_per_run: f64,
    /// Reading weights from disk in the last run; absent where all are in memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<DiskReads>,
    /// Weights streamed to devices in the last run; absent where none were.
    #[serde(skip_serializing_if = "Option::is_none")]
    streaming: Option<Streaming>,
    /// How fast weights came in the last run's decoded tokens, against each way by itself.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
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
    let tokens: Vec<Token> = runs.iter().flat_map(|run| run.tokens.clone()).collect();
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
        decode_ms_per_token: when_decoding(&|| of(&|run| Spread::of(run.tokens.iter().map(|token| token.ms)).median)),
        decode_tokens_per_second: when_decoding(&|| {
            of(&|run| decoded as f64 / run.tokens.iter().map(|token| token.ms).sum::<f64>() * 1e3)
        }),
        token: Token::median(&tokens),
        tokens: runs.last().map_or(vec![], |run| run.tokens.clone()),
        transfers_per_run: of(&|run| run.telemetry.copies.count as f64).median,
        transfer_ms: of(&|run| run.telemetry.copies.millis()),
        transferred_bytes_per_run: of(&|run| run.telemetry.copied_bytes as f64).median,
        disk: runs.last().and_then(|run| DiskReads::new(&run.telemetry)),
        streaming: runs.last().and_then(|run| Streaming::new(&run.telemetry)),
        links: vec![],
        stages: stages(runs),
        bytes: Bytes::new(&telemetry, session.state_bytes()),
    }
}

/// Milliseconds of each stage in each token a run decoded, its last passes.
fn decoding(run: &Run) -> Vec<Vec<f64>> {
    let last = run.telemetry.prefill.count + run.telemetry.decode.count;
    let first = last.saturating_sub(run.tokens.len() as u64);
    let mut tokens = vec![vec![0.0; run.telemetry.stages.len()]; run.tokens.len()];
    for span in run.timeline.spans.iter().filter(|span| span.kind == SpanKind::Compute && span.pass >= first) {
        let stage =
            run.telemetry.stages.iter().position(|stage| stage.partition == span.name && stage.lane() == span.lane);
        if let (Some(stage), Some(token)) = (stage, tokens.get_mut((span.pass - first) as usize)) {
            token[stage] += span.duration_us / 1e3;
        }
    }
    tokens
}

/// Each stage's medians.
fn stages(runs: &[Run]) -> Vec<Stage> {
    let Some(first) = runs.first() else { return vec![] };
    let tokens: Vec<Vec<f64>> = runs.iter().flat_map(decoding).collect();
    let median = |value: &dyn Fn(&Telemetry) -> f64| Spread::of(runs.iter().map(|run| value(&run.telemetry))).median;
    let stage = |(at, stage): (usize, &hpp_engine::StageTelemetry)| Stage {
        times: StageTimes {
            prefill_ms: median(&|telemetry| telemetry.stages[at].prefill.millis()),
            decode_ms_per_token: median(&|telemetry| telemetry.stages[at].decode.millis_each()),
            ..StageTimes::new(stage)
        },
        decode_ms_median: (!tokens.is_empty()).then(|| Spread::of(tokens.iter().map(|token| token[at])).median),
    };
    first.telemetry.stages.iter().enumerate().map(stage).collect()
}

/// The report for people.
pub(super) fn text(report: &Report) -> String {
    let what = if report.unsplit { "unsplit".to_owned() } else { counted(report.partitions as u64, "partition") };
    let mut out = format!(
        "{} ({what}): {}, {}, median of {}\n\n",
        report.model,
        counted(report.prompt_tokens, "prompt token"),
        counted(report.new_tokens, "new token"),
        counted(report.runs.into(), "run")
    );
    let row = |name: &str, spread: &Spread| {
        let cells = [spread.median, spread.min, spread.max].map(figures);
        [vec![name.to_owned(), String::new()], cells.to_vec()].concat()
    };
    let mut rows = vec![
        row("time to first token, ms", &report.time_to_first_token_ms),
        row("prefill, tokens/s", &report.prefill_tokens_per_second),
    ];
    rows.extend(report.decode_ms_per_token.as_ref().map(|spread| row("decode, ms/token (median)", spread)));
    rows.extend(report.decode_tokens_per_second.as_ref().map(|spread| row("decode, tokens/s (mean)", spread)));
    rows.push(row("transfers, ms", &report.transfer_ms));
    out.push_str(&table(&["", "", "median", "least", "most"], rows));
    let stage = |stage: &Stage| {
        let times = &stage.times;
        let decode = stage.decode_ms_median.map_or("-".to_owned(), figures);
        let on = format!("{} ({})", times.provider, times.processor);
        vec![times.partition.clone(), on, figures(times.prefill_ms), decode]
    };
    let _ = write!(
        out,
        "\n{}",
        table(&["stage", "runs on", "prefill ms", "decode ms/token"], report.stages.iter().map(stage))
    );
    let moved = ByteSize(report.transferred_bytes_per_run as u64).human();
    let _ = writeln!(out, "\ntransfers: {:.0} a run, {moved}", report.transfers_per_run);
    out.push_str(&report.token.as_ref().map(Token::line).unwrap_or_default());
    out.push_str(&disk::line(report.disk.as_ref()));
    out.push_str(&streaming::line(report.streaming.as_ref()));
    report.links.iter().for_each(|link| out.push_str(&link.line()));
    let _ = writeln!(out, "load {} ms", figures(report.load_ms));
    let _ = writeln!(out, "memory: {}", memory(&report.bytes));
    out
}
