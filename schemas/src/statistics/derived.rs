//! Variances, hit rates and frequencies derived from the sums. `None` without data.

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

    /// Share of the visits that hit an LRU cache of `experts` experts.
    pub fn lru_hit_rate(&self, experts: usize) -> Option<f64> {
        self.rate(sum(&self.reuse_distances[..experts.min(self.reuse_distances.len())]))
    }

    fn rate(&self, hits: u64) -> Option<f64> {
        rate(hits, self.visits())
    }
}

impl NeuronStatistics {
    /// Share of the tokens for which a neuron was above zero.
    pub fn frequency(&self, neuron: usize) -> Option<f64> {
        rate(*self.active.get(neuron)?, self.tokens)
    }

    /// Share of all neurons that are above zero for a token, on average.
    pub fn density(&self) -> Option<f64> {
        rate(sum(&self.active), self.tokens.saturating_mul(self.active.len() as u64))
    }

    /// Share of all activations that belong to the `neurons` most active neurons.
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
