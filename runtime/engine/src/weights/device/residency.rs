//! Moves a stage's weights between a slot of their own and the ring, between two passes. Needs no new session and changes no token.

use super::super::WeightTier;
use super::load::reserve_slot;
use super::{DeviceTier, StageSlot};
use crate::buffers::BufferPool;
use crate::error::{BackendError, EngineError};
use crate::ids::StageId;
use crate::port::Backend;
use crate::telemetry::PerPhase;
use hpp_schema::ByteSize;

impl<B: Backend> DeviceTier<B> {
    /// After a change: empties the rings and fills them for this order of stages.
    pub fn restart(&mut self, pool: &BufferPool<B>, order: &PerPhase<Vec<StageId>>) -> Result<(), EngineError> {
        self.set_order(order);
        self.prefetch(pool).map_err(|source| EngineError::Memory { what: "copies of weights".into(), source })
    }

    /// Whether a stage's weights are inputs, so that they can move.
    pub fn can_move(&self, stage: StageId) -> bool {
        self.weights[stage].is_some()
    }

    /// Gives a streamed stage a slot of its own and fills it. On an error nothing has changed.
    pub fn make_resident(&mut self, pool: &BufferPool<B>, stage: StageId) -> Result<(), BackendError> {
        let weights = self.weights[stage].as_mut().filter(|weights| matches!(weights.slot, StageSlot::Ring(_)));
        let Some(weights) = weights else { return Ok(()) };
        let slot = reserve_slot(pool, &weights.slot_sizes, weights.memory)?;
        let upload = weights.upload(pool, &slot)?;
        pool.backend.wait_upload(upload)?;
        weights.slot = StageSlot::Resident(slot);
        Ok(())
    }

    /// Streams a stage through its device's ring and frees its own slot; an error says why that is impossible.
    pub fn make_streamed(&mut self, stage: StageId) -> Result<(), String> {
        let Some(weights) = self.weights[stage].as_mut() else { return Ok(()) };
        let Some(ring) = self.rings.position(|ring| ring.memory == weights.memory) else {
            return Err("its device has no ring to stream weights through".into());
        };
        if !self.rings[ring].fits(&weights.slot_sizes) {
            let bytes = weights.slot_sizes.iter().copied().fold(0, u64::saturating_add);
            return Err(format!("its {} do not fit into a slot", ByteSize(bytes).human()));
        }
        weights.slot = StageSlot::Ring(ring);
        Ok(())
    }
}
