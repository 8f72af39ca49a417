//! The disk tier: weights that are read from disk before each run, ahead of need, within the plan's window of host memory. Experts of a
//! mixture are read once a pass has selected them, and stay in a cache of their own.

use super::experts::{ExpertCache, ExpertId};
use super::prefetch::{Chunk, Prefetcher};
use super::read_ahead::ReadAhead;
use super::{TierContext, Waited, WeightTier};
use crate::buffers::BufferPool;
use crate::error::BackendError;
use crate::ids::{IndexVec, SessionId, StageId};
use crate::port::{Backend, ChunkSize, Interval, WeightPager};
use crate::program::Stage;
use crate::telemetry::{Awaited, ExpertUse, PerPhase, Phase};
use std::collections::BTreeSet;
use std::ops::Range;

/// The weight pagers of all sessions. The tier serves the stages whose weights do not stay in memory: it reads streamed weights in chunks, and of
/// mapped weights it only evicts the pages after a run.
pub(crate) struct DiskTier<B: Backend> {
    pagers: IndexVec<SessionId, B::WeightPager>,
    /// The session of each stage.
    sessions: IndexVec<StageId, SessionId>,
    prefetcher: Prefetcher,
    /// Most bytes of chunks that are in memory or being read, without experts; 0 disables prefetching.
    window: u64,
    experts: ExpertCache,
    /// The experts that each run of the next stage with experts uses, in the order of the runs, until it fetches them.
    selected: Option<Vec<Vec<u32>>>,
    /// The experts that each run of the last stage that fetched experts uses.
    runs: Vec<Vec<u32>>,
    /// Experts that are being read and were not waited for, in the order of the reads.
    reading: Vec<ExpertId>,
    /// The experts that the last stage with experts uses.
    in_use: Vec<ExpertId>,
    ahead: ReadAhead,
    /// Reads ahead that were evicted before a run could use them, until they are recorded.
    unrecorded: Vec<(StageId, u64, Interval)>,
}

impl<B: Backend> DiskTier<B> {
    /// A tier that prefetches nothing until [`lock_and_stream`](Self::lock_and_stream).
    pub fn new(pagers: IndexVec<SessionId, B::WeightPager>, stages: &IndexVec<StageId, Stage>) -> Self {
        let sessions = stages.iter().map(|stage| stage.session).collect();
        DiskTier {
            pagers,
            sessions,
            prefetcher: Prefetcher::default(),
            window: 0,
            experts: ExpertCache::default(),
            selected: None,
            runs: Vec::new(),
            reading: Vec::new(),
            in_use: Vec::new(),
            ahead: ReadAhead::default(),
            unrecorded: Vec::new(),
        }
    }

    /// Whether warm-up runs would show weights that no run reads.
    pub fn wants_warm_up(&self) -> bool {
        self.pagers.iter().any(WeightPager::wants_warm_up)
    }

    /// Locks `locked` bytes of a stage's streamed weights; returns a warning for the user, if there is one.
    pub fn lock_and_stream(&mut self, stage: StageId, locked: u64) -> Result<Option<String>, BackendError> {
        self.pager(stage).lock_and_stream(locked)
    }

    /// Evicts what was fetched, so that other bytes can be locked; [`set_order`](WeightTier::set_order) then plans the reads anew.
    pub fn drop_fetched(&mut self) {
        self.pagers.iter_mut().for_each(WeightPager::release);
    }

    /// Sets the window; [`set_order`](WeightTier::set_order) then plans the reads.
    pub fn set_window(&mut self, bytes: u64) {
        self.window = bytes;
    }

    /// Sets the room for experts, bytes. To be called once, before any expert is read. Returns the bytes of all experts and of the memory for them.
    pub fn set_expert_cache(&mut self, bytes: u64) -> [u64; 2] {
        let experts_of = |stage: StageId| {
            let pager = &self.pagers[self.sessions[stage]];
            let bytes = |chunks: &Range<usize>| pager.chunks()[chunks.clone()].iter().map(|chunk| chunk.resident).sum();
            (stage, pager.experts().iter().map(bytes).collect::<Vec<u64>>())
        };
        let stages = self.sessions.ids().map(experts_of).filter(|(_, experts)| !experts.is_empty());
        let stages: Vec<_> = stages.collect();
        if stages.is_empty() {
            return [0; 2];
        }
        self.experts = ExpertCache::new(bytes, stages);
        [self.experts.all_bytes(), self.experts.room()]
    }

    /// Whether a pass must say which experts of a stage it selects.
    pub fn has_experts(&self, stage: StageId) -> bool {
        self.experts.has_experts(stage)
    }

    /// The experts that each run of the stage that runs next uses, in the order of the runs.
    pub fn select_experts(&mut self, runs: Vec<Vec<u32>>) {
        self.selected = Some(runs);
    }

    /// Orders the runs of a stage, each with its experts, so that the disk and the processor work at the same time: next comes the run with
    /// the fewest experts that neither are cached nor were read for an earlier run.
    pub fn order_runs<R>(&self, stage: StageId, mut runs: Vec<(R, Vec<u32>)>) -> Vec<(R, Vec<u32>)> {
        let mut in_memory = BTreeSet::new();
        let mut ordered = Vec::with_capacity(runs.len());
        loop {
            let is_absent = |expert: &&u32| {
                !in_memory.contains(*expert) && !self.experts.is_cached(ExpertId { stage, expert: **expert })
            };
            let absent = |(_, (_, experts)): &(usize, &(R, Vec<u32>))| experts.iter().filter(is_absent).count();
            let Some((next, _)) = runs.iter().enumerate().min_by_key(absent) else { return ordered };
            let run = runs.remove(next);
            in_memory.extend(run.1.iter().copied());
            ordered.push(run);
        }
    }

    /// Whether all experts that the runs of the stage use were waited for, so that the disk is idle.
    pub fn has_read_experts(&self) -> bool {
        self.reading.is_empty()
    }

    /// Whether a stage's weights are read in chunks.
    pub fn streams(&self, stage: StageId) -> bool {
        !self.chunks(stage).is_empty()
    }

    /// Bytes of the chunks that every run of a stage needs, of the stage with most.
    pub fn largest_stage(&self) -> u64 {
        self.stage_sizes().into_iter().max().unwrap_or(0)
    }

    /// Bytes of the chunks that every run of a stage needs, of each stage that has some.
    pub fn stage_sizes(&self) -> Vec<u64> {
        let bytes = |stage| self.always_needed(stage).iter().map(|chunk| chunk.resident).sum();
        self.sessions.ids().map(bytes).filter(|bytes| *bytes > 0).collect()
    }

    /// Issues the reads of the chunks that every run of a stage needs and that were not prefetched.
    fn fetch_always_needed(&mut self, stage: StageId, phase: Phase) -> Result<(), BackendError> {
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

    /// Issues the reads of the selected experts that are not cached, and evicts others for them.
    fn fetch_experts(&mut self, context: &mut TierContext<'_, B>, stage: StageId) -> Result<(), BackendError> {
        // Experts that a pass left unread when it failed.
        self.evict_unread();
        self.runs = self.selected.take().ok_or_else(|| BackendError::Misfit {
            what: "a mixture of experts".into(),
            why: "its run was started before the router had selected experts".into(),
        })?;
        let selected = each_once(&self.runs);
        for &expert in &selected {
            let id = ExpertId { stage, expert };
            let used = match (self.experts.touch(id), self.ahead.selected(id)) {
                (true, false) => ExpertUse::InMemory,
                (true, true) => ExpertUse::ReadAhead,
                (false, _) => ExpertUse::Read,
            };
            context.recorder.expert_used(used);
            if used != ExpertUse::InMemory {
                self.reading.push(id);
            }
            let is_selected = |other: ExpertId| other.stage == stage && selected.contains(&other.expert);
            if used == ExpertUse::Read && !self.read_expert(id, is_selected)? {
                return Err(BackendError::Misfit {
                    what: "the cache of experts".into(),
                    why: "it holds fewer than a pass selects".into(),
                });
            }
        }
        self.in_use = selected.into_iter().map(|expert| ExpertId { stage, expert }).collect();
        Ok(())
    }

    /// Evicts experts until there is room, except those that stay, and starts to read an expert; false if all that could be evicted must stay.
    /// Experts that are being read ahead are evicted last, because evicting them waits for their reads.
    fn read_expert(&mut self, id: ExpertId, stays: impl Fn(ExpertId) -> bool) -> Result<bool, BackendError> {
        let bytes = self.experts.bytes(id);
        while !self.experts.fits(bytes) {
            let spared = |other: ExpertId| stays(other) || self.ahead.is_pending(other);
            let Some(victim) = self.experts.victim(spared).or_else(|| self.experts.victim(&stays)) else {
                return Ok(false);
            };
            self.evict(victim);
        }
        self.experts.insert(id);
        self.chunks_of(id).try_for_each(|chunk| self.pager(id.stage).prefetch(chunk))?;
        Ok(true)
    }

    /// Whether an expert of a stage may be read ahead: only if nothing but experts is read from disk and predictions are mostly right.
    pub fn reads_ahead(&self, stage: StageId) -> bool {
        self.prefetcher.is_empty() && self.has_experts(stage) && self.ahead.is_worth(self.experts.passes())
    }

    /// Starts to read the first expert of `likely` that is not in memory: these are the experts that a later stage probably selects, the likeliest
    /// first. To be called once the experts of the stage that runs next have arrived, so that the disk is idle. If the expert cannot be read, the
    /// later stage reads what it selects.
    pub fn read_ahead(&mut self, stage: StageId, likely: &[u32]) {
        let mut ids = likely.iter().map(|expert| ExpertId { stage, expert: *expert });
        let Some(id) = ids.find(|id| !self.experts.is_cached(*id)) else { return };
        let in_use = std::mem::take(&mut self.in_use);
        let stays = |id: ExpertId| in_use.contains(&id) || (id.stage == stage && likely.contains(&id.expert));
        match self.read_expert(id, stays) {
            Ok(true) => self.ahead.started(id),
            Ok(false) => {}
            Err(_) => self.evict(id),
        }
        self.in_use = in_use;
    }

    /// Waits for the experts that run number `run` of the stage uses, while the experts of later runs are being read. First waits for the experts
    /// that were read ahead for the stage and that no run uses.
    fn wait_for_experts(
        &mut self,
        context: &mut TierContext<'_, B>,
        stage: StageId,
        run: usize,
    ) -> Result<Waited, BackendError> {
        let mut waited = Waited::Nobody;
        let used = std::mem::take(&mut self.runs[run]);
        self.pager(stage).select_experts(&used);
        for id in self.ahead.unused(stage) {
            if !self.finish_unused(id) {
                self.evict(id);
            }
            waited = Waited::Caller;
        }
        while let Some(next) = self.reading.iter().position(|id| used.contains(&id.expert)) {
            for chunk in self.chunks_of(self.reading[next]) {
                let bytes = self.chunks(stage)[chunk].stored;
                let interval = self.pager(stage).wait(chunk)?;
                context.recorder.read_from_disk(stage, bytes, interval);
            }
            self.reading.remove(next);
            waited = Waited::Caller;
        }
        context.recorder.read_in_vain(self.ahead.take_wrong());
        for (stage, bytes, interval) in self.unrecorded.drain(..) {
            context.recorder.read_from_disk(stage, bytes, interval);
        }
        Ok(waited)
    }

    /// Like [`wait_for_experts`](Self::wait_for_experts), after earlier runs of the stage. An error evicts the stage's other weights, too: the next
    /// pass reads them again.
    pub fn wait_for_later_run(
        &mut self,
        context: &mut TierContext<'_, B>,
        stage: StageId,
        run: usize,
    ) -> Result<Waited, BackendError> {
        self.wait_for_experts(context, stage, run).inspect_err(|_| {
            self.pager(stage).release();
            self.prefetcher.release(stage);
        })
    }

    /// Waits for an expert that no run uses; whether it could be read.
    fn finish_unused(&mut self, id: ExpertId) -> bool {
        self.chunks_of(id).all(|chunk| {
            let bytes = self.chunks(id.stage)[chunk].stored;
            let read = self.pager(id.stage).wait(chunk);
            read.map(|interval| self.unrecorded.push((id.stage, bytes, interval))).is_ok()
        })
    }

    /// Evicts the experts that were never waited for, or whose reads failed.
    fn evict_unread(&mut self) {
        while let Some(id) = self.reading.pop() {
            self.evict(id);
        }
    }

    fn evict(&mut self, id: ExpertId) {
        self.experts.remove(id);
        if self.ahead.evicted(id) {
            self.finish_unused(id);
        }
        for chunk in self.chunks_of(id) {
            self.pager(id.stage).evict(chunk);
        }
    }

    fn chunks_of(&self, ExpertId { stage, expert }: ExpertId) -> Range<usize> {
        self.pagers[self.sessions[stage]].experts()[expert as usize].clone()
    }

    /// The chunks that every run of a stage needs.
    fn always_needed(&self, stage: StageId) -> &[ChunkSize] {
        let first_of_experts = self.pagers[self.sessions[stage]].experts().first().map(|chunks| chunks.start);
        let chunks = self.chunks(stage);
        &chunks[..first_of_experts.unwrap_or(chunks.len())]
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

/// The experts of all runs, each once, in the order in which runs need them.
fn each_once(runs: &[Vec<u32>]) -> Vec<u32> {
    let mut seen = BTreeSet::new();
    runs.iter().flatten().copied().filter(|expert| seen.insert(*expert)).collect()
}

impl<B: Backend> WeightTier<B> for DiskTier<B> {
    fn serves(&self, stage: StageId) -> bool {
        !self.pagers[self.sessions[stage]].is_unmanaged()
    }

    fn set_order(&mut self, order: &PerPhase<Vec<StageId>>) {
        let chunks_of = |stage: &StageId| {
            let stage = *stage;
            let sizes = self.always_needed(stage).iter().enumerate();
            sizes.map(move |(index, size)| Chunk { stage, index, room: size.resident }).collect::<Vec<_>>()
        };
        let chunks = order.map(|stages| stages.iter().flat_map(chunks_of).collect());
        self.prefetcher = Prefetcher::new(chunks, self.window, self.window > 0);
    }

    fn start_pass(&mut self, next: Phase) {
        self.prefetcher.start_pass(next);
        self.experts.start_pass();
    }

    fn prefetch(&mut self, _: &BufferPool<B>) -> Result<(), BackendError> {
        self.issue_ahead()
    }

    fn fetch(&mut self, context: &mut TierContext<'_, B>, stage: StageId, phase: Phase) -> Result<(), BackendError> {
        if self.prefetcher.has_chunks(stage) {
            self.fetch_always_needed(stage, phase)?;
        }
        // Experts come after the chunks that every run needs: reads end in the order in which they are issued.
        match self.experts.has_experts(stage) {
            true => self.fetch_experts(context, stage),
            false => Ok(()),
        }
    }

    fn wait(&mut self, context: &mut TierContext<'_, B>, stage: StageId) -> Result<Waited, BackendError> {
        let waited = match self.experts.has_experts(stage) {
            true => self.wait_for_experts(context, stage, 0)?,
            false => Waited::Nobody,
        };
        if !self.prefetcher.has_chunks(stage) {
            return Ok(waited);
        }
        for chunk in 0..self.always_needed(stage).len() {
            let bytes = self.chunks(stage)[chunk].stored;
            match self.pager(stage).wait(chunk) {
                Ok(interval) => context.recorder.read_from_disk(stage, bytes, interval),
                Err(error) => {
                    // The next pass finds nothing of this stage and reads it again.
                    self.pager(stage).release();
                    self.prefetcher.release(stage);
                    return Err(error);
                }
            }
        }
        Ok(Waited::Caller)
    }

    fn release(&mut self, _: &mut TierContext<'_, B>, stage: StageId) -> Result<(), BackendError> {
        let pager = self.pager(stage);
        pager.record_touched_pages();
        pager.release();
        self.prefetcher.release(stage);
        self.issue_ahead()
    }

    fn awaited(&self) -> Awaited {
        Awaited::Disk
    }
}
