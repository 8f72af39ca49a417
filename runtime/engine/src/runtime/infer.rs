//! One run from named inputs to named outputs, for models that generate no text and for callers that give every input and state.

use super::Runtime;
use super::sequence::StageBinding;
use crate::buffers::{Buffer, about, size_of, upload};
use crate::error::EngineError;
use crate::ids::StageId;
use crate::port::{Backend, Port, Session, Tensor};
use crate::program::{InputSource, Program, StageInput, StageOutput};
use crate::telemetry::{Phase, StageRun};
use crate::tensor::HostTensor;
use hpp_schema::{InputRole, OutputUse};
use std::collections::{BTreeMap, BTreeSet};

/// Tensors by name.
pub type NamedTensors = BTreeMap<String, HostTensor>;

impl<B: Backend> Runtime<B> {
    /// Runs every partition once and returns the model's outputs, including states.
    pub fn infer(&mut self, program: &Program, inputs: &NamedTensors) -> Result<NamedTensors, EngineError> {
        let start = self.pool.backend.now();
        self.recorder.pass.begin();
        self.check_cancelled()?;
        let given = self.accept_inputs(program, inputs)?;
        let mut bindings = self.new_bindings(program)?;
        let mut outputs = NamedTensors::new();
        self.lanes[0].boundaries.start_pass_of_unknown_shape();
        self.weights.start_pass(&self.pool, Phase::Prefill)?;
        let schedule = &program.schedules.prefill;
        for run in &schedule.runs {
            self.lanes[0].copy_boundaries(&self.pool, &run.copies, &mut self.recorder)?;
            let stage = self.route.prefill[run.partition];
            let ran = self.infer_stage(program, stage, &mut bindings[stage], &given);
            ran.map_err(|error| of_input(error, &given))?;
            self.collect_named(program, stage, &mut bindings[stage], &mut outputs)?;
        }
        self.lanes[0].copy_boundaries(&self.pool, &schedule.final_copies, &mut self.recorder)?;
        self.synchronize()?;
        self.watch.check()?;
        self.recorder.passed(Phase::Prefill, 0, self.pool.since(start));
        Ok(outputs)
    }

    /// Every tensor that partitions read from outside, checked.
    fn accept_inputs(&self, program: &Program, inputs: &NamedTensors) -> Result<NamedTensors, EngineError> {
        let mut given = NamedTensors::new();
        let mut known = BTreeSet::new();
        let stages = self.route.prefill.iter().map(|stage| &program.stages[*stage]);
        for StageInput { port, source } in stages.flat_map(|stage| &stage.inputs) {
            if matches!(source, InputSource::Weight(_)) {
                continue;
            }
            known.insert(port.name.as_str());
            if matches!(source, InputSource::Boundary(_)) || given.contains_key(&port.name) {
                continue;
            }
            let tensor = match inputs.get(&port.name) {
                Some(tensor) => tensor.clone(),
                None => all_logit_positions(program, &port.name, inputs)
                    .or_else(|| input_of_source(program, port))
                    .ok_or_else(|| EngineError::MissingInput { name: port.name.clone(), dtype: port.dtype })?,
            };
            check(port, &tensor)?;
            given.insert(port.name.clone(), tensor);
        }
        known.extend(program.plan.model.inputs.iter().map(|input| input.name.as_str()));
        match inputs.keys().find(|name| !known.contains(name.as_str())) {
            Some(name) => {
                Err(EngineError::WrongInput { name: name.clone(), why: "the model has no such input".into() })
            }
            None => Ok(given),
        }
    }

    fn infer_stage(
        &mut self,
        program: &Program,
        id: StageId,
        bound: &mut StageBinding<B>,
        given: &NamedTensors,
    ) -> Result<(), EngineError> {
        self.check_cancelled()?;
        if self.weights.has_experts(id) {
            let selected = self.routed_experts_of_lane(program, 0, id)?;
            self.weights.disk.select_experts(vec![selected]);
        }
        let (weights, context) = self.weights();
        weights.fetch(context, &program.stages, id, Phase::Prefill)?;
        // Kept until the run is over.
        let _buffers = self.bind_named(program, id, bound, given)?;
        let stage = &program.stages[id];
        for index in 0..stage.outputs.len() {
            let session = &self.sessions[stage.session];
            let unbound = session.bind_output_unknown(&mut bound.binding, index);
            unbound.map_err(|source| stage.failed("binding outputs", source))?;
        }
        let (weights, context) = self.weights();
        weights.wait(context, &program.stages, id)?;
        let run = StageRun { stage: id, phase: Phase::Prefill, item: 0 };
        let ran = self.run_session(program, run, 1, &mut bound.binding);
        // Also after an error: a cancelled run has used its weights.
        let (weights, context) = self.weights();
        ran.and(weights.release(context, &program.stages, id))
    }

    fn bind_named(
        &mut self,
        program: &Program,
        id: StageId,
        bound: &mut StageBinding<B>,
        given: &NamedTensors,
    ) -> Result<Vec<Buffer<B>>, EngineError> {
        let Runtime { pool, sessions, lanes, weights, recorder, .. } = self;
        let boundaries = &mut lanes[0].boundaries;
        let stage = &program.stages[id];
        let session = &sessions[stage.session];
        let mut buffers = Vec::new();
        for (index, StageInput { port, source }) in stage.inputs.iter().enumerate() {
            let failed = |source| stage.failed(&format!("binding input {:?}", port.name), source);
            let mut bind = |tensor: &B::Tensor| session.bind_input(&mut bound.binding, index, tensor);
            match *source {
                InputSource::Boundary(boundary) => {
                    boundaries.copy_to(boundary, pool, port.memory, recorder)?;
                    let missing = || EngineError::MissingInput { name: port.name.clone(), dtype: port.dtype };
                    let (value, key) = boundaries.value(boundary, port.memory).ok_or_else(missing)?;
                    value.with(pool, port.dtype, &key, bind).map_err(failed)?;
                }
                InputSource::Weight(weight) => {
                    let (buffer, dims) = weights.input(id, weight);
                    pool.view(buffer, port.dtype, dims).and_then(|view| bind(&view)).map_err(failed)?;
                }
                InputSource::ModelInput(_) | InputSource::State(_) => {
                    let tensor = &given[&port.name];
                    let buffer = upload(pool, &port.name, tensor, port.memory)?;
                    pool.view(&buffer, port.dtype, &tensor.shape).and_then(|view| bind(&view)).map_err(failed)?;
                    buffers.push(buffer);
                }
            }
        }
        Ok(buffers)
    }

    /// Reads the stage's model and state outputs, and keeps what later stages read.
    fn collect_named(
        &mut self,
        program: &Program,
        id: StageId,
        bound: &mut StageBinding<B>,
        outputs: &mut NamedTensors,
    ) -> Result<(), EngineError> {
        let Runtime { pool, sessions, lanes, taps, .. } = self;
        let boundaries = &mut lanes[0].boundaries;
        let stage = &program.stages[id];
        let planned = &program.partition(stage.partition).outputs;
        for (index, StageOutput { port, sink }) in stage.outputs.iter().enumerate() {
            let output = sessions[stage.session].take_output(&mut bound.binding, index);
            let output = output.map_err(|source| stage.failed("reading its outputs", source))?;
            let planned = planned.iter().find(|planned| planned.name == port.name);
            let is_result = planned.is_some_and(|planned| planned.to != OutputUse::Boundary);
            let is_tapped = sink.boundary().is_some_and(|boundary| taps.wanted.contains(&boundary));
            if is_result || is_tapped {
                let tensor = read::<B>(&pool.backend, &port.name, &output)?;
                if is_tapped {
                    taps.read.insert(port.name.clone(), tensor.clone());
                }
                if is_result {
                    outputs.insert(port.name.clone(), tensor);
                }
            }
            if let Some(boundary) = sink.boundary() {
                boundaries.produced(boundary, pool, output.memory(), Some(output));
            }
        }
        Ok(())
    }
}

/// The input of logit positions, which a rewritten model has and the source model has not: it asks for the logits of every position.
fn all_logit_positions(program: &Program, name: &str, inputs: &NamedTensors) -> Option<HostTensor> {
    let model_inputs = &program.plan.model.inputs;
    model_inputs.iter().find(|input| input.name == name && input.role == InputRole::LogitPositions)?;
    let has_tokens = |role| matches!(role, InputRole::TokenIds | InputRole::Embeddings);
    let tokens = model_inputs.iter().find(|input| has_tokens(input.role)).and_then(|input| inputs.get(&input.name))?;
    let positions: Vec<i64> = (0..i64::try_from(*tokens.shape.get(1)?).ok()?).collect();
    Some(HostTensor::from_i64(&[positions.len() as u64], &positions))
}

/// An input that only the source model has: true for the condition of the branch that generates, zeros for what only the other branch
/// reads.
fn input_of_source(program: &Program, port: &Port) -> Option<HostTensor> {
    let input = program.plan.model.inputs.iter().find(|input| input.name == port.name)?;
    let value = match input.role {
        InputRole::UseCacheBranch => 1,
        InputRole::Zeros => 0,
        _ => return None,
    };
    let shape: Vec<u64> = port.shape.iter().map(|size| size.unwrap_or(1)).collect();
    let size = size_of(&port.name, port.dtype, &shape).ok()?;
    Some(HostTensor { dtype: port.dtype, shape, bytes: vec![value; size as usize] })
}

/// Names the input in the error of a run that looked up a row that a table does not have: the library names no input. Only if exactly one input
/// holds the number of the row, and no input is longer than the table, which may then be a table of positions.
fn of_input(error: EngineError, given: &NamedTensors) -> EngineError {
    let Some((row, last)) = error.missing_row() else { return error };
    let is_longer =
        |tensor: &HostTensor| tensor.shape.iter().any(|size| i64::try_from(*size).is_ok_and(|size| size > last + 1));
    if given.values().any(is_longer) {
        return error;
    }
    let mut holders = given.iter().filter(|(_, tensor)| tensor.holds(row)).map(|(name, _)| name);
    match (holders.next(), holders.next()) {
        (Some(name), None) => EngineError::WrongInput {
            name: name.clone(),
            why: format!("it holds {row}, which the model looks up in a table with rows 0 to {last}"),
        },
        _ => error,
    }
}

fn check(port: &Port, tensor: &HostTensor) -> Result<(), EngineError> {
    let fits = tensor.dtype == port.dtype
        && tensor.shape.len() == port.shape.len()
        && tensor.shape.iter().zip(&port.shape).all(|(have, want)| want.is_none_or(|want| want == *have));
    if fits {
        return Ok(());
    }
    let sizes: Vec<String> = port.shape.iter().map(|size| size.map_or("?".into(), |size| size.to_string())).collect();
    let why = format!("the model wants {} [{}], not {} {:?}", port.dtype, sizes.join(", "), tensor.dtype, tensor.shape);
    Err(EngineError::WrongInput { name: port.name.clone(), why })
}

fn read<B: Backend>(backend: &B, name: &str, tensor: &B::Tensor) -> Result<HostTensor, EngineError> {
    let size = size_of(name, tensor.dtype(), tensor.shape())?;
    let mut bytes = vec![0; size as usize];
    if size > 0 {
        backend.read(tensor, 0, &mut bytes).map_err(about(name))?;
    }
    Ok(HostTensor { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), bytes })
}
