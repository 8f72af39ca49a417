//! A pass: one walk through the schedule with some tokens of one sequence.

use super::sequence::StageBinding;
use super::{Runtime, Sequence};
use crate::buffers::{BindingKey, Buffer, BufferPool, PassInput, StateArrival, StateReturn};
use crate::error::{BackendError, EngineError};
use crate::ids::StageId;
use crate::port::{Backend, MemoryId, Port, Session, Timing};
use crate::program::{InputSource, OutputSink, PassSizes, Program, ScheduledOp, StageInput, StageOutput};
use crate::telemetry::{Event, Phase};
use crate::tensor::HostTensor;
use std::collections::BTreeMap;

/// What one pass takes in.
pub(super) struct Pass<'a> {
    pub input: PassInput<'a>,
    pub sizes: PassSizes,
    /// Whether it is the first pass of its step.
    pub is_first: bool,
    /// Whether it is the last pass of its step.
    pub is_last: bool,
    /// Further model inputs, by name.
    pub extra: &'a BTreeMap<String, HostTensor>,
}

impl Pass<'_> {
    /// The last of several passes is prefill though it may have one token: its states are where the passes before left them.
    fn phase(&self) -> Phase {
        let is_alone = self.is_first && self.is_last;
        if is_alone && self.sizes.sequence == 1 && self.sizes.past > 0 { Phase::Decode } else { Phase::Prefill }
    }

    /// The index in the pass of the first position whose logits are computed.
    fn logits_from(&self) -> u64 {
        self.sizes.sequence - self.sizes.rows
    }
}

impl<B: Backend> Runtime<B> {
    /// Runs a pass. After an error the sequence cannot be used again.
    pub(super) fn pass(
        &mut self,
        program: &Program,
        sequence: &mut Sequence<B>,
        pass: &Pass<'_>,
    ) -> Result<(), EngineError> {
        let start = self.pool.backend.now();
        self.recorder.pass.begin();
        self.check_cancelled()?;
        for input in self.inputs.iter_mut() {
            let rows_from = pass.logits_from();
            input.write(&self.pool, pass.input, rows_from, &pass.sizes, pass.extra, &mut self.recorder)?;
        }
        self.boundaries.iter_mut().for_each(|boundary| boundary.start_pass(&pass.sizes));
        if sequence.taps_version != self.taps.version {
            sequence.bindings = self.new_bindings(program)?;
            sequence.taps_version = self.taps.version;
        }
        sequence.interrupted = true;
        let next = if pass.is_last { Phase::Decode } else { Phase::Prefill };
        self.weights.start_pass(&self.pool, next)?;
        let phase = pass.phase();
        PassRunner { program, runtime: self, sequence, pass, phase }.run()?;
        self.synchronize()?;
        self.watch.check()?;
        self.read_taps()?;
        sequence.interrupted = false;
        sequence.states.iter_mut().for_each(crate::buffers::StateBuffers::commit);
        self.recorder.passed(phase, pass.sizes.sequence, self.pool.since(start));
        Ok(())
    }

    fn read_taps(&mut self) -> Result<(), EngineError> {
        for id in &self.taps.wanted {
            let tensor = self.boundaries[*id].read(&self.pool)?;
            self.taps.read.insert(self.boundaries[*id].name.clone(), tensor);
        }
        Ok(())
    }

    /// Waits for a stage's weights, runs it, and releases them: also after an error, because a cancelled run has used its weights.
    pub(super) fn run_stage(
        &mut self,
        program: &Program,
        id: StageId,
        phase: Phase,
        binding: &mut <B::Session as Session>::Binding,
    ) -> Result<(), EngineError> {
        let stage = &program.stages[id];
        let (weights, context) = self.weights();
        weights.wait(context, &program.stages, id)?;
        let start = self.pool.backend.now();
        let ran = self.sessions[stage.session].run(binding, &self.control);
        let ran = ran.map_err(|source| stage.failed("running", source)).map(|token| {
            let timing = token.map_or_else(|| Timing::Measured(self.pool.since(start)), Timing::Pending);
            self.recorder.record(Event::Run { stage: id, phase }, timing);
        });
        let (weights, context) = self.weights();
        ran.and(weights.release(context, &program.stages, id))
    }
}

/// Follows the schedule of one pass.
struct PassRunner<'a, B: Backend> {
    program: &'a Program,
    runtime: &'a mut Runtime<B>,
    sequence: &'a mut Sequence<B>,
    pass: &'a Pass<'a>,
    phase: Phase,
}

impl<B: Backend> PassRunner<'_, B> {
    fn run(&mut self) -> Result<(), EngineError> {
        for op in &self.program.schedules[self.phase] {
            match op {
                ScheduledOp::Run(partition) => self.run_stage(self.runtime.route[self.phase][*partition])?,
                ScheduledOp::Copy(copies) => self.runtime.copy_boundaries(copies)?,
            }
        }
        if self.pass.is_last && self.runtime.staging.any_exclusive() {
            self.return_all_states()?;
        }
        Ok(())
    }

    fn run_stage(&mut self, stage: StageId) -> Result<(), EngineError> {
        self.runtime.check_cancelled()?;
        let (weights, context) = self.runtime.weights();
        weights.fetch(context, &self.program.stages, stage, self.phase)?;
        self.bind_inputs(stage)?;
        self.bind_outputs(stage)?;
        self.runtime.run_stage(self.program, stage, self.phase, &mut self.sequence.bindings[stage].binding)?;
        self.return_states(stage, StateReturn::AfterRun)?;
        self.collect_outputs(stage)
    }

    fn bind_inputs(&mut self, id: StageId) -> Result<(), EngineError> {
        let Runtime { pool, sessions, inputs, boundaries, staging, weights, recorder, .. } = &mut *self.runtime;
        let stage = &self.program.stages[id];
        let Sequence { states, bindings, .. } = &mut *self.sequence;
        let mut binder = Binder { pool, session: &sessions[stage.session], bound: &mut bindings[id] };
        for (index, StageInput { port, source }) in stage.inputs.iter().enumerate() {
            let bound = match *source {
                InputSource::ModelInput(input) => {
                    let buffer = inputs[input].buffer(port.memory);
                    binder.input(
                        index,
                        port,
                        buffer,
                        BindingKey { buffer: buffer.id, dims: inputs[input].dims.clone() },
                    )
                }
                InputSource::Weight(weight) => {
                    let (buffer, dims) = weights.input(id, weight);
                    binder.input(index, port, buffer, BindingKey { buffer: buffer.id, dims: dims.clone() })
                }
                InputSource::State(state) => {
                    let layout = &self.program.layouts[state];
                    let length = self.pass.sizes.past;
                    let home = states[state].past(layout, length)?;
                    let arrival = StateArrival { first_pass: self.pass.is_first, length };
                    let (buffer, key) = staging.past(pool, (id, state), layout, home, arrival, recorder)?;
                    binder.input(index, port, buffer, key)
                }
                InputSource::Boundary(boundary) => {
                    boundaries[boundary].copy_to(pool, port.memory, recorder)?;
                    let Some((value, key)) = boundaries[boundary].value(port.memory) else {
                        let name = boundaries[boundary].name.clone();
                        return Err(EngineError::MissingInput { name, dtype: port.dtype });
                    };
                    binder.input_with(index, key, |key, bind| value.with(pool, port.dtype, key, bind))
                }
            };
            bound.map_err(|source| stage.failed(&format!("binding input {:?}", port.name), source))?;
        }
        Ok(())
    }

    fn bind_outputs(&mut self, id: StageId) -> Result<(), EngineError> {
        let Runtime { pool, sessions, boundaries, staging, taps, .. } = &mut *self.runtime;
        let stage = &self.program.stages[id];
        let Sequence { states, bindings, .. } = &mut *self.sequence;
        let mut binder = Binder { pool, session: &sessions[stage.session], bound: &mut bindings[id] };
        for (index, StageOutput { port, sink }) in stage.outputs.iter().enumerate() {
            let buffer = match *sink {
                OutputSink::Unknown => continue,
                OutputSink::Unread(boundary) if !taps.wanted.contains(&boundary) => continue,
                OutputSink::State(state) => {
                    let home = states[state].present(&self.program.layouts[state], self.pass.sizes.total());
                    let Some(home) = home else { continue };
                    Some(staging.present((id, state), home))
                }
                OutputSink::Logits(boundary) | OutputSink::Boundary(boundary) | OutputSink::Unread(boundary) => {
                    boundaries[boundary].output_buffer(pool, port.memory)?
                }
            };
            let bound = binder.output(index, port, buffer);
            bound.map_err(|source| stage.failed(&format!("binding output {:?}", port.name), source))?;
        }
        Ok(())
    }

    /// Tells boundaries that the stage has run, and takes the outputs that the session allocated.
    fn collect_outputs(&mut self, id: StageId) -> Result<(), EngineError> {
        let Runtime { pool, sessions, boundaries, taps, .. } = &mut *self.runtime;
        let stage = &self.program.stages[id];
        let StageBinding { binding, outputs, .. } = &mut self.sequence.bindings[id];
        for (index, StageOutput { port, sink }) in stage.outputs.iter().enumerate() {
            let Some(boundary) = sink.boundary() else { continue };
            if matches!(sink, OutputSink::Unread(_)) && !taps.wanted.contains(&boundary) {
                continue;
            }
            let allocated = match outputs[index] {
                Some(_) => None,
                None => {
                    let output = sessions[stage.session].take_output(binding, index);
                    Some(output.map_err(|source| stage.failed("reading its outputs", source))?)
                }
            };
            boundaries[boundary].produced(pool, port.memory, allocated);
        }
        Ok(())
    }

    /// After the last pass of a step: copies each state that has a staging buffer of its own to its home memory, first from devices to
    /// the host, then from the host to devices.
    fn return_all_states(&mut self) -> Result<(), EngineError> {
        for home_is_host in [true, false] {
            for partition in self.runtime.route[self.phase].ids() {
                let stage = self.runtime.route[self.phase][partition];
                let lives_on_host = |state| self.program.layouts[state].memory == MemoryId::HOST;
                if self.program.stages[stage].states().all(|state| lives_on_host(state) == home_is_host) {
                    self.return_states(stage, StateReturn::AfterLastPass)?;
                }
            }
        }
        Ok(())
    }

    fn return_states(&mut self, id: StageId, when: StateReturn) -> Result<(), EngineError> {
        let Runtime { pool, staging, recorder, .. } = &mut *self.runtime;
        for StageOutput { sink, .. } in &self.program.stages[id].outputs {
            let OutputSink::State(state) = *sink else { continue };
            let layout = &self.program.layouts[state];
            if let Some(home) = self.sequence.states[state].present(layout, self.pass.sizes.total()) {
                staging.return_home(pool, (id, state), layout, home, when, recorder)?;
            }
        }
        Ok(())
    }
}

/// Binds tensors at one stage, where they differ from what is bound.
struct Binder<'a, B: Backend> {
    pool: &'a BufferPool<B>,
    session: &'a B::Session,
    bound: &'a mut StageBinding<B>,
}

impl<B: Backend> Binder<'_, B> {
    fn input(&mut self, index: usize, port: &Port, buffer: &Buffer<B>, key: BindingKey) -> Result<(), BackendError> {
        let pool = self.pool;
        self.input_with(index, key, |key, bind| bind(&pool.view(buffer, port.dtype, &key.dims)?))
    }

    /// Binds the tensor that `with` passes on.
    fn input_with(
        &mut self,
        index: usize,
        key: BindingKey,
        with: impl FnOnce(&BindingKey, &mut dyn FnMut(&B::Tensor) -> Result<(), BackendError>) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        if self.bound.inputs[index].as_ref() == Some(&key) {
            return Ok(());
        }
        let binding = &mut self.bound.binding;
        with(&key, &mut |tensor| self.session.bind_input(binding, index, tensor))?;
        self.bound.inputs[index] = Some(key);
        Ok(())
    }

    /// Binds an output to a buffer; without one, lets the session allocate it.
    fn output(
        &mut self,
        index: usize,
        port: &Port,
        buffer: Option<(&Buffer<B>, BindingKey)>,
    ) -> Result<(), BackendError> {
        let StageBinding { binding, outputs, .. } = &mut *self.bound;
        let Some((buffer, key)) = buffer else {
            outputs[index] = None;
            return self.session.bind_output_unknown(binding, index);
        };
        if outputs[index].as_ref() != Some(&key) {
            let view = self.pool.view(buffer, port.dtype, &key.dims)?;
            self.session.bind_output(binding, index, &view)?;
            outputs[index] = Some(key);
        }
        Ok(())
    }
}
