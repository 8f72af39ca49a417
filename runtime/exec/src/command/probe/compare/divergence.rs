//! How far two rows of scores are apart as distributions over the next token.

/// Summed over positions.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Divergence {
    positions: u64,
    kl: f64,
    top1_changed: u64,
}

impl Divergence {
    /// Adds a position: the scores of the reference and of the other.
    pub fn add(&mut self, reference: &[f32], other: &[f32]) {
        self.positions += 1;
        self.kl += kl(reference, other);
        self.top1_changed += u64::from(best(reference) != best(other));
    }

    /// Positions added.
    pub fn positions(&self) -> u64 {
        self.positions
    }

    /// Mean divergence in nats, and the part of the positions whose best token changed; nothing where scores were no numbers.
    pub fn means(&self) -> Option<(f64, f64)> {
        let n = self.positions as f64;
        self.kl.is_finite().then(|| (self.kl / n, self.top1_changed as f64 / n))
    }
}

/// `KL(p || q) = sum p (a - b) - (ln sum e^a - ln sum e^b)` where `p` and `q` are the softmax of the scores `a` and `b`, in nats.
/// Exactly 0 for equal scores.
fn kl(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::NAN;
    }
    let (most_a, sum_a) = exponentials(a);
    let (most_b, sum_b) = exponentials(b);
    let mut apart = 0.0;
    for (a, b) in a.iter().zip(b) {
        let p = (f64::from(*a) - most_a).exp();
        // What the reference never chooses (a score of minus infinity) adds nothing.
        if p > 0.0 {
            apart += p * (f64::from(*a) - f64::from(*b));
        }
    }
    let kl = apart / sum_a - (most_a - most_b + (sum_a / sum_b).ln());
    // It is never negative but for rounding; what is no number stays none.
    if kl < 0.0 { 0.0 } else { kl }
}

/// The largest score, and the sum of exponentials relative to it.
fn exponentials(scores: &[f32]) -> (f64, f64) {
    let most = f64::from(scores.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    (most, scores.iter().map(|score| (f64::from(*score) - most).exp()).sum())
}

/// The first of the best scores.
fn best(scores: &[f32]) -> Option<usize> {
    crate::sampling::greedy(scores).map(|token| token as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn softmax(scores: &[f32]) -> Vec<f64> {
        let e: Vec<f64> = scores.iter().map(|s| f64::from(*s).exp()).collect();
        let sum: f64 = e.iter().sum();
        e.iter().map(|e| e / sum).collect()
    }

    proptest! {
        #[test]
        fn it_is_the_textbook_sum(pairs in proptest::collection::vec((-20.0..20.0f32, -20.0..20.0f32), 1..30)) {
            let (a, b): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
            let expected: f64 = softmax(&a).iter().zip(softmax(&b)).map(|(p, q)| p * (p / q).ln()).sum();
            prop_assert!((kl(&a, &b) - expected).abs() < 1e-9 * (1.0 + expected), "{} {}", kl(&a, &b), expected);
            prop_assert_eq!(kl(&a, &a), 0.0);
        }
    }

    #[test]
    fn large_scores_do_not_overflow() {
        assert!(
            (kl(&[1e4, 1e4], &[-1e4, -1e4 + 2.0]) - 0.5 * ((1f64.exp() + (-1f64).exp()).powi(2) / 4.0).ln()).abs()
                < 1e-9
        );
    }

    #[test]
    fn masked_tokens_add_nothing_and_no_number_is_noticed() {
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
