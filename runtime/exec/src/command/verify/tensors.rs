//! Verifying models that run once: the same tensors through both.

use super::difference::Difference;
use super::report::{FirstDifference, TensorResult, Verdict};
use super::sequences::first_of;
use super::{Around, Compared, boundaries, tolerance};
use crate::cli::VerifyArgs;
use crate::command::unsplit::unsplit;
use crate::console::{Console, Level};
use crate::error::ExecError;
use crate::inputs::{Wanted, fit, made_up_inputs};
use crate::machine::Machine;
use crate::plan_file::PlanFile;
use crate::tensors::read_npz;
use hpp_engine::{NamedTensors, Telemetry};
use hpp_schema::{Plan, Whole};
use std::sync::Arc;

/// Runs the unsplit model, then the plan, and compares every output.
pub fn compare(plan: &PlanFile, args: &VerifyArgs, around: &Around<'_>) -> Compared {
    let inputs = match &args.inputs {
        Some(path) => fit(read_npz(path)?, &plan.plan.model, Wanted::All, path.clone())?,
        None => made_up_inputs(&plan.plan.model, args.seed)?,
    };
    let machine = Machine::open_to_run(&plan.plan, &args.runtime, around.console)?;
    let mut side = Side { machine, plan, args, inputs };
    let names = boundaries(&plan.plan);
    let source = unsplit(plan, Whole::Source)?.unwrap_or_else(|| plan.plan.clone());
    let (theirs, _, _) = side.run(around.console, &source, &[])?;
    let (ours, our_taps, telemetry) = side.run(around.console, &plan.plan, &names)?;

    let outputs: Vec<TensorResult> =
        plan.plan.model.outputs.iter().map(|o| result(&o.name, plan, &theirs, &ours)).collect();
    let bit_identical = outputs.iter().all(|t| t.difference.bit_identical);
    let first_difference = if bit_identical { None } else { Some(side.locate(&names, &our_taps)?) };
    let tolerance = tolerance(args, &plan.plan, &telemetry);
    Ok(Verdict {
        within_tolerance: outputs.iter().all(|t| t.difference.is_within(tolerance)),
        bit_identical,
        tolerance,
        partitions: telemetry.stages.iter().map(|s| (s.partition.clone(), s.provider.name())).collect(),
        steps: vec![],
        outputs,
        first_difference,
    })
}

fn result(name: &str, plan: &PlanFile, theirs: &NamedTensors, ours: &NamedTensors) -> TensorResult {
    let maker = plan.plan.partitions.iter().find(|p| p.outputs.iter().any(|o| o.name == name));
    let difference = match (theirs.get(name), ours.get(name)) {
        (Some(a), Some(b)) => Difference::of_tensors(a, b),
        _ => Difference { bit_identical: false, max_abs: f64::INFINITY, max_rel: f64::INFINITY },
    };
    TensorResult { name: name.to_owned(), partition: maker.map(|p| p.name.clone()).unwrap_or_default(), difference }
}

/// What both sides are run with.
struct Side<'a> {
    machine: Machine,
    plan: &'a PlanFile,
    args: &'a VerifyArgs,
    inputs: NamedTensors,
}

impl Side<'_> {
    fn run(
        &mut self,
        console: &Arc<Console>,
        which: &Plan,
        names: &[(String, String)],
    ) -> Result<(NamedTensors, NamedTensors, Telemetry), ExecError> {
        let mut engine = self.machine.load(which, &self.plan.dir, &self.args.runtime, console)?;
        engine.set_taps(names.iter().map(|(_, name)| name.as_str()))?;
        let outputs = engine.infer(&self.inputs)?;
        Ok((outputs, engine.taps().clone(), engine.telemetry()))
    }

    fn locate(&mut self, names: &[(String, String)], ours: &NamedTensors) -> Result<FirstDifference, ExecError> {
        let last = self.plan.plan.partitions.last().map(|p| p.name.clone()).unwrap_or_default();
        let theirs = match unsplit(self.plan, Whole::Tapped)? {
            Some(tapped) if !names.is_empty() => self.run(&Console::new(Level::Quiet), &tapped, names)?.1,
            _ => NamedTensors::new(),
        };
        Ok(first_of(None, names, &theirs, ours, last))
    }
}
