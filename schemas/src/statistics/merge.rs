//! Merges statistics of two corpora for one model.

use super::{AttentionEntropy, BlockInfluence, BoundaryStatistics, ExpertStatistics, NeuronStatistics, Statistics};

/// The statistics are of different models.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("these statistics are of different models: {what}")]
pub struct StatisticsMismatch {
    what: String,
}

impl Statistics {
    /// Adds the statistics of another corpus for the same model. Counts are exact; means and squares equal those over
    /// all elements, up to rounding (Chan, Golub, LeVeque 1979). A list that one side lacks is taken from the other. On
    /// an error nothing changes.
    pub fn merge(&mut self, other: &Statistics) -> Result<(), StatisticsMismatch> {
        fits("boundaries", &self.boundaries, &other.boundaries)?;
        fits("influence", &self.influence, &other.influence)?;
        fits("attention", &self.attention, &other.attention)?;
        fits("experts", &self.experts, &other.experts)?;
        fits("neurons", &self.neurons, &other.neurons)?;
        add(&mut self.prompts, other.prompts);
        add(&mut self.prompt_tokens, other.prompt_tokens);
        add(&mut self.generated_tokens, other.generated_tokens);
        join(&mut self.boundaries, &other.boundaries);
        join(&mut self.influence, &other.influence);
        join(&mut self.attention, &other.attention);
        join(&mut self.experts, &other.experts);
        join(&mut self.neurons, &other.neurons);
        Ok(())
    }
}

/// Statistics of one block that can be merged.
trait BlockSums: Clone {
    fn block(&self) -> &str;

    /// Describes a difference that prevents merging.
    fn mismatch(&self, _other: &Self) -> Option<String> {
        None
    }

    fn merge(&mut self, other: &Self);
}

fn fits<T: BlockSums>(list: &str, mine: &[T], theirs: &[T]) -> Result<(), StatisticsMismatch> {
    if mine.is_empty() || theirs.is_empty() {
        return Ok(());
    }
    let mismatch = |what: String| Err(StatisticsMismatch { what });
    if mine.len() != theirs.len() {
        return mismatch(format!("{list} has {} entries in one and {} in the other", mine.len(), theirs.len()));
    }
    for (a, b) in mine.iter().zip(theirs) {
        if a.block() != b.block() {
            return mismatch(format!("{list} has {} in one where the other has {}", a.block(), b.block()));
        }
        if let Some(what) = a.mismatch(b) {
            return mismatch(format!("{list} of {} has {what}", a.block()));
        }
    }
    Ok(())
}

fn join<T: BlockSums>(mine: &mut Vec<T>, theirs: &[T]) {
    if mine.is_empty() {
        *mine = theirs.to_vec();
    } else {
        mine.iter_mut().zip(theirs).for_each(|(a, b)| a.merge(b));
    }
}

fn add(sum: &mut u64, more: u64) {
    *sum = sum.saturating_add(more);
}

/// Adds entry by entry; a shorter list counts as padded with zeros.
fn add_each(sums: &mut Vec<u64>, more: &[u64]) {
    sums.resize(sums.len().max(more.len()), 0);
    sums.iter_mut().zip(more).for_each(|(sum, more)| add(sum, *more));
}

/// The share of `theirs` in the sum of both.
fn share(mine: u64, theirs: u64) -> f64 {
    if theirs == 0 { 0.0 } else { theirs as f64 / (mine as f64 + theirs as f64) }
}

impl BlockSums for BoundaryStatistics {
    fn block(&self) -> &str {
        &self.block
    }

    fn merge(&mut self, other: &Self) {
        let share = share(self.elements, other.elements);
        let apart = other.mean - self.mean;
        self.squares += other.squares + apart * apart * share * self.elements as f64;
        self.mean += apart * share;
        self.mean_abs += (other.mean_abs - self.mean_abs) * share;
        self.max_abs = self.max_abs.max(other.max_abs);
        add(&mut self.elements, other.elements);
        add(&mut self.not_finite, other.not_finite);
    }
}

impl BlockSums for BlockInfluence {
    fn block(&self) -> &str {
        &self.block
    }

    fn merge(&mut self, other: &Self) {
        self.mean += (other.mean - self.mean) * share(self.tokens, other.tokens);
        add(&mut self.tokens, other.tokens);
    }
}

impl BlockSums for AttentionEntropy {
    fn block(&self) -> &str {
        &self.block
    }

    fn merge(&mut self, other: &Self) {
        self.mean += (other.mean - self.mean) * share(self.rows, other.rows);
        add(&mut self.rows, other.rows);
    }
}

impl BlockSums for ExpertStatistics {
    fn block(&self) -> &str {
        &self.block
    }

    fn mismatch(&self, other: &Self) -> Option<String> {
        let (mine, theirs) = (self.counts.len(), other.counts.len());
        if mine != theirs {
            return Some(format!("{mine} experts in one and {theirs} in the other"));
        }
        let (mine, theirs) = (self.top_k, other.top_k);
        (mine != theirs).then(|| format!("{mine} experts for each token in one and {theirs} in the other"))
    }

    fn merge(&mut self, other: &Self) {
        add(&mut self.tokens, other.tokens);
        add(&mut self.first_visits, other.first_visits);
        add_each(&mut self.counts, &other.counts);
        add_each(&mut self.reuse_distances, &other.reuse_distances);
        add_each(&mut self.oracle_hits, &other.oracle_hits);
    }
}

impl BlockSums for NeuronStatistics {
    fn block(&self) -> &str {
        &self.block
    }

    fn mismatch(&self, other: &Self) -> Option<String> {
        let (mine, theirs) = (self.active.len(), other.active.len());
        (mine != theirs).then(|| format!("{mine} neurons in one and {theirs} in the other"))
    }

    fn merge(&mut self, other: &Self) {
        add(&mut self.tokens, other.tokens);
        add_each(&mut self.active, &other.active);
    }
}
