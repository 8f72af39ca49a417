//! Binds one item of a pass at one stage, and takes the outputs of its run.

use super::pass::{PassItem, PassRunner};
use super::sequence::StageBinding;
use super::{Runtime, Sequence};
use crate::buffers::{BindingKey, BufferPool, BufferView, CopyIn, Lane, StateReturn, about};
use crate::error::{BackendError, EngineError};
use crate::ids::StageId;
use crate::port::{Backend, MemoryId, Port, Session};
use crate::program::{InputSource, OutputSink, StageInput, StageOutput};

impl<B: Backend> PassRunner<'_, '_, B> {
    /// Binds an item's inputs and outputs. The stage's weights must have been fetched, but need not have arrived.
    pub(super) fn bind(&mut self, item: usize, id: StageId) -> Result<(), EngineError> {
        self.bind_inputs(item, id)?;
        self.bind_outputs(item, id)
    }

    /// After the run: copies staged states home and takes the outputs.
    pub(super) fn after_run(&mut self, item: usize, id: StageId) -> Result<(), EngineError> {
        self.return_states(item, id, StateReturn::AfterRun)?;
        if self.items.len() > 1 {
            self.return_states(item, id, StateReturn::AfterLastPass)?;
        }
        self.collect_outputs(item, id)
    }

    fn bind_inputs(&mut self, item: usize, id: StageId) -> Result<(), EngineError> {
        let Runtime { pool, sessions, lanes, staging, weights, recorder, .. } = &mut *self.runtime;
        match self.staged.iter().any(|(stage, _)| *stage == id) {
            true => staging.start_turn(pool, (id, item), recorder)?,
            false => staging.start_other_turn(),
        }
        let stage = &self.program.stages[id];
        let PassItem { sequence, sizes, is_first, .. } = &mut self.items[item];
        let Sequence { states, bindings, lane, .. } = &mut **sequence;
        let Lane { inputs, boundaries } = &mut lanes[*lane];
        let mut binder = Binder { pool, session: &sessions[stage.session], bound: &mut bindings[id] };
        for (index, StageInput { port, source }) in stage.inputs.iter().enumerate() {
            let bound = match *source {
                InputSource::ModelInput(input) => {
                    let buffer = inputs[input].buffer(port.memory);
                    binder.input(index, port, BufferView { buffer, dims: inputs[input].dims.clone() })
                }
                InputSource::Weight(weight) => {
                    let (buffer, dims) = weights.input(id, weight);
                    binder.input(index, port, BufferView { buffer, dims: dims.clone() })
                }
                InputSource::State(state) => {
                    let layout = &self.program.layouts[state];
                    let length = sizes.past;
                    let home = states[state].past(layout, length)?;
                    let arrival = CopyIn { first_pass: *is_first, length };
                    let past = staging.past(pool, (id, state), layout, home, arrival, recorder)?;
                    binder.input(index, port, past)
                }
                InputSource::Boundary(boundary) => {
                    boundaries.copy_to(boundary, pool, port.memory, recorder)?;
                    let Some((value, key)) = boundaries.value(boundary, port.memory) else {
                        let name = boundaries.name(boundary).to_owned();
                        return Err(EngineError::MissingInput { name, dtype: port.dtype });
                    };
                    binder.input_with(index, key, |key, bind| value.with(pool, port.dtype, key, bind))
                }
            };
            bound.map_err(|source| stage.failed(&format!("binding input {:?}", port.name), source))?;
        }
        Ok(())
    }

    fn bind_outputs(&mut self, item: usize, id: StageId) -> Result<(), EngineError> {
        let Runtime { pool, sessions, lanes, staging, taps, .. } = &mut *self.runtime;
        let stage = &self.program.stages[id];
        let PassItem { sequence, sizes, .. } = &mut self.items[item];
        let Sequence { states, bindings, lane, .. } = &mut **sequence;
        let boundaries = &mut lanes[*lane].boundaries;
        let mut binder = Binder { pool, session: &sessions[stage.session], bound: &mut bindings[id] };
        for (index, StageOutput { port, sink }) in stage.outputs.iter().enumerate() {
            let buffer = match *sink {
                OutputSink::Unknown => continue,
                OutputSink::Unread(boundary) if !taps.wanted.contains(&boundary) => continue,
                OutputSink::State(state) => {
                    let home = states[state].present(&self.program.layouts[state], sizes.total());
                    let Some(home) = home else { continue };
                    Some(staging.present((id, state), home))
                }
                OutputSink::Logits(boundary) | OutputSink::Boundary(boundary) | OutputSink::Unread(boundary) => {
                    boundaries.output_buffer(boundary, pool, port.memory)?
                }
            };
            let bound = binder.output(index, port, buffer);
            bound.map_err(|source| stage.failed(&format!("binding output {:?}", port.name), source))?;
        }
        Ok(())
    }

    /// Tells boundaries that the stage has run, and takes the outputs that the session allocated.
    fn collect_outputs(&mut self, item: usize, id: StageId) -> Result<(), EngineError> {
        let Runtime { pool, sessions, lanes, taps, recorder, .. } = &mut *self.runtime;
        let stage = &self.program.stages[id];
        let Sequence { bindings, lane, .. } = &mut *self.items[item].sequence;
        let boundaries = &mut lanes[*lane].boundaries;
        let StageBinding { binding, outputs, .. } = &mut bindings[id];
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
            boundaries.produced(boundary, pool, port.memory, allocated);
            // Read at once, because a later boundary may take its buffer.
            if taps.wanted.contains(&boundary) {
                let name = boundaries.name(boundary);
                pool.synchronize(port.memory, MemoryId::HOST, recorder).map_err(about(name))?;
                taps.read.insert(name.to_owned(), boundaries.read(boundary, pool)?);
            }
        }
        Ok(())
    }

    /// Whether states with a staging buffer of their own stay there until the last pass of the step. In a pass of several items the next
    /// item needs the buffer.
    pub(super) fn returns_at_end(&self) -> bool {
        self.items.len() == 1 && self.runtime.staging.any_exclusive()
    }

    /// After the last pass of a step: copies each state that has a staging buffer of its own to its home memory, first from devices to
    /// the host, then from the host to devices.
    pub(super) fn return_all_states(&mut self) -> Result<(), EngineError> {
        let phase = self.items[0].phase;
        for home_is_host in [true, false] {
            for partition in self.runtime.route[phase].ids() {
                let stage = self.runtime.route[phase][partition];
                let lives_on_host = |state| self.program.layouts[state].memory == MemoryId::HOST;
                if self.program.stages[stage].states().all(|state| lives_on_host(state) == home_is_host) {
                    self.return_states(0, stage, StateReturn::AfterLastPass)?;
                }
            }
        }
        Ok(())
    }

    fn return_states(&mut self, item: usize, id: StageId, when: StateReturn) -> Result<(), EngineError> {
        let Runtime { pool, staging, recorder, .. } = &mut *self.runtime;
        let PassItem { sequence, sizes, .. } = &self.items[item];
        for StageOutput { sink, .. } in &self.program.stages[id].outputs {
            let OutputSink::State(state) = *sink else { continue };
            let layout = &self.program.layouts[state];
            if let Some(home) = sequence.states[state].present(layout, sizes.total()) {
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
    fn input(&mut self, index: usize, port: &Port, view: BufferView<'_, B>) -> Result<(), BackendError> {
        let (pool, buffer) = (self.pool, view.buffer);
        self.input_with(index, view.key(), |key, bind| bind(&pool.view(buffer, port.dtype, &key.dims)?))
    }

    /// Binds the tensor that `with` passes to its callback, unless `key` is already bound.
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
    fn output(&mut self, index: usize, port: &Port, view: Option<BufferView<'_, B>>) -> Result<(), BackendError> {
        let StageBinding { binding, outputs, .. } = &mut *self.bound;
        let Some(view) = view else {
            outputs[index] = None;
            return self.session.bind_output_unknown(binding, index);
        };
        let buffer = view.buffer;
        let key = view.key();
        if outputs[index].as_ref() != Some(&key) {
            let tensor = self.pool.view(buffer, port.dtype, &key.dims)?;
            self.session.bind_output(binding, index, &tensor)?;
            outputs[index] = Some(key);
        }
        Ok(())
    }
}
