//! Supply: which weights are brought next, so that what brings them never waits while there is room, and no more of them are
//! held than there is room for. It decides; others read and copy.
//!
//! What passes need is brought in their order, round and round: behind the last of a pass comes the first of the next. A
//! chunk takes its room when it is begun and gives it back when its stage has run. Room is only ever given back then, so
//! chunks only ever begin then too, and nothing is idle but while the room is full.

use crate::telemetry::Phase;
use std::collections::VecDeque;

/// Weights of one stage, or a part of them, that are brought as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// The stage that needs it.
    pub stage: usize,
    /// Its number among the stage's chunks.
    pub number: usize,
    /// The room it takes.
    pub room: u64,
}

/// What is brought, in order, and how far that has come.
#[derive(Debug)]
pub(crate) struct Supply {
    /// What a pass of each phase needs, in order; chunks of one stage follow each other.
    orders: [Vec<Chunk>; 2],
    /// By stage, as far as there are any: whether it has chunks.
    concerned: Vec<bool>,
    /// Whether anything is brought before its stage is about to run.
    ahead: bool,
    room: u64,
    used: u64,
    /// Begun, and their stage has not run since; oldest first.
    held: VecDeque<Chunk>,
    /// The next to begin: a phase and a position in its order.
    next: (Phase, usize),
    /// What comes behind the pass at hand; nobody knows before the first.
    then: Option<Phase>,
}

impl Default for Supply {
    fn default() -> Self {
        Supply::new([vec![], vec![]], 0, false)
    }
}

impl Supply {
    /// For passes that need these chunks, prefill's and decoding's. Room for less than the largest stage is made room for that.
    pub fn new(orders: [Vec<Chunk>; 2], room: u64, ahead: bool) -> Self {
        let stages = orders.iter().flat_map(|order| order.chunk_by(|a, b| a.stage == b.stage));
        let largest = stages.map(|own| own.iter().map(|chunk| chunk.room).sum::<u64>()).max().unwrap_or(0);
        let held = VecDeque::with_capacity(orders.iter().map(Vec::len).sum());
        let (room, next, then) = (room.max(largest), (Phase::Prefill, 0), None);
        let stages = orders.iter().flatten().map(|chunk| chunk.stage + 1).max().unwrap_or(0);
        let mut concerned = vec![false; stages];
        orders.iter().flatten().for_each(|chunk| concerned[chunk.stage] = true);
        Supply { orders, concerned, ahead, room, used: 0, held, next, then }
    }

    /// Whether anything is brought for this stage.
    pub fn concerns(&self, stage: usize) -> bool {
        self.concerned.get(stage).copied().unwrap_or(false)
    }

    /// A pass begins, and behind it comes another of this phase.
    pub fn passing(&mut self, then: Phase) {
        self.then = Some(then);
    }

    /// A stage is about to run: whether the oldest chunk held is its first, so that nothing has to be let go.
    pub fn is_due(&self, stage: usize) -> bool {
        self.held.front().is_some_and(|chunk| chunk.stage == stage)
    }

    /// Begins again at a stage, because passes go another way than was thought; gives the stages whose chunks are to be let
    /// go. Nothing is held then.
    pub fn begin_again(&mut self, phase: Phase, stage: usize) -> Vec<usize> {
        let mut held: Vec<usize> = self.held.drain(..).map(|chunk| chunk.stage).collect();
        held.dedup();
        self.used = 0;
        let at = self.orders[phase as usize].iter().position(|chunk| chunk.stage == stage).unwrap_or(0);
        self.next = (phase, at);
        held
    }

    /// How many chunks of a stage are still to begin before it can run.
    pub fn lacks(&self, phase: Phase, stage: usize) -> usize {
        let own = |chunk: &&Chunk| chunk.stage == stage;
        let begun = self.held.iter().take_while(|chunk| chunk.stage == stage).count();
        self.orders[phase as usize].iter().filter(own).count().saturating_sub(begun)
    }

    /// The next chunk, if there is room for it and it is time.
    pub fn next_in_room(&mut self) -> Option<Chunk> {
        let next = self.peek().filter(|next| self.ahead && self.used + next.room <= self.room && !self.holds(next))?;
        self.begin(next);
        Some(next)
    }

    /// The next chunk, for a stage that waits for it.
    pub fn next_now(&mut self) -> Option<Chunk> {
        let next = self.peek()?;
        self.begin(next);
        Some(next)
    }

    /// A stage has run: its chunks give their room back.
    pub fn left(&mut self, stage: usize) {
        while let Some(chunk) = self.held.front().copied().filter(|chunk| chunk.stage == stage) {
            self.held.pop_front();
            self.used -= chunk.room;
        }
    }

    /// The same chunk cannot be held twice.
    fn holds(&self, chunk: &Chunk) -> bool {
        self.held.iter().any(|held| held.stage == chunk.stage && held.number == chunk.number)
    }

    fn peek(&self) -> Option<Chunk> {
        let (phase, at) = self.next;
        let order = &self.orders[phase as usize];
        order.get(at).or_else(|| self.orders[self.behind()? as usize].first()).copied()
    }

    /// The phase whose chunks come behind the end of a pass: decoding's where the next pass needs none.
    fn behind(&self) -> Option<Phase> {
        self.then.map(|then| if self.orders[then as usize].is_empty() { Phase::Decode } else { then })
    }

    fn begin(&mut self, chunk: Chunk) {
        let (phase, at) = self.next;
        let within = at < self.orders[phase as usize].len();
        self.next = if within { (phase, at + 1) } else { (self.behind().unwrap_or(phase), 1) };
        self.held.push_back(chunk);
        self.used += chunk.room;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(stages: &[usize]) -> Vec<Chunk> {
        stages.iter().map(|stage| Chunk { stage: *stage, number: 0, room: 1 }).collect()
    }

    /// Stages begun ahead until the room is full.
    fn filled(supply: &mut Supply) -> Vec<usize> {
        std::iter::from_fn(|| supply.next_in_room()).map(|chunk| chunk.stage).collect()
    }

    #[test]
    fn a_pass_is_followed_by_the_one_that_comes() {
        let mut supply = Supply::new([chunks(&[1, 2, 3]), chunks(&[4, 5])], 2, true);
        assert_eq!(filled(&mut supply), [1, 2]);
        supply.passing(Phase::Prefill);
        for (stage, next) in [(1, 3), (2, 1), (3, 2)] {
            assert!(supply.is_due(stage));
            supply.left(stage);
            assert_eq!(filled(&mut supply), [next]);
        }
        supply.passing(Phase::Decode);
        for (stage, next) in [(1, 3), (2, 4), (3, 5)] {
            supply.left(stage);
            assert_eq!(filled(&mut supply), [next]);
        }
        supply.passing(Phase::Decode);
        // The same weights are not held twice.
        supply.left(4);
        assert_eq!(filled(&mut supply), [4]);
    }

    /// Nobody knows before the first pass what comes behind it.
    #[test]
    fn before_the_first_pass_nothing_behind_it_is_brought() {
        let mut supply = Supply::new([chunks(&[1]), chunks(&[2])], 4, true);
        assert_eq!(filled(&mut supply), [1]);
        supply.passing(Phase::Decode);
        assert_eq!(filled(&mut supply), [2]);
    }

    #[test]
    fn another_way_than_was_thought_begins_again() {
        let mut supply = Supply::new([chunks(&[1, 2, 3]), vec![]], 2, true);
        assert_eq!(filled(&mut supply), [1, 2]);
        assert!(!supply.is_due(3));
        assert_eq!(supply.begin_again(Phase::Prefill, 3), [1, 2]);
        assert_eq!(supply.lacks(Phase::Prefill, 3), 1);
        assert_eq!(supply.next_now().map(|chunk| chunk.stage), Some(3));
        assert_eq!(supply.lacks(Phase::Prefill, 3), 0);
    }

    #[test]
    fn the_largest_stage_always_has_room() {
        let chunk = |number, room| Chunk { stage: 0, number, room };
        let mut supply = Supply::new([vec![chunk(0, 3), chunk(1, 4)], vec![]], 5, true);
        assert_eq!(std::iter::from_fn(|| supply.next_in_room()).count(), 2);
        assert_eq!(supply.lacks(Phase::Prefill, 0), 0);
    }
}
