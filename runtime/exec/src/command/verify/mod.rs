//! `hpp-exec verify PLAN`: the plan against the unsplit model, through the same engine.
//!
//! The two are loaded one after the other, so that a model that only just fits can be verified too. The unsplit model
//! chooses the tokens; both are fed the same ones, so a difference in one step does not spoil the next.

mod difference;
mod report;
mod sequences;
mod tensors;

use super::{Around, needs_language_model};
use crate::cli::VerifyArgs;
use crate::error::ExecError;
use crate::plan_file::PlanFile;
use difference::Tolerance;
use hpp_engine::Telemetry;
use hpp_io::{show, show_json};
use hpp_schema::{DType, ModelKind, Plan, Provider};
use report::Verdict;

/// Compares, prints, and answers 0 only if everything is within tolerance.
pub fn run(args: &VerifyArgs, around: &mut Around<'_>) -> Result<u8, ExecError> {
    let plan = PlanFile::open(&args.plan)?;
    let verdict = if plan.plan.model.kind == ModelKind::SingleRun {
        tensors::compare(&plan, args, around)?
    } else {
        needs_language_model(&plan.plan)?;
        sequences::compare(&plan, args, around)?
    };
    if args.json {
        show_json(around.out, &verdict)?;
    } else {
        show(around.out, &report::text(&verdict))?;
    }
    Ok(u8::from(!verdict.within_tolerance))
}

/// What was asked for, else what the plan's number types and the providers it really ran on can promise.
fn tolerance(args: &VerifyArgs, plan: &Plan, telemetry: &Telemetry) -> Tolerance {
    let half = |dtype: DType| matches!(dtype, DType::Float16 | DType::Bfloat16);
    let outputs = plan.partitions.iter().flat_map(|p| &p.outputs);
    let coarse = outputs.map(|o| o.dtype).chain(plan.states.iter().map(|s| s.dtype)).any(half);
    let elsewhere = telemetry.stages.iter().any(|stage| stage.provider != Provider::Cpu);
    Tolerance(args.tolerance.unwrap_or(match (coarse, elsewhere) {
        (true, _) => 2e-2,
        (false, true) => 1e-3,
        (false, false) => 1e-4,
    }))
}

/// Names of the tensors that cross between partitions, in the order they are computed, with their makers.
fn boundaries(plan: &Plan) -> Vec<(String, String)> {
    let crossing = plan.partitions.iter().flat_map(|partition| {
        let outputs = partition.outputs.iter().filter(|o| o.to == hpp_schema::OutputUse::Boundary);
        outputs.map(|output| (partition.name.clone(), output.name.clone()))
    });
    crossing.collect()
}

type Compared = Result<Verdict, ExecError>;
