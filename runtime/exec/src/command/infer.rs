//! `hpp-exec PLAN --inputs in.npz --outputs out.npz`: runs a model that keeps no state once on named tensors.

use super::{CommandContext, refuse_same_file};
use crate::error::ExecError;
use crate::inputs::{InputsError, check_inputs, different_sizes};
use crate::numbers::millis;
use crate::other_load::OtherLoad;
use crate::report::{Bytes, StageTimes, memory, run_table};
use crate::runtime::OnnxRuntime;
use crate::settings::InferSettings;
use crate::tensors::{check_npz, read_npz, write_npz};
use hpp_engine::{HostTensor, NamedTensors};
use hpp_generate::PlanFile;
use hpp_io::show_json;
use hpp_schema::{Budgets, DType, ModelInput, ModelKind, Plan};
use serde::Serialize;
use std::time::Instant;

/// The object that `--json` prints.
#[derive(Serialize)]
struct InferReport<'a> {
    outputs: Vec<OutputReport<'a>>,
    load_ms: f64,
    run_ms: f64,
    stages: Vec<StageTimes>,
    bytes: Bytes,
}

#[derive(Serialize)]
struct OutputReport<'a> {
    name: &'a str,
    dtype: DType,
    shape: &'a [u64],
}

/// Reads and checks the inputs, loads the plan, runs it, writes the outputs.
pub fn run(settings: &InferSettings, ctx: &mut CommandContext<'_>) -> Result<u8, ExecError> {
    let plan = PlanFile::open(&settings.plan)?;
    if plan.plan.model.kind == ModelKind::Decoder {
        return Err(InputsError::GeneratesText.into());
    }
    refuse_same_file(("--outputs", &settings.outputs), ("--inputs", Some(&settings.inputs)))?;
    check_npz(&settings.outputs)?;
    let expected = inputs_of_one_run(&plan.plan);
    let tensors = read_npz(&settings.inputs)?;
    let inputs = check_inputs(tensors, &expected, &settings.inputs)?;
    if let Some(what) = different_sizes(&inputs, &expected) {
        ctx.console.warn(&format!("{what}: the result may be wrong"));
    }
    if let Some(warning) = larger_than_planned(&inputs, &expected, &plan.plan) {
        ctx.console.warn(&warning);
    }
    let other_load = OtherLoad::start();
    let runtime = OnnxRuntime::open_for(&plan.plan, &settings.runtime, ctx.console)?;
    super::warn_of_memory(&plan.plan, &runtime.plan_on_this_machine(&plan.plan, &settings.runtime), ctx.console);
    let mut engine = runtime.load(&plan.plan, &plan.dir, &settings.runtime, ctx.console)?;

    let started = Instant::now();
    let mut results = engine.infer(&inputs)?;
    let run_ms = millis(started.elapsed());
    let named = |name: &str| results.remove(name).map(|tensor| (name.to_owned(), tensor));
    let outputs: Vec<(String, HostTensor)> = plan.plan.result_names().filter_map(named).collect();
    write_npz(&settings.outputs, &outputs)?;

    let telemetry = engine.telemetry();
    let stages: Vec<StageTimes> = telemetry.stages.iter().map(StageTimes::new).collect();
    let bytes = Bytes::new(&telemetry, 0);
    let load_ms = millis(telemetry.load);
    if let Some(note) = other_load.note() {
        ctx.console.info(&format!("note: {note}"));
    }
    ctx.console.info(&format!(
        "load {load_ms:.0} ms, run {run_ms:.1} ms\n{}memory: {}",
        run_table(&stages),
        memory(&bytes)
    ));
    if settings.json {
        let outputs =
            outputs.iter().map(|(name, tensor)| OutputReport { name, dtype: tensor.dtype, shape: &tensor.shape });
        show_json(ctx.out, &InferReport { outputs: outputs.collect(), load_ms, run_ms, stages, bytes })?;
    }
    Ok(0)
}

/// A warning if an input has more rows or tokens than the plan reserves host memory for.
fn larger_than_planned(inputs: &NamedTensors, expected: &[ModelInput], plan: &Plan) -> Option<String> {
    let Budgets { ram, context, batch, .. } = &plan.budgets;
    let ram = (*ram)?;
    let is_larger = |input: &&ModelInput| {
        let shape = inputs.get(&input.name).map_or(&[][..], |tensor| &tensor.shape);
        let beyond = |axis: usize, most: u64| {
            let is_open = input.shape.get(axis).is_some_and(|dim| dim.as_fixed().is_none());
            is_open && shape.get(axis).is_some_and(|size| *size > most)
        };
        beyond(0, *batch) || (input.role.counts_tokens() && beyond(1, *context))
    };
    let input = expected.iter().find(is_larger)?;
    Some(format!(
        "the input {:?} is {:?}, and the plan's {} of host memory are for {batch} x {context} tokens: the run may take more. hpp-split \
         --batch and --context plan for it",
        input.name,
        inputs[&input.name].shape,
        ram.human()
    ))
}

/// The inputs that the caller gives. A decoder without cache is run once like other models: the tokens are an input like any other.
fn inputs_of_one_run(plan: &Plan) -> Vec<ModelInput> {
    let mut plan = plan.clone();
    plan.model.kind = ModelKind::SingleRun;
    plan.user_inputs()
}
