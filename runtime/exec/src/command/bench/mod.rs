//! `hpp-exec bench PLAN`: medians of a few runs on made-up tokens, for the plan or the unsplit model.

mod links;
mod report;
mod spread;
mod tokens;

use super::unsplit::unsplit;
use super::{Around, Feeds, context, load_session, needs_language_model};
use crate::busy::Busy;
use crate::cli::BenchArgs;
use crate::error::ExecError;
use crate::inputs::made_up_tokens;
use crate::interrupt::Interrupt;
use crate::machine::{Machine, OrtBackend};
use crate::numbers::counted;
use crate::plan_file::PlanFile;
use crate::report::millis;
use crate::sampling::{SamplingError, greedy};
use crate::session::Session;
use hpp_engine::Telemetry;
use hpp_io::{OutputFile, WriteError, show, show_json};
use hpp_schema::{Timeline, Whole};
use links::links;
use report::{Report, report, text};
use std::io::Write;
use std::path::Path;
use std::time::Instant;
use tokens::Token;

/// One measured run.
struct Run {
    first_token_ms: f64,
    /// Each token after the first, from its feeding to its choice.
    tokens: Vec<Token>,
    telemetry: Telemetry,
    timeline: Timeline,
}

/// Loads, warms up, measures, prints.
pub fn run(args: &BenchArgs, around: &mut Around<'_>) -> Result<u8, ExecError> {
    let plan = PlanFile::open(&args.plan)?;
    needs_language_model(&plan.plan)?;
    check_room(args, context(&plan.plan, &args.runtime))?;
    // Begun before anything is measured, so that a place that cannot be written is known at once.
    let trace = args.trace.as_deref().map(OutputFile::create).transpose()?;
    let which = if args.unsplit { unsplit(&plan, Whole::Source)? } else { None }.unwrap_or_else(|| plan.plan.clone());
    let feeds = Feeds::open(&plan, args.embeddings.as_deref())?;
    let mut session = load_session(&which, &plan.dir, &args.runtime, feeds, around.console, around.interrupt)?;
    let prompt = made_up_tokens(args.prompt_tokens, plan.plan.model.vocab_size, 0);

    if !args.no_warmup {
        around.console.working("warm-up run");
        measure(&mut session, &prompt, args.new_tokens)?;
    }
    let busy = Busy::begin();
    let mut runs = Vec::new();
    for number in 1..=args.runs {
        around.console.working(format!("run {number} of {}", args.runs));
        let run = measure(&mut session, &prompt, args.new_tokens)?;
        around.console.detail(&format!("run {number}: first token after {:.1} ms", run.first_token_ms));
        runs.push(run);
    }
    around.console.idle();
    if let Some(note) = busy.note() {
        around.console.say(&format!("note: {note}"));
    }
    if let (Some(file), Some(last)) = (trace, runs.last()) {
        write(file, args.trace.as_deref().unwrap_or(Path::new("")), &last.timeline)?;
    }
    let mut report: Report = report(args, &plan, which.partitions.len(), &runs, &mut session);
    // What is measured now is to have the machine for itself.
    drop(session);
    if let Some(last) = runs.last() {
        let machine = Machine::open_to_run(&plan.plan, &args.runtime, around.console)?;
        report.links = links(&machine, &plan, &last.telemetry, &last.tokens, around.console);
    }
    if args.json {
        show_json(around.out, &report)?
    } else {
        show(around.out, &text(&report))?
    }
    Ok(0)
}

fn write(mut file: OutputFile, path: &Path, timeline: &Timeline) -> Result<(), WriteError> {
    let failed = |source| WriteError { path: path.to_owned(), source };
    file.file().write_all(timeline.to_chrome_trace().as_bytes()).map_err(failed)?;
    file.finish()
}

fn check_room(args: &BenchArgs, context: u64) -> Result<(), ExecError> {
    let tokens = args.prompt_tokens.saturating_add(args.new_tokens - 1);
    if tokens <= context {
        return Ok(());
    }
    Err(ExecError::Usage {
        message: format!(
            "{} and {} do not fit a context of {context}",
            counted(args.prompt_tokens, "prompt token"),
            counted(args.new_tokens, "new token")
        ),
        hint: "ask for fewer with --prompt-tokens and --new-tokens, or for more with --context".to_owned(),
    })
}

fn measure(session: &mut Session<OrtBackend>, prompt: &[u32], new_tokens: u64) -> Result<Run, ExecError> {
    session.reset();
    session.engine().reset_telemetry();
    session.engine().record_timeline(true);
    let started = Instant::now();
    session.begin(prompt, &Interrupt::never())?;
    let mut token = next(session)?;
    let first_token_ms = millis(started.elapsed());
    let mut tokens = Vec::new();
    for _ in 1..new_tokens {
        let started = Instant::now();
        session.feed(&[token])?;
        token = next(session)?;
        tokens.push(Token::new(millis(started.elapsed()), session.engine().last_pass()));
    }
    let engine = session.engine();
    Ok(Run { first_token_ms, tokens, telemetry: engine.telemetry(), timeline: engine.timeline() })
}

fn next(session: &Session<OrtBackend>) -> Result<u32, SamplingError> {
    greedy(session.scores()).ok_or(SamplingError::NoCandidate { count: session.scores().len() })
}
