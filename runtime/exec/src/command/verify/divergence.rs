//! What `--kl` measures: how far the distributions of a plan are from those of a reference.

use serde::Serialize;

/// The result of a comparison.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// What the plan is compared with.
    pub reference: String,
    /// Prompts that were compared.
    pub prompts: usize,
    /// Positions compared: one distribution over the next token each.
    pub positions: usize,
    /// Kullback-Leibler divergence of the plan's distributions from the reference's, nats.
    pub kl: Quantiles,
    /// Fraction of positions where both find the same token most likely.
    pub same_top1: f64,
    /// Perplexity of the reference on the prompts; null if no prompt has two tokens.
    pub reference_perplexity: Option<f64>,
    /// Perplexity of the plan on the prompts.
    pub perplexity: Option<f64>,
    /// Perplexity of the plan over that of the reference.
    pub perplexity_ratio: Option<f64>,
}

/// Mean and quantiles over positions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Quantiles {
    pub mean: f64,
    pub median: f64,
    pub p99: f64,
    pub p99_9: f64,
    pub max: f64,
}

impl Quantiles {
    /// The mean and quantiles of sorted numbers, at least one.
    pub fn of(sorted: &[f64]) -> Self {
        // The smallest number such that at least this fraction of all numbers are not larger.
        let at = |fraction: f64| {
            let rank = (fraction * sorted.len() as f64).ceil() as usize;
            sorted[rank.clamp(1, sorted.len()) - 1]
        };
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        Quantiles { mean, median: at(0.5), p99: at(0.99), p99_9: at(0.999), max: at(1.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_numbers_that_occur() {
        let sorted: Vec<f64> = (1..=1000).map(f64::from).collect();
        let expected = Quantiles { mean: 500.5, median: 500.0, p99: 990.0, p99_9: 999.0, max: 1000.0 };
        assert_eq!(Quantiles::of(&sorted), expected);
        let one = Quantiles { mean: 2.0, median: 2.0, p99: 2.0, p99_9: 2.0, max: 2.0 };
        assert_eq!(Quantiles::of(&[2.0]), one);
    }
}
