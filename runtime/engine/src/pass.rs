//! A pass: one walk through the schedule with some tokens of one sequence.
//!
//! A port is only bound anew when the area or the shape it needs differs from what its binding holds. While decoding that
//! leaves the mask and appended states; everything else stays bound and its bytes change in place.

use crate::area::Key;
use crate::engine::{Engine, same};
use crate::error::EngineError;
use crate::feed::Content;
use crate::meter::Took;
use crate::port::{Backend, Session};
use crate::sequence::Sequence;
use crate::shape::Sizes;
use crate::stage::{Act, Bound, From, To};
use crate::telemetry::Phase;
use crate::tensor::HostTensor;
use std::collections::BTreeMap;

/// What one pass takes in.
pub(crate) struct Pass<'a> {
    pub content: Content<'a>,
    pub sizes: Sizes,
    /// Index in this pass of the first position whose scores are wanted.
    pub rows_from: u64,
    pub extra: &'a BTreeMap<String, HostTensor>,
}

impl Pass<'_> {
    fn phase(&self) -> Phase {
        if self.sizes.sequence == 1 && self.sizes.past > 0 { Phase::Decode } else { Phase::Prefill }
    }
}

impl<B: Backend> Engine<B> {
    /// Runs a pass; on success the sequence's states have moved on, on failure the sequence is not to be used again.
    pub(crate) fn pass(&mut self, sequence: &mut Sequence<B>, pass: &Pass<'_>) -> Result<(), EngineError> {
        let from = self.areas.backend.now();
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
        self.follow(phase, sequence, &pass.sizes)?;
        self.read_taps()?;
        sequence.interrupted = false;
        sequence.stores.iter_mut().for_each(crate::state::Store::commit);
        self.meter.passed(phase, pass.sizes.sequence, Took { from, to: self.areas.backend.now() });
        Ok(())
    }

    fn follow(&mut self, phase: Phase, sequence: &mut Sequence<B>, sizes: &Sizes) -> Result<(), EngineError> {
        let steps = match phase {
            Phase::Prefill => self.prefill.len(),
            Phase::Decode => self.decode.len(),
        };
        for step in 0..steps {
            // Schedules never change after loading; taking the act out for a moment lets the engine change meanwhile.
            let schedule = if phase == Phase::Prefill { &mut self.prefill } else { &mut self.decode };
            let act = std::mem::replace(&mut schedule[step], Act::Run(usize::MAX));
            let done = match &act {
                Act::Run(stage) => self.run(*stage, phase, sequence, sizes),
                Act::Copy(moves) => self.move_ahead(moves),
            };
            let schedule = if phase == Phase::Prefill { &mut self.prefill } else { &mut self.decode };
            schedule[step] = act;
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
        sizes: &Sizes,
    ) -> Result<(), EngineError> {
        self.check_cancelled()?;
        self.bind_inputs(stage, sequence, sizes)?;
        self.bind_outputs(stage, sequence, sizes)?;
        self.weights_arrive(stage)?;
        let from = self.areas.backend.now();
        let bound = &mut sequence.bound[stage];
        let at = &mut self.stages[stage];
        at.session.run(&mut bound.binding, &self.control).map_err(|source| at.failed("running", source))?;
        self.meter.ran(stage, phase, Took { from, to: self.areas.backend.now() });
        self.weights_leave(stage)?;
        self.take_states_home(stage, sequence, sizes)?;
        self.take_outputs(stage, sequence)
    }

    fn take_states_home(&mut self, stage: usize, sequence: &Sequence<B>, sizes: &Sizes) -> Result<(), EngineError> {
        let Engine { stages, layouts, visits, areas, meter, .. } = self;
        for to in &stages[stage].outputs {
            let To::State(number) = *to else { continue };
            if let Some(home) = sequence.stores[number].present(&layouts[number], sizes.total()) {
                visits.leave(areas, number, &layouts[number], home, meter)?;
            }
        }
        Ok(())
    }

    fn bind_inputs(&mut self, stage: usize, sequence: &mut Sequence<B>, sizes: &Sizes) -> Result<(), EngineError> {
        let Engine { stages, feeds, boundaries, layouts, visits, areas, meter, .. } = self;
        let at = &stages[stage];
        let Sequence { stores, bound, .. } = sequence;
        let Bound { binding, inputs, .. } = &mut bound[stage];
        for (index, (from, memory)) in at.inputs.iter().enumerate() {
            let held = &mut inputs[index];
            let failed =
                |source| at.failed(&format!("being given input {:?}", at.session.inputs()[index].name), source);
            let dtype = at.session.inputs()[index].dtype;
            match *from {
                From::Feed(number) => {
                    let feed = &feeds[number];
                    let area = feed.area(*memory);
                    if !same(held, area, &feed.dims) {
                        let view = areas.view(area, dtype, &feed.dims).map_err(failed)?;
                        at.session.bind_input(binding, index, &view).map_err(failed)?;
                        *held = Some(Key { serial: area.serial, dims: feed.dims.clone() });
                    }
                }
                From::State(number) => {
                    let layout = &layouts[number];
                    let home = stores[number].past(layout, sizes.past)?;
                    let (area, key) = visits.past(areas, number, layout, home, meter)?;
                    if held.as_ref() != Some(&key) {
                        let view = areas.view(area, dtype, &key.dims).map_err(failed)?;
                        at.session.bind_input(binding, index, &view).map_err(failed)?;
                        *held = Some(key);
                    }
                }
                From::Boundary(number) => {
                    let boundary = &mut boundaries[number];
                    boundary.ensure(areas, *memory, meter)?;
                    let Some((source, key)) = boundary.source(*memory) else {
                        return Err(EngineError::MissingInput { name: boundary.name.clone(), dtype });
                    };
                    if held.as_ref() != Some(&key) {
                        let bind = |tensor: &B::Tensor| at.session.bind_input(binding, index, tensor);
                        source.with(areas, dtype, &key, bind).map_err(failed)?;
                        *held = Some(key);
                    }
                }
            }
        }
        Ok(())
    }

    fn bind_outputs(&mut self, stage: usize, sequence: &mut Sequence<B>, sizes: &Sizes) -> Result<(), EngineError> {
        let Engine { stages, boundaries, layouts, visits, areas, taps, .. } = self;
        let at = &stages[stage];
        let Sequence { stores, bound, .. } = sequence;
        let Bound { binding, outputs, .. } = &mut bound[stage];
        for (index, to) in at.outputs.iter().enumerate() {
            let held = &mut outputs[index];
            let failed =
                |source| at.failed(&format!("being given output {:?}", at.session.outputs()[index].name), source);
            let room = match *to {
                To::Unknown => continue,
                To::Spare(number) if !taps.wanted.contains(&number) => continue,
                To::State(number) => match stores[number].present(&layouts[number], sizes.total()) {
                    Some(home) => Some(visits.present(number, home)),
                    None => continue,
                },
                To::Logits(number) | To::Boundary(number) | To::Spare(number) => boundaries[number].room(areas)?,
            };
            match room {
                None => {
                    at.session.bind_output_unknown(binding, index).map_err(failed)?;
                    *held = None;
                }
                Some((area, key)) if held.as_ref() != Some(&key) => {
                    let view = areas.view(area, at.session.outputs()[index].dtype, &key.dims).map_err(failed)?;
                    at.session.bind_output(binding, index, &view).map_err(failed)?;
                    *held = Some(key);
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn take_outputs(&mut self, stage: usize, sequence: &mut Sequence<B>) -> Result<(), EngineError> {
        let Engine { stages, boundaries, areas, taps, .. } = self;
        let at = &stages[stage];
        let Bound { binding, outputs, .. } = &mut sequence.bound[stage];
        for (index, to) in at.outputs.iter().enumerate() {
            let number = match *to {
                To::Unknown | To::State(_) => continue,
                To::Spare(number) if !taps.wanted.contains(&number) => continue,
                To::Logits(number) | To::Boundary(number) | To::Spare(number) => number,
            };
            let taken = match outputs[index] {
                Some(_) => None,
                None => {
                    let taken = at.session.take_output(binding, index);
                    Some(taken.map_err(|source| at.failed("handing over its outputs", source))?)
                }
            };
            boundaries[number].produced(areas, taken);
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
