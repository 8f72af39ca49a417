//! Experts that are read ahead: a prediction says that a later stage selects them. Whether that pays is decided from how often predictions were
//! right.
//!
//! One expert is read ahead for a stage, while the layer before computes. A wrong expert costs the rest of its read, if the layer ends before the
//! read, and the expert that was evicted for it. With the trained mixture grown to experts of 3 and 9 MB, reading two ahead for each stage was no
//! faster than reading none, and reading one was 1.1 times as fast (RUNTIME.md).

use super::experts::ExpertId;
use crate::ids::StageId;

/// The share of right predictions from which on reading ahead pays.
const WORTH: f64 = 0.5;
/// How much the latest prediction counts.
const WEIGHT: f64 = 1.0 / 64.0;
/// While predictions are wrong, one pass of this many tries them again.
const TRIAL_PASSES: u64 = 32;

/// The reads ahead that no run has waited for, and how often earlier ones were right.
#[derive(Debug)]
pub(crate) struct ReadAhead {
    /// Read ahead, and neither selected nor discarded.
    pending: Vec<ExpertId>,
    /// The share of the last reads ahead that a run used.
    right: f64,
    /// Reads ahead that no run used, since [`take_wrong`](Self::take_wrong).
    wrong: u64,
}

impl Default for ReadAhead {
    fn default() -> Self {
        // A little above `WORTH`: a few wrong predictions end reading ahead.
        ReadAhead { pending: Vec::new(), right: 0.6, wrong: 0 }
    }
}

impl ReadAhead {
    /// Whether experts may be read ahead in this pass.
    pub fn is_worth(&self, pass: u64) -> bool {
        self.right >= WORTH || pass.is_multiple_of(TRIAL_PASSES)
    }

    /// Whether an expert is being read ahead.
    pub fn is_pending(&self, id: ExpertId) -> bool {
        self.pending.contains(&id)
    }

    /// The read of an expert was started.
    pub fn started(&mut self, id: ExpertId) {
        self.pending.push(id);
    }

    /// A run uses an expert. Returns whether the expert was read ahead for the run and its read was not waited for yet.
    pub fn selected(&mut self, id: ExpertId) -> bool {
        let was_read = self.remove(id);
        if was_read {
            self.right += WEIGHT * (1.0 - self.right);
        }
        was_read
    }

    /// Discards the experts that were read ahead for a stage and that its run does not use; returns them.
    pub fn unused(&mut self, stage: StageId) -> Vec<ExpertId> {
        let unused: Vec<ExpertId> = self.pending.extract_if(.., |id| id.stage == stage).collect();
        unused.iter().for_each(|_| self.count_wrong());
        unused
    }

    /// An expert is evicted. Returns whether it was read ahead and not used.
    pub fn evicted(&mut self, id: ExpertId) -> bool {
        let was_read = self.remove(id);
        if was_read {
            self.count_wrong();
        }
        was_read
    }

    /// How many reads ahead were not used since the last call.
    pub fn take_wrong(&mut self) -> u64 {
        std::mem::take(&mut self.wrong)
    }

    fn count_wrong(&mut self) {
        self.right -= WEIGHT * self.right;
        self.wrong += 1;
    }

    fn remove(&mut self, id: ExpertId) -> bool {
        let index = self.pending.iter().position(|pending| *pending == id);
        index.map(|index| self.pending.swap_remove(index)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Id;

    fn id(expert: u32) -> ExpertId {
        ExpertId { stage: StageId::new(1), expert }
    }

    /// Reads an expert ahead, which a run uses or not.
    fn predict(ahead: &mut ReadAhead, is_right: bool) {
        ahead.started(id(0));
        assert_eq!(ahead.selected(id(if is_right { 0 } else { 1 })), is_right);
        assert_eq!(ahead.unused(StageId::new(1)).is_empty(), is_right);
    }

    #[test]
    fn wrong_predictions_end_reading_ahead_but_for_trials_and_right_ones_bring_it_back() {
        let mut ahead = ReadAhead::default();
        let passes = |ahead: &ReadAhead| (1..=64).filter(|pass| ahead.is_worth(*pass)).count();
        assert_eq!(passes(&ahead), 64);
        (0..12).for_each(|_| predict(&mut ahead, false));
        assert_eq!((passes(&ahead), ahead.take_wrong(), ahead.take_wrong()), (2, 12, 0));
        (0..100).for_each(|_| predict(&mut ahead, true));
        assert_eq!((passes(&ahead), ahead.take_wrong()), (64, 0));
        // Two of three are right.
        (0..200).for_each(|number| predict(&mut ahead, number % 3 != 0));
        assert_eq!(passes(&ahead), 64);
    }

    #[test]
    fn an_expert_counts_once() {
        let mut ahead = ReadAhead::default();
        ahead.started(id(3));
        assert!(ahead.is_pending(id(3)) && ahead.unused(StageId::new(2)).is_empty());
        assert!(ahead.selected(id(3)) && !ahead.selected(id(3)));
        ahead.started(id(4));
        assert!(ahead.evicted(id(4)) && !ahead.evicted(id(4)));
        assert!(ahead.unused(StageId::new(1)).is_empty());
        assert_eq!(ahead.take_wrong(), 1);
    }
}
