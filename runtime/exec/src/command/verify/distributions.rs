//! `--kl`: compares the distributions of the next token of a plan with those of a reference, over a file of prompts. The reference may be another
//! model, such as the one before quantization.
//!
//! The two are loaded one after the other. The reference's logits wait in a temporary file: 4 bytes for each token of the
//! vocabulary and each position.

use super::divergence::{Quantiles, Report};
use super::{CommandContext, page};
use crate::cli::{AnswerArgs, VerifyArgs};
use crate::command::jobs::RequestMaker;
use crate::command::probe::{LogitsStore, each_row, kl};
use crate::command::unsplit::unsplit;
use crate::command::{context_length, load_engine};
use crate::error::ExecError;
use crate::job_files::{Answered, PromptReader};
use crate::numbers::counted;
use crate::report::table;
use crate::runtime::OrtBackend;
use hpp_engine::{Engine, EngineError};
use hpp_generate::sampling::greedy;
use hpp_generate::{PlanFile, PromptEncoder, check_language_model};
use hpp_io::{check_creatable, check_replaceable, show, show_json, write_file_as};
use hpp_schema::probe::FEW_POSITIONS;
use hpp_schema::{InputRole, Plan, Whole, error_line};
use std::fmt::Write;
use std::path::Path;

/// Compares the plan with `--against`, or with its unsplit model, and prints the result.
pub fn run(plan: &PlanFile, prompts: &Path, args: &VerifyArgs, ctx: &mut CommandContext<'_>) -> Result<u8, ExecError> {
    if let Some(path) = &args.report {
        check_replaceable(path, page::START)?;
        check_creatable(path)?;
    }
    let against = args.against.as_deref().map(PlanFile::open).transpose()?;
    let reference = against.as_ref().unwrap_or(plan);
    check(&plan.plan)?;
    check(&reference.plan)?;
    check_vocabulary(&reference.plan, &plan.plan)?;
    if against.is_some() {
        check_tokenizers(reference, plan)?;
    }
    let context = context_length(plan, &args.runtime).min(context_length(reference, &args.runtime));
    let texts = read_texts(plan, prompts, context, ctx)?;
    let reference_plan = match &against {
        Some(_) => reference.plan.clone(),
        None => unsplit(plan, Whole::Source)?.ok_or_else(super::sequences::no_source)?,
    };
    ctx.console.working("running the reference");
    let mut logits = LogitsStore::new()?;
    {
        let mut engine = load(&reference_plan, reference, args, ctx)?;
        each_position(&mut engine, &texts, ctx, |_, row| logits.push(row))?;
    }
    ctx.console.working("running the plan");
    let mut engine = load(&plan.plan, plan, args, ctx)?;
    let mut stored = logits.read()?;
    let mut comparison = Comparison::default();
    each_position(&mut engine, &texts, ctx, |next, row| {
        comparison.add(stored.next()?, row, next);
        Ok(())
    })?;
    ctx.console.idle();
    let name = match &against {
        Some(other) => other.plan.model.name.clone(),
        None => "the plan's unsplit model".to_owned(),
    };
    let report = comparison.report(name, texts.len())?;
    if let Some(path) = &args.report {
        write_file_as(path, page::page(&plan.plan.model.name, &report, &comparison.kl).as_bytes(), page::START)?;
        ctx.console.info(&format!("wrote {}", path.display()));
    }
    if (report.positions as u64) < FEW_POSITIONS {
        ctx.console.warn(&format!(
            "{} are few: the mean depends on which texts they are from, and the 99.9 % quantile is the largest value; give {FEW_POSITIONS} or more",
            counted(report.positions as u64, "position")
        ));
    }
    if against.is_none() {
        let source = plan.dir.join(&plan.plan.model.source);
        let other = match &plan.plan.model.rounded_by[..] {
            [] => String::new(),
            options => {
                format!(", rounded by {} too; --against MODEL compares with the exported one", options.join(" and "))
            }
        };
        ctx.console.info(&format!("compared with {}, the plan's unsplit model{other}", source.display()));
    }
    if args.json {
        show_json(ctx.out, &report)?
    } else {
        show(ctx.out, &text(&report))?
    }
    Ok(0)
}

fn check(plan: &Plan) -> Result<(), ExecError> {
    check_language_model(plan)?;
    if plan.model.inputs.iter().any(|input| input.role == InputRole::Embeddings) {
        return Err(usage("--kl feeds token ids, and this model takes embeddings", "verify it without --kl"));
    }
    if plan.model.gives_one_position() {
        return Err(usage(
            "--kl compares the scores of each token of a prompt, and this model gives those of the last token of a pass only",
            "verify it without --kl, or export it with the scores of all tokens",
        ));
    }
    Ok(())
}

fn check_vocabulary(reference: &Plan, plan: &Plan) -> Result<(), ExecError> {
    match (reference.model.vocab_size, plan.model.vocab_size) {
        (Some(a), Some(b)) if a != b => Err(usage(
            &format!("the plan has a vocabulary of {b} tokens and the reference one of {a}"),
            "compare models with the same tokenizer",
        )),
        _ => Ok(()),
    }
}

/// Refuses models that have different tokens: their distributions cannot be compared.
fn check_tokenizers(reference: &PlanFile, plan: &PlanFile) -> Result<(), ExecError> {
    let tokenizer = |of: &PlanFile| PromptEncoder::open(of, false).map(|encoder| encoder.tokenizer);
    let (Some(theirs), Some(ours)) = (tokenizer(reference)?, tokenizer(plan)?) else { return Ok(()) };
    match ours.first_difference(&theirs) {
        Some(token) => Err(usage(
            &format!("the reference has another tokenizer: {token:?} is not the same token in both"),
            "compare models with the same tokenizer",
        )),
        None => Ok(()),
    }
}

fn usage(message: &str, hint: &str) -> ExecError {
    ExecError::Usage { message: message.to_owned(), hint: hint.to_owned() }
}

/// The tokens of each prompt. Warns of lines that cannot be used; fails if no line can be used.
fn read_texts(
    plan: &PlanFile,
    path: &Path,
    context: u64,
    ctx: &CommandContext<'_>,
) -> Result<Vec<Vec<u32>>, ExecError> {
    let failed = |source| ExecError::Prompts { path: path.to_owned(), source };
    let (prompts, _) = PromptReader::open(path, Answered::default()).map_err(failed)?;
    let mut prompts = prompts.with_numbered_lines();
    let requests = RequestMaker::open(plan, &AnswerArgs::default(), context)?;
    let (mut texts, mut left_out) = (Vec::new(), 0);
    while let Some(job) = prompts.next_job().map_err(failed)? {
        match job {
            Ok(job) => {
                let id = serde_json::to_string(&job.id).unwrap_or_default();
                let tokens = requests.request(job).map(|request| request.prompt).map_err(|error| error_line(&error));
                match tokens.and_then(|tokens| within_vocabulary(tokens, plan.plan.model.vocab_size)) {
                    Ok(tokens) => texts.push(tokens),
                    Err(why) => {
                        left_out += 1;
                        ctx.console.warn(&format!("prompt {id} is left out: {why}"));
                    }
                }
            }
            Err(bad) => ctx.console.warn(&format!("line {} is left out: {}", bad.line, bad.error)),
        }
    }
    match texts.is_empty() {
        true => Err(usage(
            &format!("{} has no prompt that can be compared", path.display()),
            match left_out {
                0 => "give one JSON object a line, such as {\"prompt\": \"...\"}",
                _ => "correct what the warnings name: divide a long text into several lines, each within the context",
            },
        )),
        false => Ok(texts),
    }
}

fn within_vocabulary(tokens: Vec<u32>, vocabulary: Option<u64>) -> Result<Vec<u32>, String> {
    match vocabulary.and_then(|size| Some((tokens.iter().find(|token| u64::from(**token) >= size)?, size))) {
        Some((token, size)) => Err(format!("the token {token} is beyond the vocabulary of {size}")),
        None => Ok(tokens),
    }
}

fn load(
    plan: &Plan,
    file: &PlanFile,
    args: &VerifyArgs,
    ctx: &CommandContext<'_>,
) -> Result<Engine<OrtBackend>, ExecError> {
    let options = args.runtime.engine_options();
    load_engine(plan, &file.dir, &args.runtime, options, ctx.console, ctx.interrupt)
}

/// Calls `each` at every position of every text, with the logits and the token that follows in the text, if there is one.
fn each_position(
    engine: &mut Engine<OrtBackend>,
    texts: &[Vec<u32>],
    ctx: &CommandContext<'_>,
    mut each: impl FnMut(Option<u32>, &[f32]) -> Result<(), ExecError>,
) -> Result<(), ExecError> {
    for text in texts {
        if ctx.interrupt.is_requested() {
            return Err(EngineError::Cancelled.into());
        }
        let mut following = text.iter().copied().skip(1);
        each_row(engine, text, u64::MAX, |row| each(following.next(), row))?;
    }
    Ok(())
}

/// Sums over positions.
#[derive(Debug, Default)]
struct Comparison {
    kl: Vec<f64>,
    same_top1: usize,
    /// Positions whose next token is known.
    known: usize,
    reference_loss: f64,
    loss: f64,
}

impl Comparison {
    /// Adds a position.
    fn add(&mut self, reference: &[f32], plan: &[f32], next: Option<u32>) {
        self.kl.push(kl(reference, plan));
        self.same_top1 += usize::from(greedy(reference).ok() == greedy(plan).ok());
        if let Some(next) = next {
            self.known += 1;
            self.reference_loss += loss(reference, next);
            self.loss += loss(plan, next);
        }
    }

    /// Sorts the divergences.
    fn report(&mut self, reference: String, prompts: usize) -> Result<Report, ExecError> {
        let positions = self.kl.len();
        if positions == 0 || self.kl.iter().any(|kl| kl.is_nan()) {
            let why = "some are NaN, or the two have different vocabularies".to_owned();
            return Err(EngineError::WrongOutput { name: "the logits".into(), why }.into());
        }
        self.kl.sort_by(f64::total_cmp);
        let perplexity = |loss: f64| (self.known > 0).then(|| (loss / self.known as f64).exp());
        Ok(Report {
            reference,
            prompts,
            positions,
            kl: Quantiles::of(&self.kl),
            same_top1: self.same_top1 as f64 / positions as f64,
            reference_perplexity: perplexity(self.reference_loss),
            perplexity: perplexity(self.loss),
            perplexity_ratio: perplexity(self.loss - self.reference_loss),
        })
    }
}

/// Minus the logarithm of a token's probability, nats.
fn loss(logits: &[f32], token: u32) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum();
    let logit = logits.get(token as usize).map_or(f64::NAN, |logit| f64::from(*logit));
    max + sum.ln() - logit
}

/// The tables for people.
fn text(report: &Report) -> String {
    let (prompts, positions) = (counted(report.prompts as u64, "prompt"), counted(report.positions as u64, "position"));
    let mut out = format!("against {}: {prompts}, {positions}\n", report.reference);
    let Quantiles { mean, median, p99, p99_9, max } = report.kl;
    let row = [mean, median, p99, p99_9, max].map(|kl| format!("{kl:.6}"));
    let row = [vec!["KL divergence, nats".to_owned()], row.to_vec()].concat();
    out.push_str(&table(&["", "mean", "median", "99 %", "99.9 %", "largest"], [row]));
    let _ = writeln!(out, "same most likely token: {:.2} %", report.same_top1 * 100.0);
    if let (Some(reference), Some(plan), Some(ratio)) =
        (report.reference_perplexity, report.perplexity, report.perplexity_ratio)
    {
        let _ = writeln!(out, "perplexity: {plan:.4}, of the reference {reference:.4}, ratio {ratio:.4}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_logits_have_no_divergence_and_the_same_perplexity() {
        let mut comparison = Comparison::default();
        let row = [0.0, 2f32.ln(), 0.0];
        comparison.add(&row, &row, Some(1));
        comparison.add(&row, &row, Some(0));
        comparison.add(&row, &row, None);
        let report = comparison.report("x".into(), 1).unwrap();
        // Probabilities 1/2 and 1/4: the geometric mean of 2 and 4.
        assert!((report.perplexity.unwrap() - 8f64.sqrt()).abs() < 1e-6);
        assert_eq!((report.perplexity_ratio, report.kl.max, report.same_top1), (Some(1.0), 0.0, 1.0));
    }

    #[test]
    fn a_worse_plan_has_a_ratio_above_one_and_nan_is_an_error() {
        let mut comparison = Comparison::default();
        comparison.add(&[2.0, 0.0], &[0.0, 2.0], Some(0));
        let report = comparison.report("x".into(), 1).unwrap();
        assert!((report.perplexity_ratio.unwrap() - 2f64.exp()).abs() < 1e-9 && report.same_top1 == 0.0);
        let mut comparison = Comparison::default();
        comparison.add(&[2.0, 0.0], &[f32::NAN, 2.0], None);
        assert!(comparison.report("x".into(), 1).is_err());
        assert!(Comparison::default().report("x".into(), 1).is_err());
    }
}
