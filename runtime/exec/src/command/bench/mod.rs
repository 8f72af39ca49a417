//! `hpp-exec bench PLAN`: measures a few runs of the plan, or of the unsplit model, on random tokens.

mod report;
mod spread;
mod token_times;
mod weight_paths;

use super::trace::TraceFile;
use super::unsplit::unsplit;
use super::{CommandContext, context_length, load_sequence, open_embeddings};
use crate::cli::{AdaptArg, BenchArgs};
use crate::console::Console;
use crate::error::ExecError;
use crate::inputs::random_tokens;
use crate::numbers::{counted, millis};
use crate::other_load::{OtherLoad, busy_note};
use crate::runtime::{OnnxRuntime, OrtBackend};
use hpp_engine::Telemetry;
use hpp_generate::sampling::greedy;
use hpp_generate::text::TextTokenizer;
use hpp_generate::{ModelInputs, PlanFile, PromptEncoder, SingleSequence, check_language_model};
use hpp_io::{show, show_json};
use hpp_schema::{Timeline, Whole, error_line};
use report::{BenchReport, add_stage_times, report, text};
use std::time::Instant;
use token_times::TokenTimes;
use weight_paths::weight_paths;

/// One measured run.
struct BenchRun {
    first_token_ms: f64,
    /// Times of each token after the first.
    tokens: Vec<TokenTimes>,
    telemetry: Telemetry,
    /// Milliseconds of each stage in each token of `tokens`, `[token][stage]`.
    stages: Vec<Vec<f64>>,
}

/// Loads the plan, warms up, measures and prints.
pub fn run(args: &BenchArgs, ctx: &mut CommandContext<'_>) -> Result<u8, ExecError> {
    if args.runtime.adapt == AdaptArg::Devices {
        ctx.console.warn("--adapt has no effect: bench runs the plan as it is");
    }
    let plan = PlanFile::open(&args.plan)?;
    check_language_model(&plan.plan)?;
    let room = PromptRoom {
        predicted: plan.plan.predictions.prompt_tokens,
        context: context_length(&plan, &args.runtime),
        longest_context: plan.plan.model.context_length,
    };
    let prompt_tokens = prompt_tokens(args, room)?;
    let trace = TraceFile::create(args.trace.as_deref())?;
    let which = if args.unsplit { unsplit(&plan, Whole::Source)? } else { None }.unwrap_or_else(|| plan.plan.clone());
    if which.draft.is_some() {
        ctx.console.info("note: bench decodes without the plan's draft; hpp-exec PLAN and serve draft with it");
    }
    // Held until the end: a run that generates text also has the tokenizer in memory, which leaves less memory for weights.
    let _tokenizer = tokenizer(&plan, ctx.console);
    let embeddings = open_embeddings(&plan.plan, args.embeddings.as_deref())?;
    let inputs = ModelInputs { embeddings, ..ModelInputs::default() };
    let mut sequence = load_sequence(&which, &plan.dir, &args.runtime, inputs, ctx.console, ctx.interrupt)?;
    let prompt = random_tokens(prompt_tokens, plan.plan.model.vocab_size, 0);

    if !args.no_warmup {
        ctx.console.working("warm-up run");
        measure(&mut sequence, &prompt, args.new_tokens, false)?;
    }
    let other_load = OtherLoad::start();
    let mut runs = Vec::new();
    let mut last_timeline = None;
    for number in 1..=args.runs {
        ctx.console.working(format!("run {number} of {}", args.runs));
        // Only the timeline of the last run is written.
        let keeps_timeline = trace.is_some() && number == args.runs;
        let (run, timeline) = measure(&mut sequence, &prompt, args.new_tokens, keeps_timeline)?;
        last_timeline = keeps_timeline.then_some(timeline);
        tracing::info!(number, first_token_ms = run.first_token_ms, "run measured");
        runs.push(run);
    }
    ctx.console.idle();
    let others_cpu_percent = other_load.disturbing_percent();
    if let Some(percent) = others_cpu_percent {
        ctx.console.info(&format!("note: {}", busy_note(percent)));
    }
    if let (Some(file), Some(timeline)) = (trace, last_timeline) {
        file.write(&timeline)?;
    }
    let mut report: BenchReport = report(args, prompt_tokens, &plan, which.partitions.len(), &runs, &mut sequence);
    report.others_cpu_percent = others_cpu_percent;
    // Unloads the plan, so that the paths of weights are measured alone.
    drop(sequence);
    if let Some(last) = runs.last() {
        let runtime = OnnxRuntime::open_for(&plan.plan, &args.runtime, ctx.console)?;
        report.links = weight_paths(&runtime, &plan, &last.telemetry, &last.tokens);
    }
    if args.json {
        show_json(ctx.out, &report)?
    } else {
        show(ctx.out, &text(&report))?
    }
    Ok(0)
}

/// The plan's tokenizer. It is loaded only for the memory that it takes, so one that cannot be read is a warning.
fn tokenizer(plan: &PlanFile, console: &Console) -> Option<TextTokenizer> {
    match PromptEncoder::open(plan, false) {
        Ok(encoder) => encoder.tokenizer,
        Err(error) => {
            console.warn(&format!("{}: measuring without a tokenizer in memory", error_line(&error)));
            None
        }
    }
}

/// What decides the length of the prompt, in tokens.
#[derive(Clone, Copy)]
struct PromptRoom {
    /// Prompt tokens that the plan predicts times for.
    predicted: u64,
    context: u64,
    /// The longest context that the model was built for, if it says so.
    longest_context: Option<u64>,
}

/// Tokens of the prompt: by default as many as the plan predicts times for. The prompt and the new tokens must fit the context.
fn prompt_tokens(args: &BenchArgs, room: PromptRoom) -> Result<u64, ExecError> {
    let PromptRoom { predicted, context, longest_context } = room;
    let most = (context + 1).saturating_sub(args.new_tokens);
    let wanted = args.prompt_tokens.unwrap_or(predicted.min(most).max(1));
    if wanted <= most {
        return Ok(wanted);
    }
    let is_longest = longest_context.is_some_and(|longest| longest <= context);
    let more = if is_longest { "" } else { ", or for more with --context" };
    Err(ExecError::Usage {
        message: format!(
            "{} and {} do not fit a context of {context}",
            counted(wanted, "prompt token"),
            counted(args.new_tokens, "new token")
        ),
        hint: format!("ask for fewer with --prompt-tokens and --new-tokens{more}"),
    })
}

/// Measures one run. With `keeps_timeline` also returns its timeline, which takes megabytes for a few hundred tokens of many partitions;
/// otherwise the spans of each token are dropped after it.
fn measure(
    sequence: &mut SingleSequence<OrtBackend>,
    prompt: &[u32],
    new_tokens: u64,
    keeps_timeline: bool,
) -> Result<(BenchRun, Timeline), ExecError> {
    sequence.clear();
    sequence.engine().reset_telemetry();
    sequence.engine().record_timeline(true);
    let started = Instant::now();
    sequence.prefill(prompt, &|| false)?;
    let mut token = greedy(sequence.logits())?;
    let first_token_ms = millis(started.elapsed());
    let Telemetry { stages: stages_of_plan, prefill, decode, .. } = sequence.engine().telemetry();
    let first_pass = prefill.count + decode.count;
    let mut stages = vec![vec![0.0; stages_of_plan.len()]; new_tokens.saturating_sub(1) as usize];
    let mut tokens = Vec::new();
    let mut spans = sequence.engine().take_timeline();
    for _ in 1..new_tokens {
        if !keeps_timeline {
            spans.clear();
        }
        let started = Instant::now();
        sequence.feed(&[token])?;
        token = greedy(sequence.logits())?;
        tokens.push(TokenTimes::new(millis(started.elapsed()), sequence.engine().last_pass()));
        let of_token = sequence.engine().take_timeline();
        add_stage_times(&mut stages, &stages_of_plan, first_pass, &of_token);
        spans.extend(of_token);
    }
    let telemetry = sequence.engine().telemetry();
    Ok((BenchRun { first_token_ms, tokens, telemetry, stages }, Timeline::ordered(spans)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    #[test]
    fn the_prompt_fits_the_context_unless_its_length_is_given() {
        let tokens = |line: &str, context: u64, longest_context: Option<u64>| {
            let cli = Cli::parse_from(["hpp-exec", "bench", "plan"].into_iter().chain(line.split_whitespace()));
            let Some(Command::Bench(args)) = cli.command else { panic!("{line}") };
            prompt_tokens(&args, PromptRoom { predicted: 384, context, longest_context })
        };
        assert_eq!(tokens("", 4096, None).unwrap(), 384);
        assert_eq!(tokens("", 256, Some(512)).unwrap(), 193);
        assert_eq!(tokens("-p 449", 512, None).unwrap(), 449);
        for (line, most, says) in [("-p 450", Some(512), false), ("-p 450", Some(600), true), ("-n 600", None, true)] {
            let hint = tokens(line, 512, most).unwrap_err().hint().unwrap();
            assert_eq!(hint.contains("--context"), says, "{line} {most:?}: {hint}");
        }
    }
}
