//! `hpp-exec PLAN --inputs in.npz --outputs out.npz`: one run from named tensors to named tensors.

use super::Around;
use crate::busy::Busy;
use crate::error::ExecError;
use crate::inputs::{InputsError, Wanted, fit};
use crate::machine::Machine;
use crate::plan_file::PlanFile;
use crate::report::{Bytes, StageTimes, memory, millis, run_table};
use crate::settings::RunOnceSettings;
use crate::tensors::{read_npz, write_npz};
use hpp_engine::HostTensor;
use hpp_io::show_json;
use hpp_schema::{DType, ModelKind};
use serde::Serialize;
use std::time::Instant;

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
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

/// Reads, checks, loads, runs, writes.
pub fn run(settings: &RunOnceSettings, around: &mut Around<'_>) -> Result<u8, ExecError> {
    let plan = PlanFile::open(&settings.plan)?;
    if plan.plan.model.kind != ModelKind::SingleRun {
        return Err(InputsError::NotRunOnce.into());
    }
    let inputs = fit(read_npz(&settings.inputs)?, &plan.plan.model, Wanted::All, settings.inputs.clone())?;
    super::warn_of_memory(&plan.plan, around.console);
    let busy = Busy::begin();
    let machine = Machine::open_to_run(&plan.plan, &settings.runtime, around.console)?;
    let mut engine = machine.load(&plan.plan, &plan.dir, &settings.runtime, around.console)?;

    let started = Instant::now();
    let mut results = engine.infer(&inputs)?;
    let run_ms = millis(started.elapsed());
    let names = plan.plan.model.outputs.iter().map(|output| output.name.clone());
    let outputs: Vec<(String, HostTensor)> =
        names.filter_map(|name| results.remove(&name).map(|tensor| (name, tensor))).collect();
    write_npz(&settings.outputs, &outputs)?;

    let telemetry = engine.telemetry();
    let stages: Vec<StageTimes> = telemetry.stages.iter().map(StageTimes::new).collect();
    let bytes = Bytes::new(&telemetry, 0);
    let load_ms = millis(telemetry.load);
    if let Some(note) = busy.note() {
        around.console.say(&format!("note: {note}"));
    }
    around.console.say(&format!(
        "load {load_ms:.0} ms, run {run_ms:.1} ms\n{}memory: {}",
        run_table(&stages),
        memory(&bytes)
    ));
    if settings.json {
        let report = |(name, tensor): &'_ (String, HostTensor)| (name.clone(), tensor.dtype, tensor.shape.clone());
        let described: Vec<_> = outputs.iter().map(report).collect();
        let outputs =
            described.iter().map(|(name, dtype, shape)| OutputReport { name, dtype: *dtype, shape }).collect();
        show_json(around.out, &Report { outputs, load_ms, run_ms, stages, bytes })?;
    }
    Ok(0)
}
