//! The disk tier: weights that are read from disk before each run, ahead of need, within the plan's window of host memory.

use super::prefetch::{Chunk, Prefetcher};
use super::{TierContext, Waited, WeightTier};
use crate::buffers::BufferPool;
use crate::error::BackendError;
use crate::ids::{IndexVec, SessionId, StageId};
use crate::port::{Backend, ChunkSize, WeightPager};
use crate::program::Stage;
use crate::telemetry::{Awaited, PerPhase, Phase};

/// The weight pagers of all sessions. It serves the stages whose weights do not stay in memory: streamed weights in chunks, mapped
/// ones only by evicting their pages after a run.
pub(crate) struct DiskTier<B: Backend> {
    pagers: IndexVec<SessionId, B::WeightPager>,
    /// The session of each stage.
    sessions: IndexVec<StageId, SessionId>,
    prefetcher: Prefetcher,
    /// Most bytes of chunks that are in memory or being read; 0 disables prefetching.
    window: u64,
}

impl<B: Backend> DiskTier<B> {
    /// A tier that prefetches nothing until [`lock_and_stream`](Self::lock_and_stream).
    pub fn new(pagers: IndexVec<SessionId, B::WeightPager>, stages: &IndexVec<StageId, Stage>) -> Self {
        let sessions = stages.iter().map(|stage| stage.session).collect();
        DiskTier { pagers, sessions, prefetcher: Prefetcher::default(), window: 0 }
    }

    /// Whether warm-up runs would show weights that no run reads.
    pub fn wants_warm_up(&self) -> bool {
        self.pagers.iter().any(WeightPager::wants_warm_up)
    }

    /// Locks `locked` bytes of a stage's streamed weights; returns a warning for the user, if there is one.
    pub fn lock_and_stream(&mut self, stage: StageId, locked: u64) -> Result<Option<String>, BackendError> {
        self.pager(stage).lock_and_stream(locked)
    }

    /// Sets the window; [`set_order`](WeightTier::set_order) then plans the reads.
    pub fn set_window(&mut self, bytes: u64) {
        self.window = bytes;
    }

    fn pager(&mut self, stage: StageId) -> &mut B::WeightPager {
        &mut self.pagers[self.sessions[stage]]
    }

    fn chunks(&self, stage: StageId) -> &[ChunkSize] {
        self.pagers[self.sessions[stage]].chunks()
    }

    fn issue(&mut self, chunk: Chunk) -> Result<(), BackendError> {
        self.pager(chunk.stage).prefetch(chunk.index)
    }

    fn issue_ahead(&mut self) -> Result<(), BackendError> {
        while let Some(chunk) = self.prefetcher.next_ahead() {
            self.issue(chunk)?;
        }
        Ok(())
    }
}

impl<B: Backend> WeightTier<B> for DiskTier<B> {
    fn serves(&self, stage: StageId) -> bool {
        !self.pagers[self.sessions[stage]].is_unmanaged()
    }

    fn set_order(&mut self, order: &PerPhase<Vec<StageId>>) {
        let chunks_of = |stage: &StageId| {
            let stage = *stage;
            let sizes = self.chunks(stage).iter().enumerate();
            sizes.map(move |(index, size)| Chunk { stage, index, room: size.resident }).collect::<Vec<_>>()
        };
        let chunks = order.map(|stages| stages.iter().flat_map(chunks_of).collect());
        self.prefetcher = Prefetcher::new(chunks, self.window, self.window > 0);
    }

    fn start_pass(&mut self, next: Phase) {
        self.prefetcher.start_pass(next);
    }

    fn prefetch(&mut self, _: &BufferPool<B>) -> Result<(), BackendError> {
        self.issue_ahead()
    }

    fn fetch(&mut self, _: &mut TierContext<'_, B>, stage: StageId, phase: Phase) -> Result<(), BackendError> {
        if !self.prefetcher.has_chunks(stage) {
            return Ok(());
        }
        if !self.prefetcher.is_expected(stage) {
            for evicted in self.prefetcher.restart(phase, stage) {
                self.pager(evicted).release();
            }
        }
        for _ in 0..self.prefetcher.missing(phase, stage) {
            if let Some(chunk) = self.prefetcher.next_on_demand() {
                self.issue(chunk)?;
            }
        }
        Ok(())
    }

    fn wait(&mut self, context: &mut TierContext<'_, B>, stage: StageId) -> Result<Waited, BackendError> {
        if !self.prefetcher.has_chunks(stage) {
            return Ok(Waited::Nobody);
        }
        for chunk in 0..self.chunks(stage).len() {
            let bytes = self.chunks(stage)[chunk].stored;
            let interval = self.pager(stage).wait(chunk)?;
            context.recorder.read_from_disk(stage, bytes, interval);
        }
        Ok(Waited::Caller)
    }

    fn release(&mut self, _: &mut TierContext<'_, B>, stage: StageId) -> Result<(), BackendError> {
        let pager = self.pager(stage);
        if pager.wants_warm_up() {
            pager.sample_resident();
        }
        pager.release();
        self.prefetcher.release(stage);
        self.issue_ahead()
    }

    fn awaited(&self) -> Awaited {
        Awaited::Disk
    }
}
