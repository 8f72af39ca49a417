//! Verifies models that generate text: compares the logits of each step, on tokens that the unsplit model chooses.

use super::difference::{Difference, Tolerance};
use super::report::{FirstDifference, PromptPasses, StepResult, TensorResult, Verdict};
use super::{BoundaryTensor, CommandContext, boundaries, last_partition, tolerance};
use crate::cli::VerifyArgs;
use crate::command::unsplit::unsplit;
use crate::command::{PromptFormat, context_length, load_sequence, open_embeddings, open_extra_inputs, prompt_tokens};
use crate::console::{Console, Level};
use crate::error::ExecError;
use crate::inputs::random_tokens;
use crate::interrupt::Interrupt;
use crate::numbers::counted;
use crate::prompt::PromptSource;
use crate::runtime::OrtBackend;
use hpp_engine::{EngineError, NamedTensors};
use hpp_generate::sampling::greedy;
use hpp_generate::{ModelInputs, PlanFile, Prefill, PromptEncoder, SingleSequence, check_prompt};
use hpp_schema::{Plan, Whole};
use std::sync::Arc;

/// Length of a random prompt.
const RANDOM_PROMPT: u64 = 12;

/// Runs the unsplit model, then the plan, and locates the first difference.
pub fn compare(plan: &PlanFile, args: &VerifyArgs, ctx: &CommandContext<'_>) -> Result<Verdict, ExecError> {
    if let Some(note) = args.prompt.source().and_then(|source| source.file_note()) {
        ctx.console.info(&note);
    }
    let prompt = read_prompt(plan, args)?;
    let source = unsplit(plan, Whole::Source)?.ok_or_else(no_source)?;
    ctx.console.working("loading the unsplit model");
    let reference = {
        let mut sequence = open(&source, plan, args, ctx.console)?;
        ctx.console.working("running the unsplit model");
        ReferenceRun::run(&mut sequence, prompt, args.steps, ctx)?
    };
    let (done, asked) = (reference.tokens.len() as u64, args.steps);
    if done < asked {
        let context = context_length(plan, &args.runtime);
        ctx.console.warn(&format!("the context of {context} is full after {} of {asked}", counted(done, "step")));
    }
    let mut sequence = open(&plan.plan, plan, args, ctx.console)?;
    ctx.console.working("running the plan");
    let telemetry = sequence.engine().telemetry();
    let tolerance = tolerance(args, &plan.plan, &telemetry);
    let steps = reference.compare(&mut sequence, tolerance, ctx)?;
    let prompt_passes = PromptPasses::of_prompt(reference.prompt.len() as u64, sequence.engine().chunk());

    ctx.console.idle();
    let differs = steps.iter().position(|step| !step.difference.bit_identical);
    let first_difference = differs.map(|step| locate(step, &reference, sequence, plan, args, ctx)).transpose()?;
    Ok(Verdict {
        within_tolerance: steps.iter().all(|step| step.within_tolerance),
        bit_identical: differs.is_none(),
        tolerance,
        unsplit_model: plan.plan.model.source.clone(),
        rounded_by: plan.plan.model.rounded_by.clone(),
        partitions: telemetry.stages.iter().map(|s| (s.partition.clone(), s.provider.name().to_owned())).collect(),
        prompt_passes,
        steps,
        outputs: vec![],
        first_difference,
    })
}

fn read_prompt(plan: &PlanFile, args: &VerifyArgs) -> Result<Vec<u32>, ExecError> {
    let context = context_length(plan, &args.runtime);
    let prompt = match args.prompt.source() {
        Some(PromptSource::Tokens(tokens)) => tokens,
        Some(source) => {
            prompt_tokens(&source, &PromptEncoder::open(plan, false)?, &PromptFormat::Plain, context, &|| {})?
        }
        None => random_tokens(RANDOM_PROMPT.min(context), plan.plan.model.vocab_size, args.seed),
    };
    check_prompt(&prompt, context).map_err(|error| error.of_model_for(plan.plan.model.context_length))?;
    Ok(prompt)
}

/// Loads `which`, the plan or the unsplit model.
fn open(
    which: &Plan,
    plan: &PlanFile,
    args: &VerifyArgs,
    console: &Arc<Console>,
) -> Result<SingleSequence<OrtBackend>, ExecError> {
    let inputs = ModelInputs {
        embeddings: open_embeddings(&plan.plan, args.embeddings.as_deref())?,
        extra: open_extra_inputs(&plan.plan, args.inputs.as_deref())?,
    };
    load_sequence(which, &plan.dir, &args.runtime, inputs, console, &Interrupt::never())
}

pub(super) fn no_source() -> ExecError {
    ExecError::Usage {
        message: "the plan names no unsplit model to compare with".to_owned(),
        hint: "make the plan again with hpp-split".to_owned(),
    }
}

/// The tokens and logits of the unsplit model.
struct ReferenceRun {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

impl ReferenceRun {
    /// Generates up to `steps` tokens greedily.
    fn run(
        sequence: &mut SingleSequence<OrtBackend>,
        prompt: Vec<u32>,
        steps: u64,
        ctx: &CommandContext<'_>,
    ) -> Result<Self, ExecError> {
        let (mut tokens, mut logits) = (Vec::new(), Vec::new());
        prefill(sequence, &prompt, ctx)?;
        loop {
            let row = sequence.logits().to_vec();
            let token = greedy(&row).map_err(|error| ExecError::Usage {
                message: format!("the unsplit model cannot be compared with: {error}"),
                hint: "the fault is in the model, not in the plan: check its weights, or export it again".to_owned(),
            })?;
            tokens.push(token);
            logits.push(row);
            if tokens.len() as u64 == steps || sequence.room() == 0 {
                return Ok(Self { prompt, tokens, logits });
            }
            sequence.feed(&[token])?;
        }
    }

    /// Feeds the same tokens to the plan and compares the logits.
    fn compare(
        &self,
        sequence: &mut SingleSequence<OrtBackend>,
        tolerance: Tolerance,
        ctx: &CommandContext<'_>,
    ) -> Result<Vec<StepResult>, ExecError> {
        let mut results = Vec::new();
        prefill(sequence, &self.prompt, ctx)?;
        for (step, (token, logits)) in self.tokens.iter().zip(&self.logits).enumerate() {
            if step > 0 {
                sequence.feed(&self.tokens[step - 1..step])?;
            }
            let difference = Difference::of_logits(logits, sequence.logits());
            let plan_token = greedy(sequence.logits()).ok();
            let margin = margin(logits);
            let token_fits = plan_token == Some(*token) || margin <= tolerance.0;
            let within_tolerance = difference.is_within(tolerance) && token_fits;
            results.push(StepResult { step, token: *token, plan_token, margin, difference, within_tolerance });
        }
        Ok(results)
    }

    /// Runs up to a step and returns the boundary tensors of that step.
    fn tap_boundaries(
        &self,
        sequence: &mut SingleSequence<OrtBackend>,
        step: usize,
        boundaries: &[BoundaryTensor],
        ctx: &CommandContext<'_>,
    ) -> Result<NamedTensors, ExecError> {
        sequence.clear();
        let names = || boundaries.iter().map(|boundary| boundary.name.as_str());
        if step == 0 {
            sequence.engine().set_taps(names())?;
        }
        prefill(sequence, &self.prompt, ctx)?;
        for fed in 0..step {
            if fed + 1 == step {
                sequence.engine().set_taps(names())?;
            }
            sequence.feed(&self.tokens[fed..=fed])?;
        }
        Ok(sequence.engine().taps().clone())
    }
}

fn prefill(
    sequence: &mut SingleSequence<OrtBackend>,
    prompt: &[u32],
    ctx: &CommandContext<'_>,
) -> Result<(), ExecError> {
    match sequence.prefill(prompt, &|| ctx.interrupt.is_requested())? {
        Prefill::Complete { .. } => Ok(()),
        Prefill::Cancelled => Err(EngineError::Cancelled.into()),
    }
}

/// The largest minus the second largest logit, relative to the largest magnitude.
fn margin(logits: &[f32]) -> f64 {
    let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for logit in logits {
        if *logit > best {
            (best, second) = (*logit, best);
        } else if *logit > second {
            second = *logit;
        }
    }
    let scale = logits.iter().filter(|s| s.is_finite()).map(|s| s.abs()).fold(0.0, f32::max);
    if scale == 0.0 { 0.0 } else { f64::from(best - second) / f64::from(scale) }
}

/// Finds the first boundary that differs in a step. Needs the unsplit model with its boundaries as outputs.
fn locate(
    step: usize,
    reference: &ReferenceRun,
    mut sequence: SingleSequence<OrtBackend>,
    plan: &PlanFile,
    args: &VerifyArgs,
    ctx: &CommandContext<'_>,
) -> Result<FirstDifference, ExecError> {
    let boundaries = boundaries(&plan.plan);
    let Some(tapped) = unsplit(plan, Whole::Tapped)?.filter(|_| !boundaries.is_empty()) else {
        return Ok(first_difference(
            Some(step),
            &[],
            &NamedTensors::new(),
            &NamedTensors::new(),
            last_partition(&plan.plan),
        ));
    };
    tracing::info!(step, "boundaries compared");
    let plan_taps = reference.tap_boundaries(&mut sequence, step, &boundaries, ctx)?;
    let plan_logits = sequence.logits().to_vec();
    drop(sequence);
    // Quiet: loading warns of outputs that no partition reads, and here these are the taps.
    let mut sequence = open(&tapped, plan, args, &Console::new(Level::Quiet))?;
    let model_taps = reference.tap_boundaries(&mut sequence, step, &boundaries, ctx)?;
    let fusion_only = Difference::of_logits(sequence.logits(), &plan_logits).bit_identical;
    let first = first_difference(Some(step), &boundaries, &model_taps, &plan_taps, last_partition(&plan.plan));
    let is_divided = plan.plan.model.is_divided();
    Ok(FirstDifference { fusion_only: Some(fusion_only), is_divided, ..first })
}

/// Compares the boundary tensors of the unsplit model and of the plan, in the order in which they are computed. If none differs, the
/// difference begins in the `last` partition.
pub fn first_difference(
    step: Option<usize>,
    boundaries: &[BoundaryTensor],
    model: &NamedTensors,
    plan: &NamedTensors,
    last: String,
) -> FirstDifference {
    let results = boundaries.iter().filter_map(|BoundaryTensor { partition, name }| {
        let difference = Difference::of_tensors(model.get(name)?, plan.get(name)?);
        Some(TensorResult { name: name.clone(), partition: partition.clone(), difference })
    });
    let boundaries: Vec<TensorResult> = results.collect();
    let first = boundaries.iter().find(|b| !b.difference.bit_identical);
    FirstDifference {
        step,
        boundary: first.map(|b| b.name.clone()),
        partition: first.map_or(last, |b| b.partition.clone()),
        boundaries,
        fusion_only: None,
        is_divided: false,
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
        let tensor = |v: f32| hpp_engine::HostTensor::from_f32(&[1], &[v]);
        let boundary =
            |(partition, name): (&str, &str)| BoundaryTensor { partition: partition.into(), name: name.into() };
        let boundaries = [("p0", "b"), ("p1", "a")].map(boundary);
        let model = NamedTensors::from([("a".into(), tensor(1.0)), ("b".into(), tensor(2.0))]);
        let plan = NamedTensors::from([("a".into(), tensor(1.5)), ("b".into(), tensor(2.5))]);
        let first = first_difference(Some(3), &boundaries, &model, &plan, "head".into());
        assert_eq!((first.boundary.as_deref(), first.partition.as_str()), (Some("b"), "p0"));
        let none = first_difference(Some(3), &boundaries, &model, &model, "head".into());
        assert_eq!((none.boundary, none.partition.as_str()), (None, "head"));
    }
}
