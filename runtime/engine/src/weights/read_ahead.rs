//! Experts that are read ahead: a prediction says that a later stage selects them. How many is decided from how often predictions were right.
//!
//! A read ahead is free only while nothing else needs the disk: the caller starts it when the reads of the stage that runs now have finished.
//! A wrong one costs the disk's time, if the next stage needs another expert before it ends, and the expert that was evicted for it.

use super::experts::ExpertId;
use crate::ids::StageId;

/// Most experts that are read ahead for a stage. More than the disk reads while a layer computes would delay what the next router selects.
const MOST: usize = 4;
/// The share of right predictions from which on reading ahead pays.
const WORTH: f64 = 0.3;
/// How much the latest prediction counts.
const WEIGHT: f64 = 1.0 / 64.0;
/// While predictions are wrong, one pass of this many tries them again, with one expert for each stage.
const TRIAL_PASSES: u64 = 32;

/// The reads ahead that are not used yet, and how often earlier ones were.
#[derive(Debug)]
pub(crate) struct ReadAhead {
    /// Read ahead, and neither selected nor given up.
    pending: Vec<ExpertId>,
    /// The share of reads ahead that were used, of the last ones.
    right: f64,
}

impl Default for ReadAhead {
    fn default() -> Self {
        ReadAhead { pending: Vec::new(), right: 0.5 }
    }
}

impl ReadAhead {
    /// How many experts may be read ahead for a stage in this pass.
    pub fn limit(&self, pass: u64) -> usize {
        match self.right >= WORTH {
            true => MOST,
            false => usize::from(pass.is_multiple_of(TRIAL_PASSES)),
        }
    }

    /// Whether an expert is being read ahead.
    pub fn is_pending(&self, id: ExpertId) -> bool {
        self.pending.contains(&id)
    }

    /// The read of an expert was started.
    pub fn started(&mut self, id: ExpertId) {
        self.pending.push(id);
    }

    /// A run uses an expert; whether it was read ahead for it, and nobody has waited for the read.
    pub fn selected(&mut self, id: ExpertId) -> bool {
        let was_read = self.forget(id);
        if was_read {
            self.right += WEIGHT * (1.0 - self.right);
        }
        was_read
    }

    /// A stage has run: what was read ahead for it and was not selected.
    pub fn unused(&mut self, stage: StageId) -> Vec<ExpertId> {
        let unused: Vec<ExpertId> = self.pending.extract_if(.., |id| id.stage == stage).collect();
        unused.iter().for_each(|_| self.right -= WEIGHT * self.right);
        unused
    }

    /// An expert is evicted; whether it was read ahead and not used.
    pub fn forget(&mut self, id: ExpertId) -> bool {
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

    /// Reads two experts ahead and selects so many of them.
    fn pass(ahead: &mut ReadAhead, selected: u32) {
        (0..2).for_each(|expert| ahead.started(id(expert)));
        (0..selected).for_each(|expert| assert!(ahead.selected(id(expert))));
        assert_eq!(ahead.unused(StageId::new(1)).len(), 2 - selected as usize);
    }

    #[test]
    fn wrong_predictions_end_reading_ahead_but_for_trials_and_right_ones_bring_it_back() {
        let mut ahead = ReadAhead::default();
        assert_eq!(ahead.limit(1), MOST);
        (0..100).for_each(|_| pass(&mut ahead, 0));
        assert_eq!((1..=64).map(|pass| ahead.limit(pass)).sum::<usize>(), 2);
        (0..100).for_each(|_| pass(&mut ahead, 2));
        assert_eq!(ahead.limit(1), MOST);
        (0..100).for_each(|_| pass(&mut ahead, 1));
        assert_eq!(ahead.limit(1), MOST);
    }

    #[test]
    fn an_expert_counts_once() {
        let mut ahead = ReadAhead::default();
        ahead.started(id(3));
        assert!(ahead.unused(StageId::new(2)).is_empty());
        assert!(ahead.selected(id(3)) && !ahead.selected(id(3)));
        ahead.started(id(4));
        assert!(ahead.forget(id(4)) && !ahead.forget(id(4)));
        assert!(ahead.unused(StageId::new(1)).is_empty());
    }
}
