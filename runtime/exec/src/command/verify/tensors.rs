//! Verifies models that run once: compares their outputs on the same inputs.

use super::difference::Difference;
use super::report::{FirstDifference, TensorResult, Verdict};
use super::sequences::first_difference;
use super::{BoundaryTensor, CommandContext, boundaries, last_partition, tolerance};
use crate::cli::VerifyArgs;
use crate::command::unsplit::unsplit;
use crate::console::{Console, Level};
use crate::error::ExecError;
use crate::inputs::{check_inputs, random_inputs};
use crate::runtime::OnnxRuntime;
use crate::tensors::read_npz;
use hpp_engine::{EngineError, NamedTensors, Telemetry};
use hpp_generate::PlanFile;
use hpp_schema::{Plan, Whole};
use std::sync::Arc;

/// Runs the unsplit model, then the plan, and compares every output.
pub fn compare(plan: &PlanFile, args: &VerifyArgs, ctx: &CommandContext<'_>) -> Result<Verdict, ExecError> {
    if args.prompt.source().is_some() {
        return Err(ExecError::Usage {
            message: "the model generates no text, so it reads no prompt".to_owned(),
            hint: "give its inputs with --inputs IN.npz, or nothing for random ones".to_owned(),
        });
    }
    let inputs = match &args.inputs {
        Some(path) => check_inputs(read_npz(path)?, &plan.plan.user_inputs(), path)?,
        None => random_inputs(&plan.plan.user_inputs(), plan.plan.model.vocab_size, args.seed)?,
    };
    let runtime = OnnxRuntime::open_for(&plan.plan, &args.runtime, ctx.console)?;
    let runner = Runner { runtime, plan, args, inputs };
    let boundaries = boundaries(&plan.plan);
    let source = unsplit(plan, Whole::Source)?.unwrap_or_else(|| plan.plan.clone());
    let of_model = runner.run(ctx.console, &source, &[]).map_err(|error| match error.engine() {
        Some(EngineError::Run { .. }) if args.inputs.is_none() && error.hint().is_none() => {
            ExecError::RandomInputs(Box::new(error))
        }
        _ => error,
    })?;
    let of_plan = runner.run(ctx.console, &plan.plan, &boundaries)?;

    let names = plan.plan.result_names();
    let outputs: Vec<TensorResult> =
        names.map(|name| compare_output(name, plan, &of_model.outputs, &of_plan.outputs)).collect();
    let bit_identical = outputs.iter().all(|t| t.difference.bit_identical);
    let first_difference = if bit_identical { None } else { Some(runner.locate(&boundaries, &of_plan.taps)?) };
    let tolerance = tolerance(args, &plan.plan, &of_plan.telemetry);
    Ok(Verdict {
        within_tolerance: outputs.iter().all(|t| t.difference.is_within(tolerance)),
        bit_identical,
        tolerance,
        unsplit_model: plan.plan.model.source.clone(),
        rounded_by: plan.plan.model.rounded_by.clone(),
        partitions: of_plan
            .telemetry
            .stages
            .iter()
            .map(|s| (s.partition.clone(), s.provider.name().to_owned()))
            .collect(),
        prompt_passes: None,
        steps: vec![],
        outputs,
        first_difference,
    })
}

fn compare_output(name: &str, plan: &PlanFile, of_model: &NamedTensors, of_plan: &NamedTensors) -> TensorResult {
    let partition = plan.plan.partitions.iter().find(|p| p.outputs.iter().any(|o| o.name == name));
    let difference = match (of_model.get(name), of_plan.get(name)) {
        (Some(a), Some(b)) => Difference::of_tensors(a, b),
        _ => Difference::INFINITE,
    };
    let partition = partition.map(|p| p.name.clone()).unwrap_or_default();
    TensorResult { name: name.to_owned(), partition, difference }
}

/// Runs the plan or the unsplit model on the same inputs.
struct Runner<'a> {
    runtime: OnnxRuntime,
    plan: &'a PlanFile,
    args: &'a VerifyArgs,
    inputs: NamedTensors,
}

/// What one run gave.
struct RunResult {
    outputs: NamedTensors,
    /// The boundary tensors.
    taps: NamedTensors,
    telemetry: Telemetry,
}

impl Runner<'_> {
    fn run(&self, console: &Arc<Console>, which: &Plan, boundaries: &[BoundaryTensor]) -> Result<RunResult, ExecError> {
        let mut engine = self.runtime.load(which, &self.plan.dir, &self.args.runtime, console)?;
        engine.set_taps(boundaries.iter().map(|boundary| boundary.name.as_str()))?;
        let outputs = engine.infer(&self.inputs)?;
        Ok(RunResult { outputs, taps: engine.taps().clone(), telemetry: engine.telemetry() })
    }

    /// Finds the first boundary that differs.
    fn locate(&self, boundaries: &[BoundaryTensor], plan_taps: &NamedTensors) -> Result<FirstDifference, ExecError> {
        let model_taps = match unsplit(self.plan, Whole::Tapped)? {
            Some(tapped) if !boundaries.is_empty() => self.run(&Console::new(Level::Quiet), &tapped, boundaries)?.taps,
            _ => NamedTensors::new(),
        };
        Ok(first_difference(None, boundaries, &model_taps, plan_taps, last_partition(&self.plan.plan)))
    }
}
