//! The cache of experts: those that were read by demand stay in host memory until others need the room.
//!
//! Which expert to evict follows LRFU (Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least
//! frequently used policies", IEEE Trans. Computers 50, 2001): a use counts 1 and loses half of its weight every [`HALF_LIFE`] passes,
//! and the expert with the smallest sum is evicted first. Two things differ, because stages take turns. A sum decays when its own stage selects
//! experts, so that stages that have not run yet in a pass do not look older than those that have. And of experts whose sums are alike (the same
//! power of two), the expert whose stage runs last from now on is evicted first: where a pass uses more experts than fit, those of other stages
//! would otherwise be evicted just before they are needed.

use crate::ids::{Id, StageId};
use std::cmp::Reverse;

/// Passes after which a use counts half. Of 2, 4, 8, 16 and 32 passes 4 is within 1.5 % of the best for routers that always prefer the same
/// experts, for drifting ones and for a trained mixture (`replay.rs`).
const HALF_LIFE: f64 = 4.0;

/// An expert of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertId {
    pub stage: StageId,
    pub expert: u32,
}

/// Which experts are in memory, and how often each was used.
#[derive(Debug, Default)]
pub(crate) struct ExpertCache {
    /// Bytes for experts.
    room: u64,
    used: u64,
    /// Passes so far.
    passes: u64,
    /// By stage index.
    stages: Vec<StageExperts>,
    /// The index of the stage that selected experts last.
    selecting: usize,
}

#[derive(Debug, Default)]
struct StageExperts {
    /// By expert; empty for a stage without experts.
    entries: Vec<Entry>,
    /// The pass in which it last selected experts.
    last_pass: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    bytes: u64,
    is_cached: bool,
    /// The base-2 logarithm of the sum of uses, each worth `2^(pass / HALF_LIFE)`: the order of these logarithms is the order of the
    /// decayed sums in every later pass.
    score: Option<f64>,
}

impl ExpertCache {
    /// A cache of `room` bytes for experts of these sizes; `room` is raised to hold all experts of the largest stage. One run of a stage computes
    /// all tokens of its pass, so all experts that the tokens select must be in memory at once: all experts of the stage for a prompt of some
    /// length, for router logits that are not numbers, and for probabilities that are nearly equal (`runtime/select_experts.rs`).
    pub fn new(room: u64, stages: impl IntoIterator<Item = (StageId, Vec<u64>)>) -> Self {
        let mut cache = ExpertCache { room, ..ExpertCache::default() };
        for (stage, bytes) in stages {
            cache.room = cache.room.max(bytes.iter().sum());
            let length = cache.stages.len().max(stage.index() + 1);
            cache.stages.resize_with(length, StageExperts::default);
            let entries = bytes.into_iter().map(|bytes| Entry { bytes, ..Entry::default() }).collect();
            cache.stages[stage.index()] = StageExperts { entries, last_pass: 0 };
        }
        cache
    }

    /// Bytes of memory for experts.
    pub fn room(&self) -> u64 {
        self.room
    }

    /// Bytes of all experts.
    pub fn all_bytes(&self) -> u64 {
        self.stages.iter().flat_map(|stage| &stage.entries).map(|entry| entry.bytes).sum()
    }

    /// A pass starts.
    pub fn start_pass(&mut self) {
        self.passes += 1;
    }

    /// Whether a stage has experts.
    pub fn has_experts(&self, stage: StageId) -> bool {
        self.stages.get(stage.index()).is_some_and(|experts| !experts.entries.is_empty())
    }

    /// Counts a use of an expert; whether it is in memory.
    pub fn touch(&mut self, ExpertId { stage, expert }: ExpertId) -> bool {
        self.selecting = stage.index();
        let experts = &mut self.stages[stage.index()];
        experts.last_pass = self.passes;
        let entry = &mut experts.entries[expert as usize];
        let now = self.passes as f64 / HALF_LIFE;
        entry.score = Some(entry.score.map_or(now, |score| log2_of_sum(score, now)));
        entry.is_cached
    }

    /// Passes so far.
    pub fn passes(&self) -> u64 {
        self.passes
    }

    /// Whether an expert is in memory, or being read.
    pub fn is_cached(&self, ExpertId { stage, expert }: ExpertId) -> bool {
        self.stages
            .get(stage.index())
            .and_then(|experts| experts.entries.get(expert as usize))
            .is_some_and(|entry| entry.is_cached)
    }

    /// Whether another expert of this many bytes fits.
    pub fn fits(&self, bytes: u64) -> bool {
        self.used + bytes <= self.room
    }

    /// The expert to evict first; `None` if all must stay.
    pub fn victim(&self, stays: impl Fn(ExpertId) -> bool) -> Option<ExpertId> {
        let cached = self.stages.iter().enumerate().flat_map(|(index, experts)| {
            let cached = experts.entries.iter().enumerate().filter(|(_, entry)| entry.is_cached);
            let id = move |expert: usize| ExpertId { stage: StageId::new(index), expert: expert as u32 };
            let (clock, turns) = (self.clock(experts), self.turns_until(index));
            cached.map(move |(expert, entry)| (id(expert), (entry.power_of_two(clock), Reverse(turns))))
        });
        let evictable = cached.filter(|(id, _)| !stays(*id));
        evictable.min_by_key(|(_, rank)| *rank).map(|(id, _)| id)
    }

    /// The pass up to which the sums of a stage are decayed: the present one, or the one before if the stage has not selected yet.
    fn clock(&self, experts: &StageExperts) -> u64 {
        if experts.last_pass == self.passes { self.passes } else { self.passes.saturating_sub(1) }
    }

    /// How many stages run before a stage runs again, counted from the stage after the one that selected last.
    fn turns_until(&self, index: usize) -> usize {
        let count = self.stages.len();
        (index + count - self.selecting - 1) % count
    }

    /// Bytes of an expert.
    pub fn bytes(&self, ExpertId { stage, expert }: ExpertId) -> u64 {
        self.stages[stage.index()].entries[expert as usize].bytes
    }

    /// An expert is in memory, or being read, from now on.
    pub fn insert(&mut self, id: ExpertId) {
        self.set(id, true);
    }

    /// An expert is no longer in memory.
    pub fn remove(&mut self, id: ExpertId) {
        self.set(id, false);
    }

    fn set(&mut self, ExpertId { stage, expert }: ExpertId, is_cached: bool) {
        let entry = &mut self.stages[stage.index()].entries[expert as usize];
        if entry.is_cached != is_cached {
            self.used = if is_cached { self.used + entry.bytes } else { self.used - entry.bytes };
            entry.is_cached = is_cached;
        }
    }
}

impl Entry {
    /// The power of two nearest to its sum of uses, decayed up to a pass; `None` if it was never used.
    fn power_of_two(&self, pass: u64) -> Option<i64> {
        self.score.map(|score| (score - pass as f64 / HALF_LIFE).round() as i64)
    }
}

/// `log2(2^a + 2^b)`.
fn log2_of_sum(a: f64, b: f64) -> f64 {
    a.max(b) + (-(a - b).abs()).exp2().ln_1p() / std::f64::consts::LN_2
}

#[cfg(test)]
mod replay;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn expert(stage: usize, expert: u32) -> ExpertId {
        ExpertId { stage: StageId::new(stage), expert }
    }

    fn cache(room: u64) -> ExpertCache {
        ExpertCache::new(room, [(StageId::new(1), vec![10; 4]), (StageId::new(3), vec![10; 4])])
    }

    fn use_in_pass(cache: &mut ExpertCache, ids: &[ExpertId]) {
        cache.start_pass();
        for id in ids {
            cache.touch(*id);
            cache.insert(*id);
        }
    }

    #[test]
    fn all_experts_of_one_stage_always_fit() {
        let cache = cache(5);
        assert!(cache.has_experts(StageId::new(1)) && !cache.has_experts(StageId::new(0)));
        assert!(!cache.has_experts(StageId::new(9)));
        assert_eq!(cache.room, 40);
    }

    #[test]
    fn what_was_used_least_and_longest_ago_is_evicted_first() {
        let mut cache = cache(40);
        for _ in 0..3 {
            use_in_pass(&mut cache, &[expert(1, 0)]);
        }
        use_in_pass(&mut cache, &[expert(1, 1), expert(3, 2)]);
        use_in_pass(&mut cache, &[expert(3, 3)]);
        // Full: experts 1 of stage 1 and 2 of stage 3 were used once and longest ago; the stage that runs keeps what it needs.
        assert_eq!(cache.victim(|id| id == expert(1, 1)), Some(expert(3, 2)));
        assert_eq!(cache.victim(|id| [expert(3, 2), expert(3, 3)].contains(&id)), Some(expert(1, 1)));
        // Of experts that were used about as often, those of the stage that runs last from now on.
        assert_eq!(cache.victim(|id| id == expert(3, 2)), Some(expert(3, 3)));
        cache.remove(expert(3, 2));
        assert!(cache.fits(10));
        // Frequent uses count for less the longer ago they are.
        for _ in 0..20 * HALF_LIFE as usize {
            cache.start_pass();
        }
        use_in_pass(&mut cache, &[expert(1, 1), expert(3, 3), expert(3, 0)]);
        assert!(!cache.fits(10));
        assert_eq!(cache.victim(|_| false), Some(expert(1, 0)));
        assert_eq!(cache.victim(|_| true), None);
    }

    /// Layers may have experts of other sizes, or of none.
    #[test]
    fn experts_of_any_size_are_evicted_until_there_is_room() {
        let stages = [(StageId::new(0), vec![30, 30]), (StageId::new(1), vec![10, 0, 10])];
        let mut cache = ExpertCache::new(60, stages);
        use_in_pass(&mut cache, &[expert(1, 0), expert(1, 1), expert(1, 2)]);
        use_in_pass(&mut cache, &[expert(0, 0)]);
        assert_eq!(cache.used, 50);
        // Two of 10 bytes make room for one of 30; an empty one takes none and may be evicted too.
        let mut evicted = Vec::new();
        while !cache.fits(30) {
            let victim = cache.victim(|id| id.stage == StageId::new(0) && id.expert < 2).unwrap();
            cache.remove(victim);
            evicted.push(victim);
        }
        assert_eq!(evicted.iter().map(|id| id.stage.index()).collect::<BTreeSet<_>>(), BTreeSet::from([1]));
        assert!(evicted.contains(&expert(1, 0)) && evicted.contains(&expert(1, 2)));
        use_in_pass(&mut cache, &[expert(0, 1), expert(1, 1)]);
        assert!(cache.used == 60 && cache.fits(0));
    }

    #[test]
    fn counts_of_many_passes_stay_finite() {
        let mut cache = cache(40);
        cache.passes = 1 << 40;
        use_in_pass(&mut cache, &[expert(1, 0)]);
        use_in_pass(&mut cache, &[expert(1, 1), expert(1, 0)]);
        let scores: Vec<f64> = cache.stages[1].entries.iter().filter_map(|entry| entry.score).collect();
        assert!(scores.iter().all(|score| score.is_finite()) && scores[0] > scores[1], "{scores:?}");
    }
}
