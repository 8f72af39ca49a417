//! The weight store: brings weights to the stages that need them, from disk and from host memory to devices.
//!
//! A **tier** fetches the weights of whole stages before each run into a bounded amount of memory, ahead of need, and reuses the
//! memory after the run. Invariant: at most one tier serves a stage; none serves a stage whose weights stay in memory. The order in
//! which passes run stages must be known before a pass: each tier has a [`prefetch`]er that follows it. Which experts of a
//! mixture a pass uses is known only when its router has run: they have a cache ([`experts`]) instead of a place in that order.
//!
//! [`budget`] decides how many bytes of weights stay in host memory, and [`locked`] how many of each partition.

pub(crate) mod budget;
mod device;
mod disk;
mod experts;
pub(crate) mod locked;
mod prefetch;
mod read_ahead;

pub(crate) use device::{DeviceTier, DeviceTierConfig};
pub(crate) use disk::DiskTier;

use crate::buffers::{Buffer, BufferPool};
use crate::error::{BackendError, EngineError};
use crate::ids::{IndexVec, StageId};
use crate::port::{Backend, Dims, Timing, TimingToken};
use crate::program::Stage;
use crate::telemetry::{Awaited, DeviceEvent, PerPhase, Phase, Recorder};
use std::time::Duration;

/// Fetches the weights of the stages it serves.
///
/// Once per stage and pass the engine calls, in this order: `fetch`, `wait`, the runs of all items, `release`. Where a stage has experts that
/// are read by demand, `wait` waits for the experts of the first run, and [`WeightStore::wait_for_experts`] for those of each later run. `prefetch`
/// is called at load and at the start of each pass; a tier also prefetches in `release`, when it has room again.
pub(crate) trait WeightTier<B: Backend> {
    /// Whether this tier fetches the stage's weights.
    fn serves(&self, stage: StageId) -> bool;
    /// The stages in the order in which passes will run them. Forgets what was fetched.
    fn set_order(&mut self, order: &PerPhase<Vec<StageId>>);
    /// A pass starts. The pass after it will be of phase `next`.
    fn start_pass(&mut self, next: Phase);
    /// Issues fetches ahead of need, as many as fit into the free room.
    fn prefetch(&mut self, pool: &BufferPool<B>) -> Result<(), BackendError>;
    /// Issues the fetches of the stage that runs next, except for those that were prefetched.
    fn fetch(&mut self, context: &mut TierContext<'_, B>, stage: StageId, phase: Phase) -> Result<(), BackendError>;
    /// Waits for the stage's fetches, or makes its device wait.
    fn wait(&mut self, context: &mut TierContext<'_, B>, stage: StageId) -> Result<Waited, BackendError>;
    /// The stage has run: evicts its weights and prefetches into their room.
    fn release(&mut self, context: &mut TierContext<'_, B>, stage: StageId) -> Result<(), BackendError>;
    /// What its stages wait for.
    fn awaited(&self) -> Awaited;
}

/// What waited for the weights of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// Nothing: the run needed no fetch.
    Nobody,
    /// The caller, if the fetch had not ended before.
    Caller,
    /// The device; the backend reports how long.
    Device(TimingToken),
}

/// What tiers use of the engine.
pub(crate) struct TierContext<'a, B: Backend> {
    pub pool: &'a BufferPool<B>,
    pub recorder: &'a mut Recorder,
}

impl<B: Backend> TierContext<'_, B> {
    /// Records how long a stage has waited since `start`.
    fn record_stall(&mut self, stage: StageId, awaited: Awaited, waited: Waited, start: Duration) {
        let timing = match waited {
            Waited::Nobody => return,
            Waited::Caller => Timing::Measured(self.pool.since(start)),
            Waited::Device(token) => Timing::Pending(token),
        };
        self.recorder.record(DeviceEvent::Stall { stage, awaited }, timing);
    }
}

/// The weights of all stages.
pub(crate) struct WeightStore<B: Backend> {
    pub disk: DiskTier<B>,
    pub device: DeviceTier<B>,
}

impl<B: Backend> WeightStore<B> {
    fn tiers(&mut self) -> [&mut dyn WeightTier<B>; 2] {
        [&mut self.disk, &mut self.device]
    }

    /// Whether the weights of a stage are fetched for each pass.
    pub fn fetches(&self, stage: StageId) -> bool {
        self.disk.serves(stage) || self.device.serves(stage)
    }

    fn tier(&mut self, stage: StageId) -> Option<&mut dyn WeightTier<B>> {
        debug_assert!(self.tiers().iter().filter(|tier| tier.serves(stage)).count() <= 1, "one tier serves a stage");
        self.tiers().into_iter().find(|tier| tier.serves(stage))
    }

    /// The stages in the order in which passes will run them.
    pub fn set_order(&mut self, order: &PerPhase<Vec<StageId>>) {
        self.tiers().into_iter().for_each(|tier| tier.set_order(order));
    }

    /// A pass starts. The pass after it will be of phase `next`.
    pub fn start_pass(&mut self, pool: &BufferPool<B>, next: Phase) -> Result<(), EngineError> {
        self.tiers().into_iter().for_each(|tier| tier.start_pass(next));
        self.prefetch(pool)
    }

    /// Issues fetches ahead of need, as many as fit into the free room of each tier.
    pub fn prefetch(&mut self, pool: &BufferPool<B>) -> Result<(), EngineError> {
        for tier in self.tiers() {
            let what = tier.awaited().what();
            tier.prefetch(pool).map_err(|source| EngineError::Memory { what: what.to_owned(), source })?;
        }
        Ok(())
    }

    /// Whether a pass must say which experts of a stage it selects, before [`fetch`](Self::fetch).
    pub fn has_experts(&self, stage: StageId) -> bool {
        self.disk.has_experts(stage)
    }

    /// Issues the fetches of the stage that runs next, except for those that were prefetched.
    pub fn fetch(
        &mut self,
        mut context: TierContext<'_, B>,
        stages: &IndexVec<StageId, Stage>,
        stage: StageId,
        phase: Phase,
    ) -> Result<(), EngineError> {
        let Some(tier) = self.tier(stage) else { return Ok(()) };
        let doing = tier.awaited().fetching();
        tier.fetch(&mut context, stage, phase).map_err(|source| stages[stage].failed(doing, source))
    }

    /// Waits for the stage's weights, or makes its device wait.
    pub fn wait(
        &mut self,
        mut context: TierContext<'_, B>,
        stages: &IndexVec<StageId, Stage>,
        stage: StageId,
    ) -> Result<(), EngineError> {
        let Some(tier) = self.tier(stage) else { return Ok(()) };
        let (awaited, start) = (tier.awaited(), context.pool.backend.now());
        let waited = tier.wait(&mut context, stage);
        let waited = waited.map_err(|source| stages[stage].failed(awaited.fetching(), source))?;
        context.record_stall(stage, awaited, waited, start);
        Ok(())
    }

    /// Waits for the experts that run number `run` of a stage uses, in the order of [`DiskTier::select_experts`]. For the first run,
    /// [`wait`](Self::wait) does that.
    pub fn wait_for_experts(
        &mut self,
        mut context: TierContext<'_, B>,
        stages: &IndexVec<StageId, Stage>,
        stage: StageId,
        run: usize,
    ) -> Result<(), EngineError> {
        let (awaited, start) = (Awaited::Disk, context.pool.backend.now());
        let waited = self.disk.wait_for_later_run(&mut context, stage, run);
        let waited = waited.map_err(|source| stages[stage].failed(awaited.fetching(), source))?;
        context.record_stall(stage, awaited, waited, start);
        Ok(())
    }

    /// The stage has run: its weights may be evicted.
    pub fn release(
        &mut self,
        mut context: TierContext<'_, B>,
        stages: &IndexVec<StageId, Stage>,
        stage: StageId,
    ) -> Result<(), EngineError> {
        let Some(tier) = self.tier(stage) else { return Ok(()) };
        tier.release(&mut context, stage).map_err(|source| stages[stage].failed("releasing its weights", source))
    }

    /// The buffer and shape of a weight that is an input of a stage.
    pub fn input(&self, stage: StageId, index: usize) -> (&Buffer<B>, &Dims) {
        self.device.input(stage, index)
    }
}

impl Awaited {
    /// For errors of a stage.
    fn fetching(self) -> &'static str {
        match self {
            Awaited::Disk => "reading its weights",
            Awaited::Slot => "copying its weights",
            Awaited::States => "copying its states",
        }
    }

    /// For errors of no stage.
    fn what(self) -> &'static str {
        match self {
            Awaited::Disk => "reads of weights",
            Awaited::Slot => "copies of weights",
            Awaited::States => "copies of states",
        }
    }
}
