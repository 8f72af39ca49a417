//! The device tier: weights that are inputs of their session and lie in slots of device memory. A resident stage has a slot of its
//! own, filled once at load; streamed stages share a ring of slots, filled ahead of each run.
//!
//! A slot is a list of buffers, the largest weight in the first ([`hpp_schema::in_slot`]), because not every device can address the
//! middle of a buffer.
//!
//! A provider may compute a node on the host and wants the weights of that node there. Those stay in host memory and are never copied.

mod load;
mod residency;
mod ring;

pub(crate) use load::DeviceTierConfig;

use super::{TierContext, Waited, WeightTier};
use crate::buffers::{Buffer, BufferPool};
use crate::error::BackendError;
use crate::ids::{Id, IndexVec, StageId};
use crate::port::{Backend, Dims, MemoryId, Uploaded};
use crate::telemetry::{Awaited, DeviceEvent, PerPhase, Phase};
use ring::SlotRing;

/// All weights that are inputs.
pub(crate) struct DeviceTier<B: Backend> {
    /// `None` where all weights of a stage are constants.
    weights: IndexVec<StageId, Option<StageWeights<B>>>,
    rings: IndexVec<RingId, SlotRing<B>>,
    /// All ones, as large as the largest buffer of a slot; copied to a slot before its weights if slots are poisoned.
    poison: Option<Buffer<B>>,
}

/// A ring of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RingId(u32);

impl Id for RingId {
    fn new(index: usize) -> Self {
        RingId(index as u32)
    }
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// The weights of one stage.
struct StageWeights<B: Backend> {
    /// The weights that are copied to slots.
    source: B::UploadSource,
    /// In the order of the stage's inputs: the weight's shape and its buffer.
    inputs: Vec<(Dims, WeightBuffer)>,
    /// The weights that stay in host memory.
    on_host: Vec<Buffer<B>>,
    /// Bytes of each buffer of a slot, largest first.
    slot_sizes: Vec<u64>,
    /// Bytes of the weights that are copied to slots.
    bytes: u64,
    memory: MemoryId,
    slot: StageSlot<B>,
}

/// The buffer of one weight, by its index.
#[derive(Clone, Copy)]
enum WeightBuffer {
    /// In the stage's slot.
    Slot(usize),
    /// In [`StageWeights::on_host`].
    Host(usize),
}

/// Where a stage's weights lie when it runs.
enum StageSlot<B: Backend> {
    /// In a slot of their own.
    Resident(Vec<Buffer<B>>),
    /// In the slot of this ring that was filled for the stage.
    Ring(RingId),
}

impl<B: Backend> StageWeights<B> {
    /// Starts to copy the weights into a slot, except for those that stay in host memory.
    fn upload(&self, pool: &BufferPool<B>, slot: &[Buffer<B>]) -> Result<B::Upload, BackendError> {
        let in_slot = self.inputs.iter().filter_map(|(_, buffer)| match buffer {
            WeightBuffer::Slot(index) => Some(&slot[*index].handle),
            WeightBuffer::Host(_) => None,
        });
        let buffers: Vec<&B::Buffer> = in_slot.collect();
        pool.backend.upload(&self.source, &buffers)
    }
}

impl<B: Backend> DeviceTier<B> {
    fn ring_of(&self, stage: StageId) -> Option<RingId> {
        match self.weights[stage].as_ref()?.slot {
            StageSlot::Resident(_) => None,
            StageSlot::Ring(ring) => Some(ring),
        }
    }

    /// The buffer and shape of a weight that is an input of a stage. Streamed weights must have been fetched.
    pub fn input(&self, stage: StageId, index: usize) -> (&Buffer<B>, &Dims) {
        let weights = self.weights[stage].as_ref().expect("a stage with weight inputs has device weights");
        let (dims, buffer) = &weights.inputs[index];
        let buffer = match (*buffer, &weights.slot) {
            (WeightBuffer::Host(index), _) => &weights.on_host[index],
            (WeightBuffer::Slot(index), StageSlot::Resident(slot)) => &slot[index],
            (WeightBuffer::Slot(index), StageSlot::Ring(ring)) => &self.rings[*ring].slot_of(stage)[index],
        };
        (buffer, dims)
    }

    fn fill_ring(&mut self, pool: &BufferPool<B>, ring: RingId) -> Result<(), BackendError> {
        while let Some(stage) = self.rings[ring].next_ahead() {
            self.fill_slot(pool, ring, stage)?;
        }
        Ok(())
    }

    fn fill_slot(&mut self, pool: &BufferPool<B>, ring: RingId, stage: StageId) -> Result<(), BackendError> {
        match &self.weights[stage] {
            Some(weights) => self.rings[ring].fill_slot(pool, weights, self.poison.as_ref(), stage),
            None => Ok(()),
        }
    }
}

impl<B: Backend> WeightTier<B> for DeviceTier<B> {
    fn serves(&self, stage: StageId) -> bool {
        self.ring_of(stage).is_some()
    }

    fn set_order(&mut self, order: &PerPhase<Vec<StageId>>) {
        for ring in self.rings.ids() {
            let of_ring = |stages: &Vec<StageId>| {
                stages.iter().copied().filter(|stage| self.ring_of(*stage) == Some(ring)).collect::<Vec<_>>()
            };
            let order = order.map(of_ring);
            self.rings[ring].set_order(&order);
        }
    }

    fn start_pass(&mut self, next: Phase) {
        self.rings.iter_mut().for_each(|ring| ring.start_pass(next));
    }

    fn prefetch(&mut self, pool: &BufferPool<B>) -> Result<(), BackendError> {
        self.rings.ids().try_for_each(|ring| self.fill_ring(pool, ring))
    }

    fn fetch(&mut self, context: &mut TierContext<'_, B>, stage: StageId, phase: Phase) -> Result<(), BackendError> {
        let Some(ring) = self.ring_of(stage) else { return Ok(()) };
        let is_expected = self.rings[ring].is_expected(stage);
        if !is_expected {
            self.rings[ring].restart(phase, stage);
            if let Some(next) = self.rings[ring].next_on_demand() {
                self.fill_slot(context.pool, ring, next)?;
            }
        }
        context.recorder.slot_lookup(is_expected);
        Ok(())
    }

    fn wait(&mut self, context: &mut TierContext<'_, B>, stage: StageId) -> Result<Waited, BackendError> {
        let Some(ring) = self.ring_of(stage) else { return Ok(Waited::Nobody) };
        let Some(Uploaded { copy, stall }) = self.rings[ring].wait(context.pool, stage)? else {
            return Ok(Waited::Caller);
        };
        let bytes = self.weights[stage].as_ref().map_or(0, |weights| weights.bytes);
        context.recorder.record(DeviceEvent::Upload { stage, memory: self.rings[ring].memory, bytes }, copy);
        Ok(stall.map_or(Waited::Caller, Waited::Device))
    }

    fn release(&mut self, context: &mut TierContext<'_, B>, stage: StageId) -> Result<(), BackendError> {
        let Some(ring) = self.ring_of(stage) else { return Ok(()) };
        self.rings[ring].release(stage);
        self.fill_ring(context.pool, ring)
    }

    fn awaited(&self) -> Awaited {
        Awaited::Slot
    }
}
