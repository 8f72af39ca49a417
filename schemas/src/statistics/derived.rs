//! What follows from the sums: variances, hit rates, frequencies. `None` where nothing was seen.

use super::{BoundaryStatistics, ExpertStatistics, NeuronStatistics};

impl BoundaryStatistics {
    /// Variance of the elements.
    pub fn variance(&self) -> Option<f64> {
        (self.elements > 0).then(|| self.squares / self.elements as f64)
    }
}

impl ExpertStatistics {
    /// Visits of all experts.
    pub fn visits(&self) -> u64 {
        sum(&self.counts)
    }

    /// Part of the visits that a cache of the `experts` last visited experts hits (LRU).
    pub fn lru_hit_rate(&self, experts: usize) -> Option<f64> {
        self.rate(sum(&self.reuse_distances[..experts.min(self.reuse_distances.len())]))
    }

    /// Part of the visits that the `experts` most visited experts take: what a cache that never changes hits.
    pub fn static_hit_rate(&self, experts: usize) -> Option<f64> {
        self.rate(sum_of_largest(&self.counts, experts))
    }

    /// Part of the visits that the best possible cache of `experts` experts hits.
    pub fn oracle_hit_rate(&self, experts: usize) -> Option<f64> {
        let hits = experts.min(self.oracle_hits.len()).checked_sub(1).map_or(0, |at| self.oracle_hits[at]);
        self.rate(hits)
    }

    fn rate(&self, hits: u64) -> Option<f64> {
        rate(hits, self.visits())
    }
}

impl NeuronStatistics {
    /// Part of the tokens for which a neuron was above zero.
    pub fn frequency(&self, neuron: usize) -> Option<f64> {
        rate(*self.active.get(neuron)?, self.tokens)
    }

    /// Part of all neurons that are above zero for a token, on average.
    pub fn density(&self) -> Option<f64> {
        rate(sum(&self.active), self.tokens.saturating_mul(self.active.len() as u64))
    }

    /// Part of all activations that fall on the `neurons` most active neurons.
    pub fn coverage(&self, neurons: usize) -> Option<f64> {
        rate(sum_of_largest(&self.active, neurons), sum(&self.active))
    }
}

pub(super) fn sum(counts: &[u64]) -> u64 {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}

fn sum_of_largest(counts: &[u64], how_many: usize) -> u64 {
    let mut counts = counts.to_vec();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    sum(&counts[..how_many.min(counts.len())])
}

fn rate(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}
