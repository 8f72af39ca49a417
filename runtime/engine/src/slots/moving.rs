//! Moving a partition between two tokens: from a slot of its own into the ring and back, or from one device to another where the
//! plan has it in both forms. No session is made for it, and no token changes.

use super::load::{human, reserve};
use super::{Place, Slots};
use crate::area::Areas;
use crate::engine::Engine;
use crate::error::{BackendError, EngineError};
use crate::port::Backend;
use crate::stage::Act;
use crate::telemetry::Phase;
use hpp_schema::Residency;

impl<B: Backend> Engine<B> {
    /// Keeps a partition's weights on their device from now on, or streams them there for each run. They must be inputs of its
    /// file, and to be streamed the device must have a ring. On an error nothing has changed.
    pub fn keep(&mut self, partition: &str, residency: Residency) -> Result<(), EngineError> {
        let on_device = |stage: &&usize| self.slots.weights[**stage].is_some();
        let stage = self.stages_of(partition)?.iter().find(on_device).copied();
        let stage = stage.ok_or_else(|| refused(partition, "its weights are constants of its session"))?;
        let failed = |source| EngineError::Memory { what: format!("the weights of {partition}"), source };
        match residency {
            Residency::Resident => self.slots.promote(&self.areas, stage).map_err(failed)?,
            Residency::Streamed => self.slots.demote(stage).map_err(|why| refused(partition, &why))?,
            Residency::Mapped => return Err(refused(partition, "weights that are inputs are not read from files")),
        }
        self.follow_anew()
    }

    /// Lets a partition compute on another device of its own while decoding: the one it has while the prompt is taken in, or
    /// the one it had before. Its state stays where it is and visits.
    pub fn decode_on(&mut self, partition: &str, device: &str) -> Result<(), EngineError> {
        let stage = self.stages_of(partition)?.into_iter().find(|stage| self.stages[*stage].device == device);
        let stage = stage.ok_or_else(|| refused(partition, &format!("the plan does not have it on {device}")))?;
        let number = self.stages[stage].partition;
        let before = std::mem::replace(&mut self.by_phase[Phase::Decode as usize][number], stage);
        for act in &mut self.acts[Phase::Decode as usize] {
            if *act == Act::Run(before) {
                *act = Act::Run(stage);
            }
        }
        self.follow_anew()
    }

    fn stages_of(&self, partition: &str) -> Result<Vec<usize>, EngineError> {
        let own = |(number, stage): (usize, &crate::stage::Stage)| (stage.name == partition).then_some(number);
        let stages: Vec<usize> = self.stages.iter().enumerate().filter_map(own).collect();
        if stages.is_empty() { Err(refused(partition, "the plan has no such partition")) } else { Ok(stages) }
    }

    fn follow_anew(&mut self) -> Result<(), EngineError> {
        self.slots.follow([&self.acts[0], &self.acts[1]]);
        self.bring_ahead()
    }
}

fn refused(partition: &str, why: &str) -> EngineError {
    EngineError::CannotMove { partition: partition.to_owned(), why: why.to_owned() }
}

impl<B: Backend> Slots<B> {
    /// Gives a stage a slot of its own and fills it.
    fn promote(&mut self, areas: &Areas<B>, stage: usize) -> Result<(), BackendError> {
        let Some(weights) = self.weights[stage].as_mut().filter(|weights| matches!(weights.place, Place::Ring(_)))
        else {
            return Ok(());
        };
        let slot = reserve(areas, &weights.sizes, weights.memory)?;
        let upload = weights.upload(areas, &slot)?;
        areas.backend.arrive(upload)?;
        weights.place = Place::Own(slot);
        Ok(())
    }

    /// Streams a stage through its device's ring, and gives its own slot back.
    fn demote(&mut self, stage: usize) -> Result<(), String> {
        let Some(weights) = self.weights[stage].as_mut() else { return Ok(()) };
        let Some(number) = self.rings.iter().position(|ring| ring.memory == weights.memory) else {
            return Err("its device has no ring to stream weights through".into());
        };
        if !self.rings[number].holds(&weights.sizes) {
            return Err(format!("its {} do not fit into a slot", human(&weights.sizes)));
        }
        weights.place = Place::Ring(number);
        Ok(())
    }
}
