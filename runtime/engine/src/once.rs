//! One run from named inputs to named outputs, for models that generate nothing, and for any model when the caller gives
//! every input and state itself.

use crate::area::{Area, about};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::meter::{Began, Time, Took};
use crate::port::{Backend, Session, Tensor};
use crate::stage::{Act, Bound, Entrance, Exit, From, To};
use crate::state::upload;
use crate::telemetry::Phase;
use crate::tensor::HostTensor;
use hpp_schema::{InputRole, OutputUse};
use std::collections::{BTreeMap, BTreeSet};

/// Tensors by name.
pub type Named = BTreeMap<String, HostTensor>;

impl<B: Backend> Engine<B> {
    /// Runs every partition once and returns the model's outputs, states included.
    pub fn run_once(&mut self, inputs: &Named) -> Result<Named, EngineError> {
        let started = self.areas.backend.now();
        self.meter.pass.begin();
        self.check_cancelled()?;
        let given = self.accept_named(inputs)?;
        let mut bound = self.bindings()?;
        let mut outputs = Named::new();
        for boundary in &mut self.boundaries {
            boundary.begin_unknown();
        }
        self.passing(Phase::Prefill)?;
        for step in 0..self.acts[Phase::Prefill as usize].len() {
            match self.acts[Phase::Prefill as usize][step].clone() {
                Act::Run(stage) => self.run_stage_once(stage, &mut bound[stage], &given, &mut outputs)?,
                Act::Copy(moves) => {
                    for (value, memories) in moves {
                        for memory in memories {
                            self.boundaries[value].ensure(&self.areas, memory, &mut self.meter)?;
                        }
                    }
                }
            }
        }
        self.wait_for_devices()?;
        self.watch.check()?;
        self.meter.passed(Phase::Prefill, 0, Took { from: started, to: self.areas.backend.now() });
        Ok(outputs)
    }

    /// Everything the partitions want from outside, checked.
    fn accept_named(&self, inputs: &Named) -> Result<BTreeMap<String, HostTensor>, EngineError> {
        let mut given = BTreeMap::new();
        let run = self.by_phase[Phase::Prefill as usize].iter().map(|stage| &self.stages[*stage]);
        let mut known = BTreeSet::new();
        for Entrance { port, from } in run.flat_map(|stage| &stage.inputs) {
            if matches!(from, From::Weight(_)) {
                continue;
            }
            known.insert(port.name.as_str());
            if matches!(from, From::Boundary(_)) || given.contains_key(&port.name) {
                continue;
            }
            let tensor = match inputs.get(&port.name) {
                Some(tensor) => tensor.clone(),
                None => self
                    .implied(&port.name, inputs)
                    .ok_or_else(|| EngineError::MissingInput { name: port.name.clone(), dtype: port.dtype })?,
            };
            check(port, &tensor)?;
            given.insert(port.name.clone(), tensor);
        }
        known.extend(self.plan.model.inputs.iter().map(|input| input.name.as_str()));
        match inputs.keys().find(|name| !known.contains(name.as_str())) {
            Some(name) => {
                Err(EngineError::WrongInput { name: name.clone(), why: "the model has no such input".into() })
            }
            None => Ok(given),
        }
    }

    /// An input the source model does not have: every position's scores are wanted.
    fn implied(&self, name: &str, inputs: &Named) -> Option<HostTensor> {
        let all = &self.plan.model.inputs;
        all.iter().find(|input| input.name == name && input.role == InputRole::LogitPositions)?;
        let brings_tokens = |role| matches!(role, InputRole::TokenIds | InputRole::Embeddings);
        let tokens = all.iter().find(|input| brings_tokens(input.role)).and_then(|input| inputs.get(&input.name))?;
        let positions: Vec<i64> = (0..i64::try_from(*tokens.shape.get(1)?).ok()?).collect();
        Some(HostTensor::from_i64(&[positions.len() as u64], &positions))
    }

    fn run_stage_once(
        &mut self,
        stage: usize,
        bound: &mut Bound<B>,
        given: &Named,
        outputs: &mut Named,
    ) -> Result<(), EngineError> {
        self.check_cancelled()?;
        // Kept until the run is over; a binding keeps what it holds, but views need their areas here.
        self.weights_come(stage, Phase::Prefill)?;
        let _areas = self.bind_once(stage, bound, given)?;
        self.weights_arrive(stage)?;
        let Engine { stages, sessions, control, areas, .. } = self;
        let at = &stages[stage];
        let session = &mut sessions[at.session];
        for index in 0..at.outputs.len() {
            session
                .bind_output_unknown(&mut bound.binding, index)
                .map_err(|source| at.failed("being given outputs", source))?;
        }
        let from = areas.backend.now();
        let ticket = session.run(&mut bound.binding, control).map_err(|source| at.failed("running", source))?;
        let known = || Time::Known(Took { from, to: self.areas.backend.now() });
        let run = Began::Run { stage, phase: Phase::Prefill };
        self.meter.began(run, ticket.map_or_else(known, Time::Later));
        self.weights_leave(stage)?;
        self.collect(stage, bound, outputs)
    }

    fn bind_once(&mut self, stage: usize, bound: &mut Bound<B>, given: &Named) -> Result<Vec<Area<B>>, EngineError> {
        let Engine { stages, sessions, boundaries, slots, areas, meter, .. } = self;
        let at = &stages[stage];
        let session = &sessions[at.session];
        let mut kept = Vec::new();
        for (index, Entrance { port, from }) in at.inputs.iter().enumerate() {
            let failed = |source| at.failed(&format!("being given input {:?}", port.name), source);
            if let From::Boundary(number) = *from {
                boundaries[number].ensure(areas, port.memory, meter)?;
                let missing = || EngineError::MissingInput { name: port.name.clone(), dtype: port.dtype };
                let (source, key) = boundaries[number].source(port.memory).ok_or_else(missing)?;
                source
                    .with(areas, port.dtype, &key, |tensor| session.bind_input(&mut bound.binding, index, tensor))
                    .map_err(failed)?;
                continue;
            }
            if let From::Weight(number) = *from {
                let (area, dims) = slots.weight(stage, number);
                let view = areas.view(area, port.dtype, dims).map_err(failed)?;
                session.bind_input(&mut bound.binding, index, &view).map_err(failed)?;
                continue;
            }
            let tensor = &given[&port.name];
            let area = upload(areas, &port.name, tensor, port.memory)?;
            let view = areas.view(&area, port.dtype, &tensor.shape).map_err(failed)?;
            session.bind_input(&mut bound.binding, index, &view).map_err(failed)?;
            kept.push(area);
        }
        Ok(kept)
    }

    /// Reads the stage's model and state outputs, and keeps what later stages read.
    fn collect(&mut self, stage: usize, bound: &mut Bound<B>, outputs: &mut Named) -> Result<(), EngineError> {
        let Engine { stages, sessions, boundaries, areas, plan, taps, .. } = self;
        let at = &stages[stage];
        for (index, Exit { port, to }) in at.outputs.iter().enumerate() {
            let taken = sessions[at.session]
                .take_output(&mut bound.binding, index)
                .map_err(|source| at.failed("handing over its outputs", source))?;
            let said = plan.partitions[at.partition].outputs.iter().find(|output| output.name == port.name);
            let is_answer = said.is_some_and(|output| output.to != OutputUse::Boundary);
            let number = match *to {
                To::Logits(number) | To::Boundary(number) | To::Spare(number) => Some(number),
                To::State(_) | To::Unknown => None,
            };
            let tapped = number.is_some_and(|number| taps.wanted.contains(&number));
            if is_answer || tapped {
                let tensor = read::<B>(&areas.backend, &port.name, &taken)?;
                if tapped {
                    taps.read.insert(port.name.clone(), tensor.clone());
                }
                if is_answer {
                    outputs.insert(port.name.clone(), tensor);
                }
            }
            if let Some(number) = number {
                boundaries[number].produced(areas, taken.memory(), Some(taken));
            }
        }
        Ok(())
    }
}

fn check(port: &crate::port::Port, tensor: &HostTensor) -> Result<(), EngineError> {
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
    let size = crate::area::size_of(name, tensor.dtype(), tensor.shape())?;
    let mut bytes = vec![0; size as usize];
    if size > 0 {
        backend.read(tensor, 0, &mut bytes).map_err(about(name))?;
    }
    Ok(HostTensor { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), bytes })
}
