//! A ring: slots of one device through which the weights of several stages go, in the order passes need them.

use super::Weights;
use crate::area::{Area, Areas};
use crate::error::BackendError;
use crate::port::{Arrived, Backend, MemoryId};
use crate::supply::{Chunk, Supply};
use crate::telemetry::Phase;
use hpp_schema::DType;

/// Slots of one device, and what they hold.
pub(crate) struct Ring<B: Backend> {
    pub memory: MemoryId,
    /// What is copied when, in slots.
    pub supply: Supply,
    ahead: bool,
    slots: Vec<Slot<B>>,
}

struct Slot<B: Backend> {
    areas: Vec<Area<B>>,
    /// The stage whose weights are there or on their way.
    stage: Option<usize>,
    /// Their copy, until somebody has waited for it.
    upload: Option<B::Upload>,
}

impl<B: Backend> Ring<B> {
    /// A ring of these slots, each a list of areas; nothing is copied yet. Without `ahead`, nothing is copied before a stage is
    /// about to run.
    pub fn new(memory: MemoryId, slots: Vec<Vec<Area<B>>>, ahead: bool) -> Self {
        let slots = slots.into_iter().map(|areas| Slot { areas, stage: None, upload: None }).collect();
        Ring { memory, supply: Supply::default(), ahead, slots }
    }

    /// Stages, in the order passes of each phase need them.
    pub fn follow(&mut self, orders: [Vec<usize>; 2]) {
        let chunk = |stage: usize| Chunk { stage, number: 0, room: 1 };
        let orders = orders.map(|stages| stages.into_iter().map(chunk).collect());
        self.supply = Supply::new(orders, self.slots.len() as u64, self.ahead);
        self.slots.iter_mut().for_each(|slot| slot.stage = None);
    }

    /// The slot that holds a stage's weights or will when they have arrived.
    pub fn slot_of(&self, stage: usize) -> &[Area<B>] {
        let slot = self.slots.iter().find(|slot| slot.stage == Some(stage));
        &slot.expect("weights come before they are bound").areas
    }

    /// Whether a slot has an area for each of these sizes, largest first.
    pub fn holds(&self, sizes: &[u64]) -> bool {
        let fits = |slot: &Slot<B>| {
            sizes.len() <= slot.areas.len() && sizes.iter().zip(&slot.areas).all(|(bytes, area)| *bytes <= area.bytes)
        };
        self.slots.first().is_some_and(fits)
    }

    /// Sees to it that a stage's weights are on their way; whether they were before.
    pub fn come(
        &mut self,
        areas: &Areas<B>,
        weights: &[Option<Weights<B>>],
        poison: Option<&Area<B>>,
        (stage, phase): (usize, Phase),
    ) -> Result<bool, BackendError> {
        if self.supply.is_due(stage) {
            return Ok(true);
        }
        for held in self.supply.begin_again(phase, stage) {
            self.leave(held);
        }
        match self.supply.next_now() {
            Some(chunk) => self.begin(areas, weights, poison, chunk.stage).map(|()| false),
            None => Ok(false),
        }
    }

    /// Sees to it that a stage's run finds its weights, if nobody has before.
    pub fn arrive(&mut self, areas: &Areas<B>, stage: usize) -> Result<Option<Arrived>, BackendError> {
        let slot = self.slots.iter_mut().find(|slot| slot.stage == Some(stage));
        let upload = slot.and_then(|slot| slot.upload.take());
        upload.map(|upload| areas.backend.arrive(upload)).transpose()
    }

    /// A stage's slot is free.
    pub fn leave(&mut self, stage: usize) {
        self.supply.left(stage);
        self.slots.iter_mut().filter(|slot| slot.stage == Some(stage)).for_each(|slot| slot.stage = None);
    }

    /// Copies ahead while there are free slots.
    pub fn fill(
        &mut self,
        areas: &Areas<B>,
        weights: &[Option<Weights<B>>],
        poison: Option<&Area<B>>,
    ) -> Result<(), BackendError> {
        while let Some(chunk) = self.supply.next_in_room() {
            self.begin(areas, weights, poison, chunk.stage)?;
        }
        Ok(())
    }

    fn begin(
        &mut self,
        areas: &Areas<B>,
        weights: &[Option<Weights<B>>],
        poison: Option<&Area<B>>,
        stage: usize,
    ) -> Result<(), BackendError> {
        let Some(weights) = &weights[stage] else { return Ok(()) };
        let free = self.slots.iter_mut().find(|slot| slot.stage.is_none());
        let slot = free.ok_or_else(|| BackendError::Misfit {
            what: format!("the weights of stage {stage}"),
            why: "every slot of their device holds those of another".into(),
        })?;
        // What was copied here for a stage that never ran is waited for, or two copies would go to one place.
        if let Some(unread) = slot.upload.take() {
            areas.backend.arrive(unread)?;
        }
        if let Some(poison) = poison {
            for area in &slot.areas {
                let ones = areas.view(poison, DType::Uint8, &[area.bytes])?;
                areas.backend.copy(&ones, &areas.view(area, DType::Uint8, &[area.bytes])?)?;
            }
        }
        slot.upload = Some(weights.upload(areas, &slot.areas)?);
        slot.stage = Some(stage);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Place;
    use super::*;
    use crate::mock::MockBackend;
    use crate::port::{Dims, Hold, WeightSpec};

    #[test]
    fn weights_that_find_no_free_slot_are_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("weights");
        std::fs::write(&file, [0; 4]).unwrap();
        let memory = MemoryId(1);
        let areas = Areas::new(MockBackend::new());
        let weights: Vec<Option<Weights<MockBackend>>> = (0..2)
            .map(|_| {
                let spec = [WeightSpec { file: file.clone(), offset: 0, bytes: 4 }];
                let source = areas.backend.source(&spec, memory, Hold::default()).unwrap();
                let (pieces, place) = (vec![(Dims::from_slice(&[4]), 0)], Place::Ring(0));
                Some(Weights { source, pieces, sizes: vec![4], bytes: 4, memory, place })
            })
            .collect();
        let mut ring = Ring::new(memory, vec![vec![areas.reserve(memory, 4).unwrap()]], true);
        ring.follow([vec![], vec![0, 1]]);
        ring.begin(&areas, &weights, None, 0).unwrap();
        let error = ring.begin(&areas, &weights, None, 1).unwrap_err().to_string();
        assert!(error.contains("stage 1") && error.contains("slot"), "{error}");
        ring.leave(0);
        ring.begin(&areas, &weights, None, 1).unwrap();
        assert_eq!(ring.slot_of(1).len(), 1);
    }
}
