//! A pass: one walk through the schedule with some tokens of one sequence.
//!
//! A port is only bound anew when the area or the shape it needs differs from what its binding holds. While decoding that
//! leaves the mask and appended states; everything else stays bound and its bytes change in place.

use crate::area::Key;
use crate::engine::{Engine, same};
use crate::error::EngineError;
use crate::feed::Content;
use crate::meter::{Began, Time, Took};
use crate::port::{Backend, MemoryId, Session};
use crate::sequence::Sequence;
use crate::shape::Sizes;
use crate::stage::{Act, Bound, Entrance, Exit, From, To};
use crate::telemetry::Phase;
use crate::tensor::HostTensor;
use crate::visit::{Arrives, Leaves};
use std::collections::BTreeMap;

/// What one pass takes in.
pub(crate) struct Pass<'a> {
    pub content: Content<'a>,
    pub sizes: Sizes,
    /// Index in this pass of the first position whose scores are wanted.
    pub rows_from: u64,
    /// Whether it is the first and whether it is the last of the passes that take this input in.
    pub first: bool,
    pub last: bool,
    pub extra: &'a BTreeMap<String, HostTensor>,
}

impl Pass<'_> {
    fn phase(&self) -> Phase {
        // The last of several passes is no decoding, though it may be of one token: states are where those before left them.
        let alone = self.first && self.last;
        if alone && self.sizes.sequence == 1 && self.sizes.past > 0 { Phase::Decode } else { Phase::Prefill }
    }
}

impl<B: Backend> Engine<B> {
    /// Runs a pass; on success the sequence's states have moved on, on failure the sequence is not to be used again.
    pub(crate) fn pass(&mut self, sequence: &mut Sequence<B>, pass: &Pass<'_>) -> Result<(), EngineError> {
        let from = self.areas.backend.now();
        self.meter.pass.begin();
        self.check_cancelled()?;
        for feed in &mut self.feeds {
            feed.write(&self.areas, pass.content, pass.rows_from, &pass.sizes, pass.extra, &mut self.meter)?;
        }
        self.boundaries.iter_mut().for_each(|boundary| boundary.begin(&pass.sizes));
        if sequence.taps != self.taps.version {
            (sequence.bound, sequence.taps) = (self.bindings()?, self.taps.version);
        }
        let phase = pass.phase();
        sequence.interrupted = true;
        self.passing(if pass.last { Phase::Decode } else { Phase::Prefill })?;
        self.follow(phase, sequence, pass)?;
        if pass.last && self.visits.any_own() {
            self.hand_over(phase, sequence, pass)?;
        }
        self.wait_for_devices()?;
        self.watch.check()?;
        self.read_taps()?;
        sequence.interrupted = false;
        sequence.stores.iter_mut().for_each(crate::state::Store::commit);
        self.meter.passed(phase, pass.sizes.sequence, Took { from, to: self.areas.backend.now() });
        Ok(())
    }

    fn follow(&mut self, phase: Phase, sequence: &mut Sequence<B>, pass: &Pass<'_>) -> Result<(), EngineError> {
        for step in 0..self.acts[phase as usize].len() {
            // Schedules never change in a pass; taking the act out for a moment lets the engine change meanwhile.
            let act = std::mem::replace(&mut self.acts[phase as usize][step], Act::Run(usize::MAX));
            let done = match &act {
                Act::Run(stage) => self.run(*stage, phase, sequence, pass),
                Act::Copy(moves) => self.move_ahead(moves),
            };
            self.acts[phase as usize][step] = act;
            done?;
        }
        Ok(())
    }

    fn move_ahead(&mut self, moves: &[(usize, Vec<crate::port::MemoryId>)]) -> Result<(), EngineError> {
        for (value, memories) in moves {
            for memory in memories {
                self.boundaries[*value].ensure(&self.areas, *memory, &mut self.meter)?;
            }
        }
        Ok(())
    }

    fn run(
        &mut self,
        stage: usize,
        phase: Phase,
        sequence: &mut Sequence<B>,
        pass: &Pass<'_>,
    ) -> Result<(), EngineError> {
        self.check_cancelled()?;
        self.weights_come(stage, phase)?;
        self.bind_inputs(stage, sequence, pass)?;
        self.bind_outputs(stage, sequence, &pass.sizes)?;
        self.weights_arrive(stage)?;
        let from = self.areas.backend.now();
        let Engine { stages, sessions, control, .. } = self;
        let session = &mut sessions[stages[stage].session];
        let ran = session.run(&mut sequence.bound[stage].binding, control);
        let ticket = match ran.map_err(|source| stages[stage].failed("running", source)) {
            Ok(ticket) => ticket,
            Err(error) => {
                // A run that was cancelled has used its weights like any other; the next pass brings them anew.
                let _ = self.weights_leave(stage);
                return Err(error);
            }
        };
        let known = || Time::Known(Took { from, to: self.areas.backend.now() });
        self.meter.began(Began::Run { stage, phase }, ticket.map_or_else(known, Time::Later));
        self.weights_leave(stage)?;
        self.take_states_home(stage, sequence, pass, Leaves::AfterTheRun)?;
        self.take_outputs(stage, sequence)
    }

    /// States that stayed where this phase computes on them go to where they lie: what comes from devices first.
    fn hand_over(&mut self, phase: Phase, sequence: &Sequence<B>, pass: &Pass<'_>) -> Result<(), EngineError> {
        for to_host in [true, false] {
            for number in 0..self.by_phase[phase as usize].len() {
                let stage = self.by_phase[phase as usize][number];
                let on_host = |state: usize| self.layouts[state].memory == MemoryId::HOST;
                if self.stages[stage].states().all(|state| on_host(state) == to_host) {
                    self.take_states_home(stage, sequence, pass, Leaves::AfterTheLastPass)?;
                }
            }
        }
        Ok(())
    }

    fn take_states_home(
        &mut self,
        stage: usize,
        sequence: &Sequence<B>,
        pass: &Pass<'_>,
        leaves: Leaves,
    ) -> Result<(), EngineError> {
        let Engine { stages, layouts, visits, areas, meter, .. } = self;
        for exit in &stages[stage].outputs {
            let To::State(number) = exit.to else { continue };
            if let Some(home) = sequence.stores[number].present(&layouts[number], pass.sizes.total()) {
                visits.leave(areas, (stage, number), &layouts[number], home, leaves, meter)?;
            }
        }
        Ok(())
    }

    fn bind_inputs(&mut self, stage: usize, sequence: &mut Sequence<B>, pass: &Pass<'_>) -> Result<(), EngineError> {
        let Engine { stages, sessions, feeds, boundaries, layouts, visits, slots, areas, meter, .. } = self;
        let at = &stages[stage];
        let session = &sessions[at.session];
        let Sequence { stores, bound, .. } = sequence;
        let Bound { binding, inputs, .. } = &mut bound[stage];
        for (index, Entrance { port, from }) in at.inputs.iter().enumerate() {
            let held = &mut inputs[index];
            let failed = |source| at.failed(&format!("being given input {:?}", port.name), source);
            match *from {
                From::Feed(number) => {
                    let feed = &feeds[number];
                    let area = feed.area(port.memory);
                    if !same(held, area, &feed.dims) {
                        let view = areas.view(area, port.dtype, &feed.dims).map_err(failed)?;
                        session.bind_input(binding, index, &view).map_err(failed)?;
                        *held = Some(Key { serial: area.serial, dims: feed.dims.clone() });
                    }
                }
                From::Weight(number) => {
                    let (area, dims) = slots.weight(stage, number);
                    if !same(held, area, dims) {
                        let view = areas.view(area, port.dtype, dims).map_err(failed)?;
                        session.bind_input(binding, index, &view).map_err(failed)?;
                        *held = Some(Key { serial: area.serial, dims: dims.clone() });
                    }
                }
                From::State(number) => {
                    let layout = &layouts[number];
                    let home = stores[number].past(layout, pass.sizes.past)?;
                    let arrives = Arrives { first: pass.first, past: pass.sizes.past };
                    let (area, key) = visits.past(areas, (stage, number), layout, home, arrives, meter)?;
                    if held.as_ref() != Some(&key) {
                        let view = areas.view(area, port.dtype, &key.dims).map_err(failed)?;
                        session.bind_input(binding, index, &view).map_err(failed)?;
                        *held = Some(key);
                    }
                }
                From::Boundary(number) => {
                    let boundary = &mut boundaries[number];
                    boundary.ensure(areas, port.memory, meter)?;
                    let Some((source, key)) = boundary.source(port.memory) else {
                        return Err(EngineError::MissingInput { name: boundary.name.clone(), dtype: port.dtype });
                    };
                    if held.as_ref() != Some(&key) {
                        let bind = |tensor: &B::Tensor| session.bind_input(binding, index, tensor);
                        source.with(areas, port.dtype, &key, bind).map_err(failed)?;
                        *held = Some(key);
                    }
                }
            }
        }
        Ok(())
    }

    fn bind_outputs(&mut self, stage: usize, sequence: &mut Sequence<B>, sizes: &Sizes) -> Result<(), EngineError> {
        let Engine { stages, sessions, boundaries, layouts, visits, areas, taps, .. } = self;
        let at = &stages[stage];
        let session = &sessions[at.session];
        let Sequence { stores, bound, .. } = sequence;
        let Bound { binding, outputs, .. } = &mut bound[stage];
        for (index, Exit { port, to }) in at.outputs.iter().enumerate() {
            let held = &mut outputs[index];
            let failed = |source| at.failed(&format!("being given output {:?}", port.name), source);
            let room = match *to {
                To::Unknown => continue,
                To::Spare(number) if !taps.wanted.contains(&number) => continue,
                To::State(number) => match stores[number].present(&layouts[number], sizes.total()) {
                    Some(home) => Some(visits.present((stage, number), home)),
                    None => continue,
                },
                To::Logits(number) | To::Boundary(number) | To::Spare(number) => {
                    boundaries[number].room(areas, port.memory)?
                }
            };
            match room {
                None => {
                    session.bind_output_unknown(binding, index).map_err(failed)?;
                    *held = None;
                }
                Some((area, key)) if held.as_ref() != Some(&key) => {
                    let view = areas.view(area, port.dtype, &key.dims).map_err(failed)?;
                    session.bind_output(binding, index, &view).map_err(failed)?;
                    *held = Some(key);
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn take_outputs(&mut self, stage: usize, sequence: &mut Sequence<B>) -> Result<(), EngineError> {
        let Engine { stages, sessions, boundaries, areas, taps, .. } = self;
        let at = &stages[stage];
        let Bound { binding, outputs, .. } = &mut sequence.bound[stage];
        for (index, Exit { port, to }) in at.outputs.iter().enumerate() {
            let number = match *to {
                To::Unknown | To::State(_) => continue,
                To::Spare(number) if !taps.wanted.contains(&number) => continue,
                To::Logits(number) | To::Boundary(number) | To::Spare(number) => number,
            };
            let taken = match outputs[index] {
                Some(_) => None,
                None => {
                    let taken = sessions[at.session].take_output(binding, index);
                    Some(taken.map_err(|source| at.failed("handing over its outputs", source))?)
                }
            };
            boundaries[number].produced(areas, port.memory, taken);
        }
        Ok(())
    }

    fn read_taps(&mut self) -> Result<(), EngineError> {
        for number in &self.taps.wanted {
            let tensor = self.boundaries[*number].read(&self.areas)?;
            self.taps.read.insert(self.boundaries[*number].name.clone(), tensor);
        }
        Ok(())
    }
}
