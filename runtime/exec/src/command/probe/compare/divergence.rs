//! The divergence of two rows of logits as distributions over the next token.

use hpp_generate::sampling::greedy;

/// Sums over positions.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Divergence {
    positions: u64,
    kl: f64,
    top1_changed: u64,
}

impl Divergence {
    /// Adds a position: the logits of the reference and of the other model.
    pub fn add(&mut self, reference: &[f32], other: &[f32]) {
        self.positions += 1;
        self.kl += kl(reference, other);
        self.top1_changed += u64::from(greedy(reference).ok() != greedy(other).ok());
    }

    /// Number of positions.
    pub fn positions(&self) -> u64 {
        self.positions
    }

    /// Mean divergence in nats, and the fraction of positions whose most likely token changed. `None` if some logits were NaN.
    pub fn means(&self) -> Option<(f64, f64)> {
        let n = self.positions as f64;
        self.kl.is_finite().then(|| (self.kl / n, self.top1_changed as f64 / n))
    }
}

/// `KL(p || q) = sum p (a - b) - (ln sum e^a - ln sum e^b)` in nats, where `p` and `q` are the softmax of the logits `a` and `b`.
/// Exactly 0 for equal logits.
pub(in crate::command) fn kl(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::NAN;
    }
    let (max_a, sum_a) = exponentials(a);
    let (max_b, sum_b) = exponentials(b);
    let mut weighted = 0.0;
    for (a, b) in a.iter().zip(b) {
        let p = (f64::from(*a) - max_a).exp();
        // A token of probability zero, with a logit of minus infinity, adds nothing.
        if p > 0.0 {
            weighted += p * (f64::from(*a) - f64::from(*b));
        }
    }
    let kl = weighted / sum_a - (max_a - max_b + (sum_a / sum_b).ln());
    // A negative sum is a rounding error. NaN stays NaN.
    if kl < 0.0 { 0.0 } else { kl }
}

/// The largest logit, and the sum of exponentials relative to it.
fn exponentials(logits: &[f32]) -> (f64, f64) {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    (max, logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn softmax(logits: &[f32]) -> Vec<f64> {
        let e: Vec<f64> = logits.iter().map(|s| f64::from(*s).exp()).collect();
        let sum: f64 = e.iter().sum();
        e.iter().map(|e| e / sum).collect()
    }

    proptest! {
        #[test]
        fn it_equals_the_definition(pairs in proptest::collection::vec((-20.0..20.0f32, -20.0..20.0f32), 1..30)) {
            let (a, b): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
            let expected: f64 = softmax(&a).iter().zip(softmax(&b)).map(|(p, q)| p * (p / q).ln()).sum();
            prop_assert!((kl(&a, &b) - expected).abs() < 1e-9 * (1.0 + expected), "{} {}", kl(&a, &b), expected);
            prop_assert_eq!(kl(&a, &a), 0.0);
        }
    }

    #[test]
    fn large_logits_do_not_overflow() {
        assert!(
            (kl(&[1e4, 1e4], &[-1e4, -1e4 + 2.0]) - 0.5 * ((1f64.exp() + (-1f64).exp()).powi(2) / 4.0).ln()).abs()
                < 1e-9
        );
    }

    #[test]
    fn masked_tokens_add_nothing_and_nan_gives_no_mean() {
        let masked = [0.0, 1.0, f32::NEG_INFINITY];
        assert_eq!(kl(&masked, &masked), 0.0);
        let mut all = Divergence::default();
        all.add(&[0.0, 1.0], &[1.0, 0.0]);
        all.add(&[0.0, 1.0], &[0.0, 1.0]);
        let (kl, changed) = all.means().unwrap();
        assert!(kl > 0.0);
        assert_eq!((all.positions(), changed), (2, 0.5));
        all.add(&[0.0, 1.0], &[f32::NAN, 1.0]);
        assert!(all.means().is_none());
        all = Divergence::default();
        all.add(&[0.0, 1.0], &[0.0]);
        assert!(all.means().is_none(), "another vocabulary");
    }
}
