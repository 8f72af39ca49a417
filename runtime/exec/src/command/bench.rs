//! `hpp-exec bench PLAN`: medians of a few runs on made-up tokens, for the plan or the unsplit model.

use super::{Around, Feeds, context, load_session, needs_language_model};
use crate::cli::BenchArgs;
use crate::error::ExecError;
use crate::inputs::made_up_tokens;
use crate::interrupt::Interrupt;
use crate::machine::OrtBackend;
use crate::plan_file::PlanFile;
use crate::report::{Bytes, StageTimes, memory, millis, rate, table};
use crate::sampling::{SamplingError, greedy};
use crate::session::Session;
use crate::stdout::{show, show_json};
use hpp_engine::Telemetry;
use hpp_schema::{ByteSize, Whole};
use serde::Serialize;
use std::fmt::Write;
use std::time::Instant;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    unsplit: bool,
    partitions: usize,
    prompt_tokens: u64,
    new_tokens: u64,
    runs: u32,
    load_ms: f64,
    time_to_first_token_ms: Spread,
    prefill_tokens_per_second: Spread,
    decode_tokens_per_second: Option<Spread>,
    transfers_per_run: f64,
    transfer_ms: Spread,
    transferred_bytes_per_run: f64,
    stages: Vec<StageTimes>,
    bytes: Bytes,
}

/// Several measurements of one thing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

/// One measured run.
struct Run {
    first_token_ms: f64,
    decode_ms: f64,
    telemetry: Telemetry,
}

/// Loads, warms up, measures, prints.
pub fn run(args: &BenchArgs, around: &mut Around<'_>) -> Result<u8, ExecError> {
    let plan = PlanFile::open(&args.plan)?;
    needs_language_model(&plan.plan)?;
    check_room(args, context(&plan.plan, &args.runtime))?;
    let which = if args.unsplit { plan.plan.unsplit(Whole::Source) } else { None }.unwrap_or_else(|| plan.plan.clone());
    let feeds = Feeds::open(&plan, args.embeddings.as_deref())?;
    let mut session = load_session(&which, &plan.dir, &args.runtime, feeds, around.console)?;
    let prompt = made_up_tokens(args.prompt_tokens, plan.plan.model.vocab_size, 0);

    measure(&mut session, &prompt, args.new_tokens)?;
    let mut runs = Vec::new();
    for number in 1..=args.runs {
        let run = measure(&mut session, &prompt, args.new_tokens)?;
        around.console.detail(&format!("run {number}: first token after {:.1} ms", run.first_token_ms));
        runs.push(run);
    }
    let report = report(args, &plan, which.partitions.len(), &runs, &mut session);
    if args.json {
        show_json(around.out, &report)?
    } else {
        show(around.out, &text(&report))?
    }
    Ok(0)
}

fn check_room(args: &BenchArgs, context: u64) -> Result<(), ExecError> {
    let tokens = args.prompt_tokens.saturating_add(args.new_tokens - 1);
    if tokens <= context {
        return Ok(());
    }
    Err(ExecError::Usage {
        message: format!(
            "{} prompt and {} new tokens do not fit a context of {context}",
            args.prompt_tokens, args.new_tokens
        ),
        hint: "ask for fewer with --prompt-tokens and --new-tokens, or for more with --context".to_owned(),
    })
}

fn measure(session: &mut Session<OrtBackend>, prompt: &[u32], new_tokens: u64) -> Result<Run, ExecError> {
    session.reset();
    session.engine().reset_telemetry();
    let started = Instant::now();
    session.begin(prompt, &Interrupt::never())?;
    let mut token = next(session)?;
    let first_token_ms = millis(started.elapsed());
    let decoding = Instant::now();
    for _ in 1..new_tokens {
        session.feed(&[token])?;
        token = next(session)?;
    }
    Ok(Run { first_token_ms, decode_ms: millis(decoding.elapsed()), telemetry: session.engine().telemetry() })
}

fn next(session: &Session<OrtBackend>) -> Result<u32, SamplingError> {
    greedy(session.scores()).ok_or(SamplingError::NoCandidate { count: session.scores().len() })
}

fn report(
    args: &BenchArgs,
    plan: &PlanFile,
    partitions: usize,
    runs: &[Run],
    session: &mut Session<OrtBackend>,
) -> Report {
    let of = |value: &dyn Fn(&Run) -> f64| Spread::of(runs.iter().map(value).collect());
    let telemetry = session.engine().telemetry();
    let decoded = (args.new_tokens - 1) as f64;
    Report {
        model: plan.plan.model.name.clone(),
        unsplit: args.unsplit,
        partitions,
        prompt_tokens: args.prompt_tokens,
        new_tokens: args.new_tokens,
        runs: args.runs,
        load_ms: millis(telemetry.load),
        time_to_first_token_ms: of(&|run| run.first_token_ms),
        prefill_tokens_per_second: of(&|run| args.prompt_tokens as f64 / run.first_token_ms * 1e3),
        decode_tokens_per_second: (decoded > 0.0).then(|| of(&|run| decoded / run.decode_ms * 1e3)),
        transfers_per_run: of(&|run| run.telemetry.copies.count as f64).median,
        transfer_ms: of(&|run| run.telemetry.copies.millis()),
        transferred_bytes_per_run: of(&|run| run.telemetry.copied_bytes as f64).median,
        stages: stages(runs),
        bytes: Bytes::new(&telemetry, session.state_bytes()),
    }
}

/// Each stage's medians.
fn stages(runs: &[Run]) -> Vec<StageTimes> {
    let Some(first) = runs.first() else { return vec![] };
    let median = |value: &dyn Fn(&Run) -> f64| Spread::of(runs.iter().map(value).collect()).median;
    let stage = |(at, stage): (usize, &hpp_engine::StageTelemetry)| StageTimes {
        prefill_ms: median(&|run| run.telemetry.stages[at].prefill.millis()),
        decode_ms_per_token: median(&|run| run.telemetry.stages[at].decode.millis_each()),
        ..StageTimes::new(stage)
    };
    first.telemetry.stages.iter().enumerate().map(stage).collect()
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = match values.len() {
            0 => 0.0,
            n if n % 2 == 0 => f64::midpoint(values[middle - 1], values[middle]),
            _ => values[middle],
        };
        Self { median, min: values.first().copied().unwrap_or(0.0), max: values.last().copied().unwrap_or(0.0) }
    }
}

fn text(report: &Report) -> String {
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
    rows.extend(report.decode_tokens_per_second.as_ref().map(|spread| row("decode, tokens/s", spread)));
    rows.push(row("transfers, ms", &report.transfer_ms));
    out.push_str(&table(&["", "", "median", "least", "most"], rows));
    let stage = |s: &StageTimes| {
        let on = format!("{} ({})", s.provider, s.processor);
        vec![s.partition.clone(), on, format!("{:.1}", s.prefill_ms), format!("{:.2}", s.decode_ms_per_token)]
    };
    let _ = write!(
        out,
        "\n{}",
        table(&["stage", "runs on", "prefill ms", "decode ms/token"], report.stages.iter().map(stage))
    );
    let moved = ByteSize(report.transferred_bytes_per_run as u64).human();
    let _ = writeln!(out, "\ntransfers: {:.0} a run, {moved}", report.transfers_per_run);
    let _ = writeln!(out, "load {} ms", rate(Some(report.load_ms)));
    let _ = writeln!(out, "memory: {}", memory(&report.bytes));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of(vec![4.0, 1.0, 2.0, 3.0]).median, 2.5);
        assert_eq!(Spread::of(vec![]).median, 0.0);
    }
}
