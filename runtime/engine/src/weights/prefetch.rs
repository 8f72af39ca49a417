//! The prefetcher: decides which chunk of weights is fetched next and whether there is room. Tiers read and copy.
//!
//! Chunks are fetched in the order in which passes need them, cyclically: after the last chunk of a pass comes the first of the next.
//! A chunk takes its room when its fetch is issued and frees it when its stage has run. Room is freed only when a stage finishes, so
//! that is the only point where new fetches are issued, and the disk or link idles only while the room is full.

use crate::ids::{Id, StageId};
use crate::telemetry::{PerPhase, Phase};
use std::collections::VecDeque;

/// Weights of one stage, or a part of them, that are fetched as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// The stage that needs it.
    pub stage: StageId,
    /// Its index among the stage's chunks.
    pub index: usize,
    /// The room it takes, in the unit of its tier: bytes or slots.
    pub room: u64,
}

/// The order of fetches and the fetches issued so far.
#[derive(Debug)]
pub(crate) struct Prefetcher {
    /// What a pass of each phase needs, in order. Invariant: the chunks of a stage follow each other.
    orders: PerPhase<Vec<Chunk>>,
    /// By stage index: whether the stage has chunks. Later stages have none.
    has_chunks: Vec<bool>,
    /// Whether chunks are fetched before their stage runs next.
    ahead: bool,
    room: u64,
    used: u64,
    /// Issued, and their stage has not run since; oldest first.
    issued: VecDeque<Chunk>,
    /// The next fetch: a phase and an index into its order.
    next: (Phase, usize),
    /// The phase of the pass after the current one; unknown before the first pass.
    next_pass: Option<Phase>,
}

impl Default for Prefetcher {
    fn default() -> Self {
        Prefetcher::new(PerPhase::default(), 0, false)
    }
}

impl Prefetcher {
    /// A prefetcher for passes that need these chunks. `room` is raised to what the chunks of the largest stage take.
    pub fn new(orders: PerPhase<Vec<Chunk>>, room: u64, ahead: bool) -> Self {
        let stages = orders.iter().flat_map(|order| order.chunk_by(|a, b| a.stage == b.stage));
        let largest = stages.map(|chunks| chunks.iter().map(|chunk| chunk.room).sum::<u64>()).max().unwrap_or(0);
        let mut has_chunks = Vec::new();
        for chunk in orders.iter().flatten() {
            has_chunks.resize(has_chunks.len().max(chunk.stage.index() + 1), false);
            has_chunks[chunk.stage.index()] = true;
        }
        Prefetcher {
            // Enough for every chunk: a pass allocates nothing.
            issued: VecDeque::with_capacity(orders.iter().map(Vec::len).sum()),
            orders,
            has_chunks,
            ahead,
            room: room.max(largest),
            used: 0,
            next: (Phase::Prefill, 0),
            next_pass: None,
        }
    }

    /// Whether a stage has chunks.
    pub fn has_chunks(&self, stage: StageId) -> bool {
        self.has_chunks.get(stage.index()).copied().unwrap_or(false)
    }

    /// Whether no stage has chunks.
    pub fn is_empty(&self) -> bool {
        self.has_chunks.is_empty()
    }

    /// A pass starts. The pass after it will be of phase `next`.
    pub fn start_pass(&mut self, next: Phase) {
        self.next_pass = Some(next);
    }

    /// Whether the oldest issued chunk is of this stage, which runs next: then the passes follow the expected order.
    pub fn is_expected(&self, stage: StageId) -> bool {
        self.issued.front().is_some_and(|chunk| chunk.stage == stage)
    }

    /// Restarts at a stage, because passes deviate from the expected order; returns the stages whose chunks the tier must evict.
    pub fn restart(&mut self, phase: Phase, stage: StageId) -> Vec<StageId> {
        let mut evicted: Vec<StageId> = self.issued.drain(..).map(|chunk| chunk.stage).collect();
        evicted.dedup();
        self.used = 0;
        let index = self.orders[phase].iter().position(|chunk| chunk.stage == stage).unwrap_or(0);
        self.next = (phase, index);
        evicted
    }

    /// How many chunks of a stage must still be issued before it can run.
    pub fn missing(&self, phase: Phase, stage: StageId) -> usize {
        let needed = self.orders[phase].iter().filter(|chunk| chunk.stage == stage).count();
        let issued = self.issued.iter().take_while(|chunk| chunk.stage == stage).count();
        needed.saturating_sub(issued)
    }

    /// The next chunk to fetch ahead of need, which counts as issued from now on; `None` if it does not fit into the free room.
    pub fn next_ahead(&mut self) -> Option<Chunk> {
        let fits = |chunk: &Chunk| self.ahead && self.used + chunk.room <= self.room && !self.is_issued(chunk);
        let next = self.peek().filter(fits)?;
        self.issue(next);
        Some(next)
    }

    /// The next chunk to fetch for a stage that waits for it, which counts as issued from now on.
    pub fn next_on_demand(&mut self) -> Option<Chunk> {
        let next = self.peek()?;
        self.issue(next);
        Some(next)
    }

    /// A stage has run: frees the room of its chunks.
    pub fn release(&mut self, stage: StageId) {
        while let Some(chunk) = self.issued.front().copied().filter(|chunk| chunk.stage == stage) {
            self.issued.pop_front();
            self.used -= chunk.room;
        }
    }

    /// Invariant: no chunk is issued twice.
    fn is_issued(&self, chunk: &Chunk) -> bool {
        self.issued.iter().any(|other| other.stage == chunk.stage && other.index == chunk.index)
    }

    fn peek(&self) -> Option<Chunk> {
        let (phase, index) = self.next;
        let order = &self.orders[phase];
        order.get(index).or_else(|| self.orders[self.following_phase()?].first()).copied()
    }

    /// The phase whose chunks come after the end of a pass: decode where the next pass needs none.
    fn following_phase(&self) -> Option<Phase> {
        self.next_pass.map(|phase| if self.orders[phase].is_empty() { Phase::Decode } else { phase })
    }

    fn issue(&mut self, chunk: Chunk) {
        let (phase, index) = self.next;
        let is_within = index < self.orders[phase].len();
        self.next = if is_within { (phase, index + 1) } else { (self.following_phase().unwrap_or(phase), 1) };
        self.issued.push_back(chunk);
        self.used += chunk.room;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(number: usize) -> StageId {
        StageId::new(number)
    }

    fn chunks(stages: &[usize]) -> Vec<Chunk> {
        stages.iter().map(|number| Chunk { stage: stage(*number), index: 0, room: 1 }).collect()
    }

    fn prefetcher(prefill: &[usize], decode: &[usize], room: u64) -> Prefetcher {
        Prefetcher::new(PerPhase { prefill: chunks(prefill), decode: chunks(decode) }, room, true)
    }

    /// The stages fetched ahead until the room is full.
    fn filled(prefetcher: &mut Prefetcher) -> Vec<usize> {
        std::iter::from_fn(|| prefetcher.next_ahead()).map(|chunk| chunk.stage.index()).collect()
    }

    #[test]
    fn after_a_pass_the_chunks_of_the_next_are_fetched() {
        let mut prefetcher = prefetcher(&[1, 2, 3], &[4, 5], 2);
        assert_eq!(filled(&mut prefetcher), [1, 2]);
        prefetcher.start_pass(Phase::Prefill);
        for (number, next) in [(1, 3), (2, 1), (3, 2)] {
            assert!(prefetcher.is_expected(stage(number)));
            prefetcher.release(stage(number));
            assert_eq!(filled(&mut prefetcher), [next]);
        }
        prefetcher.start_pass(Phase::Decode);
        for (number, next) in [(1, 3), (2, 4), (3, 5)] {
            prefetcher.release(stage(number));
            assert_eq!(filled(&mut prefetcher), [next]);
        }
        prefetcher.start_pass(Phase::Decode);
        // The same weights are not fetched twice.
        prefetcher.release(stage(4));
        assert_eq!(filled(&mut prefetcher), [4]);
    }

    #[test]
    fn before_the_first_pass_only_its_own_chunks_are_fetched() {
        let mut prefetcher = prefetcher(&[1], &[2], 4);
        assert_eq!(filled(&mut prefetcher), [1]);
        prefetcher.start_pass(Phase::Decode);
        assert_eq!(filled(&mut prefetcher), [2]);
    }

    #[test]
    fn a_pass_that_deviates_from_the_order_restarts_the_prefetcher() {
        let mut prefetcher = prefetcher(&[1, 2, 3], &[], 2);
        assert_eq!(filled(&mut prefetcher), [1, 2]);
        assert!(!prefetcher.is_expected(stage(3)));
        assert_eq!(prefetcher.restart(Phase::Prefill, stage(3)), [stage(1), stage(2)]);
        assert_eq!(prefetcher.missing(Phase::Prefill, stage(3)), 1);
        assert_eq!(prefetcher.next_on_demand().map(|chunk| chunk.stage), Some(stage(3)));
        assert_eq!(prefetcher.missing(Phase::Prefill, stage(3)), 0);
    }

    #[test]
    fn the_largest_stage_always_has_room() {
        let chunk = |index, room| Chunk { stage: stage(0), index, room };
        let orders = PerPhase { prefill: vec![chunk(0, 3), chunk(1, 4)], decode: vec![] };
        let mut prefetcher = Prefetcher::new(orders, 5, true);
        assert_eq!(std::iter::from_fn(|| prefetcher.next_ahead()).count(), 2);
        assert_eq!(prefetcher.missing(Phase::Prefill, stage(0)), 0);
    }
}
