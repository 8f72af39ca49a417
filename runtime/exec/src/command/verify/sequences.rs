//! Verifying models that generate: step by step on the unsplit model's tokens.

use super::difference::Difference;
use super::report::{FirstDifference, StepResult, TensorResult, Verdict};
use super::{Around, Compared, boundaries, tolerance};
use crate::cli::VerifyArgs;
use crate::command::unsplit::unsplit;
use crate::command::{Feeds, context, load_session};
use crate::console::{Console, Level};
use crate::error::ExecError;
use crate::inputs::{Wanted, fit, made_up_tokens};
use crate::interrupt::Interrupt;
use crate::machine::OrtBackend;
use crate::numbers::counted;
use crate::plan_file::PlanFile;
use crate::prompt::{self, TextFiles};
use crate::sampling::{SamplingError, greedy};
use crate::session::{Fed, Session};
use crate::settings::PromptSource;
use crate::tensors::read_npz;
use hpp_engine::{EngineError, NamedTensors};
use hpp_schema::{Plan, Whole};
use std::sync::Arc;

/// Tokens of a prompt nobody gave.
const MADE_UP: u64 = 12;

/// Loads and runs one after the other, then looks for where a difference begins.
pub fn compare(plan: &PlanFile, args: &VerifyArgs, around: &Around<'_>) -> Compared {
    let prompt = prompt_tokens(plan, args)?;
    let source = unsplit(plan, Whole::Source)?.ok_or_else(no_source)?;
    around.console.working("loading the unsplit model");
    let reference = {
        let mut session = open(&source, plan, args, around.console)?;
        around.console.working("running the unsplit model");
        Reference::run(&mut session, prompt, args.steps, around)?
    };
    let (done, asked) = (reference.tokens.len() as u64, args.steps);
    if done < asked {
        let context = context(&plan.plan, &args.runtime);
        around.console.warn(&format!("the context of {context} is full after {} of {asked}", counted(done, "step")));
    }
    let mut session = open(&plan.plan, plan, args, around.console)?;
    around.console.working("running the plan");
    let telemetry = session.engine().telemetry();
    let tolerance = tolerance(args, &plan.plan, &telemetry);
    let steps = reference.compare(&mut session, tolerance, around)?;

    around.console.idle();
    let differs = steps.iter().position(|step| !step.difference.bit_identical);
    let first_difference = differs.map(|step| locate(step, &reference, session, plan, args, around)).transpose()?;
    Ok(Verdict {
        within_tolerance: steps.iter().all(|step| step.within_tolerance),
        bit_identical: differs.is_none(),
        tolerance,
        partitions: telemetry.stages.iter().map(|s| (s.partition.clone(), s.provider.name())).collect(),
        steps,
        outputs: vec![],
        first_difference,
    })
}

fn prompt_tokens(plan: &PlanFile, args: &VerifyArgs) -> Result<Vec<u32>, ExecError> {
    let context = context(&plan.plan, &args.runtime);
    let prompt = match args.prompt.source() {
        Some(PromptSource::Tokens(tokens)) => tokens,
        Some(source) => prompt::tokens(&source, &TextFiles::open(plan, false)?, None)?,
        None => made_up_tokens(MADE_UP.min(context), plan.plan.model.vocab_size, args.seed),
    };
    prompt::check(&prompt, context)?;
    Ok(prompt)
}

fn open(
    which: &Plan,
    plan: &PlanFile,
    args: &VerifyArgs,
    console: &Arc<Console>,
) -> Result<Session<OrtBackend>, ExecError> {
    let mut feeds = Feeds::open(plan, args.embeddings.as_deref())?;
    let given = args.inputs.as_deref().map(read_npz).transpose()?.unwrap_or_default();
    let path = args.inputs.clone().unwrap_or_else(|| "(no --inputs)".into());
    feeds.extra = fit(given, &plan.plan.model, Wanted::Free, path)?;
    load_session(which, &plan.dir, &args.runtime, feeds, console, &Interrupt::never())
}

fn no_source() -> ExecError {
    ExecError::Usage {
        message: "the plan names no unsplit model to compare with".to_owned(),
        hint: "make the plan again with hpp-split".to_owned(),
    }
}

/// What the unsplit model did.
struct Reference {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    scores: Vec<Vec<f32>>,
}

impl Reference {
    fn run(
        session: &mut Session<OrtBackend>,
        prompt: Vec<u32>,
        steps: u64,
        around: &Around<'_>,
    ) -> Result<Self, ExecError> {
        let (mut tokens, mut scores) = (Vec::new(), Vec::new());
        begin(session, &prompt, around)?;
        loop {
            let row = session.scores().to_vec();
            let token = greedy(&row).ok_or(SamplingError::NoCandidate { count: row.len() })?;
            tokens.push(token);
            scores.push(row);
            if tokens.len() as u64 == steps || session.room() == 0 {
                return Ok(Self { prompt, tokens, scores });
            }
            session.feed(&[token])?;
        }
    }

    /// Feeds the same tokens to the plan and compares the scores.
    fn compare(
        &self,
        session: &mut Session<OrtBackend>,
        tolerance: super::Tolerance,
        around: &Around<'_>,
    ) -> Result<Vec<StepResult>, ExecError> {
        let mut results = Vec::new();
        begin(session, &self.prompt, around)?;
        for (step, (token, scores)) in self.tokens.iter().zip(&self.scores).enumerate() {
            if step > 0 {
                session.feed(&self.tokens[step - 1..step])?;
            }
            let difference = Difference::of_scores(scores, session.scores());
            let plan_token = greedy(session.scores());
            let margin = margin(scores);
            let token_fits = plan_token == Some(*token) || margin <= tolerance.0;
            let within_tolerance = difference.is_within(tolerance) && token_fits;
            results.push(StepResult { step, token: *token, plan_token, margin, difference, within_tolerance });
        }
        Ok(results)
    }

    /// Runs up to a step and reads what crosses the boundaries in it.
    fn taps(
        &self,
        session: &mut Session<OrtBackend>,
        step: usize,
        names: &[(String, String)],
        around: &Around<'_>,
    ) -> Result<NamedTensors, ExecError> {
        session.reset();
        let tap =
            |session: &mut Session<OrtBackend>| session.engine().set_taps(names.iter().map(|(_, name)| name.as_str()));
        if step == 0 {
            tap(session)?;
        }
        begin(session, &self.prompt, around)?;
        for at in 0..step {
            if at + 1 == step {
                tap(session)?;
            }
            session.feed(&self.tokens[at..=at])?;
        }
        Ok(session.engine().taps().clone())
    }
}

fn begin(session: &mut Session<OrtBackend>, prompt: &[u32], around: &Around<'_>) -> Result<(), ExecError> {
    match session.begin(prompt, around.interrupt)? {
        Fed::Whole { .. } => Ok(()),
        Fed::Interrupted => Err(EngineError::Cancelled.into()),
    }
}

/// Best minus second best, relative to the largest magnitude.
fn margin(scores: &[f32]) -> f64 {
    let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for score in scores {
        if *score > best {
            (best, second) = (*score, best);
        } else if *score > second {
            second = *score;
        }
    }
    let scale = scores.iter().filter(|s| s.is_finite()).map(|s| s.abs()).fold(0.0, f32::max);
    if scale == 0.0 { 0.0 } else { f64::from(best - second) / f64::from(scale) }
}

/// Compares the boundaries of one step, in order; needs the unsplit model with its boundaries as outputs.
fn locate(
    step: usize,
    reference: &Reference,
    mut session: Session<OrtBackend>,
    plan: &PlanFile,
    args: &VerifyArgs,
    around: &Around<'_>,
) -> Result<FirstDifference, ExecError> {
    let names = boundaries(&plan.plan);
    let last = plan.plan.partitions.last().map(|p| p.name.clone()).unwrap_or_default();
    let Some(tapped) = unsplit(plan, Whole::Tapped)?.filter(|_| !names.is_empty()) else {
        return Ok(FirstDifference {
            step: Some(step),
            boundary: None,
            partition: last,
            boundaries: vec![],
            fusion_only: None,
        });
    };
    around.console.detail(&format!("comparing boundaries at step {step}"));
    let ours = reference.taps(&mut session, step, &names, around)?;
    let our_scores = session.scores().to_vec();
    drop(session);
    // Quietly: that nobody reads most of its outputs is the point of it.
    let mut session = open(&tapped, plan, args, &Console::new(Level::Quiet))?;
    let theirs = reference.taps(&mut session, step, &names, around)?;
    let fusion_only = Difference::of_scores(session.scores(), &our_scores).bit_identical;
    Ok(FirstDifference { fusion_only: Some(fusion_only), ..first_of(Some(step), &names, &theirs, &ours, last) })
}

/// The first boundary that differs, and all of them.
pub fn first_of(
    step: Option<usize>,
    names: &[(String, String)],
    theirs: &NamedTensors,
    ours: &NamedTensors,
    last: String,
) -> FirstDifference {
    let both = names.iter().filter_map(|(partition, name)| {
        let difference = Difference::of_tensors(theirs.get(name)?, ours.get(name)?);
        Some(TensorResult { name: name.clone(), partition: partition.clone(), difference })
    });
    let boundaries: Vec<TensorResult> = both.collect();
    let first = boundaries.iter().find(|b| !b.difference.bit_identical);
    FirstDifference {
        step,
        boundary: first.map(|b| b.name.clone()),
        partition: first.map_or(last, |b| b.partition.clone()),
        boundaries,
        fusion_only: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn margins_are_relative() {
        assert_eq!(margin(&[1.0, 4.0, 2.0]), 0.5);
        assert_eq!(margin(&[3.0, 3.0]), 0.0);
        assert_eq!(margin(&[0.0, 0.0]), 0.0);
    }

    #[test]
    fn the_first_differing_boundary_is_found_in_order() {
        let one = |v: f32| hpp_engine::HostTensor::from_f32(&[1], &[v]);
        let names: Vec<_> = [("p0", "b"), ("p1", "a")].map(|(p, n)| (p.to_owned(), n.to_owned())).into();
        let theirs = NamedTensors::from([("a".into(), one(1.0)), ("b".into(), one(2.0))]);
        let ours = NamedTensors::from([("a".into(), one(1.5)), ("b".into(), one(2.5))]);
        let first = first_of(Some(3), &names, &theirs, &ours, "head".into());
        assert_eq!((first.boundary.as_deref(), first.partition.as_str()), (Some("b"), "p0"));
        let none = first_of(Some(3), &names, &theirs, &theirs, "head".into());
        assert_eq!((none.boundary, none.partition.as_str()), (None, "head"));
    }
}
