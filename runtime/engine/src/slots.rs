//! Slots: where weights lie that are inputs of their session. A resident stage has a slot of its own, filled once; streamed ones
//! share a ring of slots, filled again and again ahead of the runs that read them.
//!
//! A slot is a list of areas, the largest weight in the first ([`hpp_schema::in_slot`]), because not every device can look into the
//! middle of a buffer. Nothing else is known of a slot's contents than which stage's weights were copied there last.

mod load;
mod moving;
mod ring;

use crate::area::{Area, Areas};
use crate::error::BackendError;
use crate::meter::{Began, Meter, Ticket};
use crate::port::{Arrived, Backend, Dims, MemoryId};
use crate::stage::Act;
use crate::telemetry::Phase;
use ring::Ring;

/// All weights that are inputs.
pub(crate) struct Slots<B: Backend> {
    /// By stage; `None` where weights are constants.
    weights: Vec<Option<Weights<B>>>,
    rings: Vec<Ring<B>>,
    /// As many ones on the host as the largest area of a slot has bits, where slots are to be poisoned.
    poison: Option<Area<B>>,
}

/// One stage's weights.
pub(crate) struct Weights<B: Backend> {
    source: B::Source,
    /// In the order of the stage's inputs: sizes, and the area of a slot it goes to.
    pieces: Vec<(Dims, usize)>,
    /// Bytes of each area a slot needs, largest first.
    sizes: Vec<u64>,
    bytes: u64,
    memory: MemoryId,
    place: Place<B>,
}

/// Where a stage's weights lie when it runs.
enum Place<B: Backend> {
    /// In a slot of its own.
    Own(Vec<Area<B>>),
    /// In whatever slot of this ring holds them.
    Ring(usize),
}

impl<B: Backend> Weights<B> {
    /// Begins to copy all of them into a slot.
    fn upload(&self, areas: &Areas<B>, slot: &[Area<B>]) -> Result<B::Upload, BackendError> {
        let to: Vec<&B::Buffer> = self.pieces.iter().map(|(_, area)| &slot[*area].buffer).collect();
        areas.backend.upload(&self.source, &to)
    }
}

impl<B: Backend> Slots<B> {
    /// Whether this stage's weights are copied each time it runs.
    pub fn is_streamed(&self, stage: usize) -> bool {
        self.ring_of(stage).is_some()
    }

    fn ring_of(&self, stage: usize) -> Option<usize> {
        match self.weights[stage].as_ref()?.place {
            Place::Own(_) => None,
            Place::Ring(ring) => Some(ring),
        }
    }

    /// Where a weight of a stage lies, or will when its weights have arrived, and its sizes.
    pub fn weight(&self, stage: usize, number: usize) -> (&Area<B>, &Dims) {
        let weights = self.weights[stage].as_ref().expect("stages with such inputs have such weights");
        let (dims, area) = &weights.pieces[number];
        let slot = match &weights.place {
            Place::Own(slot) => slot,
            Place::Ring(ring) => self.rings[*ring].slot_of(stage),
        };
        (&slot[*area], dims)
    }

    /// A pass begins, behind which comes another of phase `then`.
    pub fn passing(&mut self, then: Phase) {
        self.rings.iter_mut().for_each(|ring| ring.supply.passing(then));
    }

    /// Begins to copy the weights of a stage that is about to run, where that was not done ahead.
    pub fn come(
        &mut self,
        areas: &Areas<B>,
        stage: usize,
        phase: Phase,
        meter: &mut Meter,
    ) -> Result<(), BackendError> {
        let Some(ring) = self.ring_of(stage) else { return Ok(()) };
        let Slots { weights, rings, poison } = self;
        let hit = rings[ring].come(areas, weights, poison.as_ref(), (stage, phase))?;
        meter.came_for_slot(hit);
        Ok(())
    }

    /// Sees to it that a streamed stage's run finds its weights; how long its device will have waited, where that was not done
    /// here.
    pub fn arrive(
        &mut self,
        areas: &Areas<B>,
        stage: usize,
        meter: &mut Meter,
    ) -> Result<Option<Ticket>, BackendError> {
        let Some(ring) = self.ring_of(stage) else { return Ok(None) };
        let bytes = self.weights[stage].as_ref().map_or(0, |weights| weights.bytes);
        let Some(Arrived { copy, stall }) = self.rings[ring].arrive(areas, stage)? else { return Ok(None) };
        meter.began(Began::Upload { stage, memory: self.rings[ring].memory, bytes }, copy);
        Ok(stall)
    }

    /// A stage has run: its slot is free for the next.
    pub fn leave(&mut self, areas: &Areas<B>, stage: usize) -> Result<(), BackendError> {
        match self.ring_of(stage) {
            None => Ok(()),
            Some(ring) => {
                self.rings[ring].leave(stage);
                self.fill_ring(areas, ring)
            }
        }
    }

    /// Copies ahead while there are free slots.
    pub fn fill(&mut self, areas: &Areas<B>) -> Result<(), BackendError> {
        (0..self.rings.len()).try_for_each(|ring| self.fill_ring(areas, ring))
    }

    fn fill_ring(&mut self, areas: &Areas<B>, ring: usize) -> Result<(), BackendError> {
        let Slots { weights, rings, poison } = self;
        rings[ring].fill(areas, weights, poison.as_ref())
    }

    /// Passes follow these schedules from now on. What lies in rings is forgotten.
    fn follow(&mut self, acts: [&[Act]; 2]) {
        for number in 0..self.rings.len() {
            let own = |act: &Act| match act {
                Act::Run(stage) if self.ring_of(*stage) == Some(number) => Some(*stage),
                _ => None,
            };
            let orders = acts.map(|acts| acts.iter().filter_map(own).collect());
            self.rings[number].follow(orders);
        }
    }
}
