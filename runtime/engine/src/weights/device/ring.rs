//! A ring: slots of one device that several stages share. Their weights are copied to free slots in the order in which passes need
//! them.

use super::super::prefetch::{Chunk, Prefetcher};
use super::StageWeights;
use crate::buffers::{Buffer, BufferPool};
use crate::error::BackendError;
use crate::ids::{Id, StageId};
use crate::port::{Backend, MemoryId, Uploaded};
use crate::telemetry::{PerPhase, Phase};
use hpp_schema::DType;

/// Slots of one device and what they hold.
pub(super) struct SlotRing<B: Backend> {
    pub memory: MemoryId,
    /// Its room is counted in slots.
    prefetcher: Prefetcher,
    ahead: bool,
    slots: Vec<Slot<B>>,
}

struct Slot<B: Backend> {
    buffers: Vec<Buffer<B>>,
    /// The stage whose weights are here or being copied here.
    stage: Option<StageId>,
    /// The copy, until it has been waited for.
    upload: Option<B::Upload>,
}

impl<B: Backend> SlotRing<B> {
    /// A ring of these slots, all free. Without `ahead`, weights are copied only when their stage runs next.
    pub fn new(memory: MemoryId, slots: Vec<Vec<Buffer<B>>>, ahead: bool) -> Self {
        let slots = slots.into_iter().map(|buffers| Slot { buffers, stage: None, upload: None }).collect();
        SlotRing { memory, prefetcher: Prefetcher::default(), ahead, slots }
    }

    /// Sets the stages in the order in which passes run them, and frees all slots.
    pub fn set_order(&mut self, order: &PerPhase<Vec<StageId>>) {
        let chunk = |stage: &StageId| Chunk { stage: *stage, index: 0, room: 1 };
        let orders = order.map(|stages| stages.iter().map(chunk).collect());
        self.prefetcher = Prefetcher::new(orders, self.slots.len() as u64, self.ahead);
        self.slots.iter_mut().for_each(|slot| slot.stage = None);
    }

    /// A pass starts. The pass after it will be of phase `next`.
    pub fn start_pass(&mut self, next: Phase) {
        self.prefetcher.start_pass(next);
    }

    /// The slot that was filled for a stage.
    pub fn slot_of(&self, stage: StageId) -> &[Buffer<B>] {
        let slot = self.slots.iter().find(|slot| slot.stage == Some(stage));
        &slot.expect("weights are fetched before they are bound").buffers
    }

    /// Whether a slot has a buffer for each of these sizes, largest first.
    pub fn fits(&self, sizes: &[u64]) -> bool {
        let fits = |slot: &Slot<B>| {
            sizes.len() <= slot.buffers.len()
                && sizes.iter().zip(&slot.buffers).all(|(bytes, buffer)| *bytes <= buffer.bytes)
        };
        self.slots.first().is_some_and(fits)
    }

    /// Whether the weights of a stage that runs next are in a slot or being copied to one.
    pub fn is_expected(&self, stage: StageId) -> bool {
        self.prefetcher.is_expected(stage)
    }

    /// Frees all slots and continues at a stage.
    pub fn restart(&mut self, phase: Phase, stage: StageId) {
        for evicted in self.prefetcher.restart(phase, stage) {
            self.release(evicted);
        }
    }

    /// The next stage to fill a slot for, if one is free.
    pub fn next_ahead(&mut self) -> Option<StageId> {
        self.prefetcher.next_ahead().map(|chunk| chunk.stage)
    }

    /// The next stage to fill a slot for, because it runs next.
    pub fn next_on_demand(&mut self) -> Option<StageId> {
        self.prefetcher.next_on_demand().map(|chunk| chunk.stage)
    }

    /// Waits for the copy of a stage's weights, or makes the device wait; `None` if that was done before.
    pub fn wait(&mut self, pool: &BufferPool<B>, stage: StageId) -> Result<Option<Uploaded>, BackendError> {
        let slot = self.slots.iter_mut().find(|slot| slot.stage == Some(stage));
        let upload = slot.and_then(|slot| slot.upload.take());
        upload.map(|upload| pool.backend.wait_upload(upload)).transpose()
    }

    /// Frees the slot of a stage.
    pub fn release(&mut self, stage: StageId) {
        self.prefetcher.release(stage);
        self.slots.iter_mut().filter(|slot| slot.stage == Some(stage)).for_each(|slot| slot.stage = None);
    }

    /// Starts to copy a stage's weights to a free slot.
    pub fn fill_slot(
        &mut self,
        pool: &BufferPool<B>,
        weights: &StageWeights<B>,
        poison: Option<&Buffer<B>>,
        stage: StageId,
    ) -> Result<(), BackendError> {
        let free = self.slots.iter_mut().find(|slot| slot.stage.is_none());
        let slot = free.ok_or_else(|| BackendError::Misfit {
            what: format!("the weights of stage {}", stage.index()),
            why: "every slot of their device is in use".into(),
        })?;
        // A copy for a stage that never ran must end before another copy to the same buffers starts.
        if let Some(unused) = slot.upload.take() {
            pool.backend.wait_upload(unused)?;
        }
        if let Some(poison) = poison {
            for buffer in &slot.buffers {
                let ones = pool.view(poison, DType::Uint8, &[buffer.bytes])?;
                pool.backend.copy(&ones, &pool.view(buffer, DType::Uint8, &[buffer.bytes])?)?;
            }
        }
        slot.upload = Some(weights.upload(pool, &slot.buffers)?);
        slot.stage = Some(stage);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{RingId, StageSlot, WeightBuffer};
    use super::*;
    use crate::mock::MockBackend;
    use crate::port::{Dims, HostCopy, WeightLocation};

    #[test]
    fn weights_that_find_no_free_slot_are_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("weights");
        std::fs::write(&file, [0; 4]).unwrap();
        let memory = MemoryId(1);
        let pool = BufferPool::new(MockBackend::new());
        let location = [WeightLocation { file, offset: 0, bytes: 4 }];
        let source = pool.backend.upload_source(&location, memory, HostCopy::default()).unwrap();
        let inputs = vec![(Dims::from_slice(&[4]), WeightBuffer::Slot(0))];
        let slot = StageSlot::Ring(RingId::new(0));
        let weights = StageWeights { source, inputs, on_host: vec![], slot_sizes: vec![4], bytes: 4, memory, slot };
        let mut ring = SlotRing::new(memory, vec![vec![pool.reserve(memory, 4).unwrap()]], true);
        let [first, second] = [StageId::new(0), StageId::new(1)];
        ring.set_order(&PerPhase { prefill: vec![], decode: vec![first, second] });
        ring.fill_slot(&pool, &weights, None, first).unwrap();
        let error = ring.fill_slot(&pool, &weights, None, second).unwrap_err().to_string();
        assert!(error.contains("stage 1") && error.contains("slot"), "{error}");
        ring.release(first);
        ring.fill_slot(&pool, &weights, None, second).unwrap();
        assert_eq!(ring.slot_of(second).len(), 1);
    }
}
