//! The filters between scores and chance, each one a small function over `(token, score)` pairs.
//!
//! They run in the order `transformers` runs them: repetition penalty, temperature, top-k, top-p, min-p. After
//! [`best_first`] the candidates stay sorted by falling score, ties by token id.

use std::collections::HashSet;

/// A token and its score.
pub type Candidate = (u32, f64);

/// Makes tokens already in the text less likely.
pub fn penalise_repeats(scores: &mut [f32], seen: &HashSet<u32>, penalty: f64) {
    if penalty == 1.0 {
        return;
    }
    for token in seen {
        if let Some(score) = scores.get_mut(*token as usize) {
            let s = f64::from(*score);
            *score = (if s > 0.0 { s / penalty } else { s * penalty }) as f32;
        }
    }
}

/// The `keep` best candidates (0: all of them), best first, scores divided by the temperature. Tokens scored minus
/// infinity cannot be drawn and are left out.
pub fn best_first(scores: &[f32], temperature: f64, keep: usize) -> Vec<Candidate> {
    let mut all: Vec<Candidate> = (0u32..)
        .zip(scores)
        .filter(|(_, s)| **s > f32::NEG_INFINITY)
        .map(|(token, s)| (token, f64::from(*s) / temperature))
        .collect();
    let order = |a: &Candidate, b: &Candidate| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if keep > 0 && keep < all.len() {
        all.select_nth_unstable_by(keep - 1, order);
        all.truncate(keep);
    }
    all.sort_unstable_by(order);
    all
}

/// Probabilities of the candidates' scores.
pub fn softmax(candidates: &[Candidate]) -> Vec<f64> {
    let best = candidates.first().map_or(0.0, |c| c.1);
    let weights: Vec<f64> = candidates.iter().map(|c| if c.1 == best { 1.0 } else { (c.1 - best).exp() }).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}

/// Keeps the fewest best candidates whose probabilities add up to at least `p`; always one.
pub fn top_p(candidates: &mut Vec<Candidate>, p: f64) {
    if p >= 1.0 {
        return;
    }
    let mut sum = 0.0;
    let keep = softmax(candidates).into_iter().take_while(|probability| {
        let more = sum < p;
        sum += probability;
        more
    });
    let keep = keep.count();
    candidates.truncate(keep.max(1));
}

/// Keeps the candidates at least `p` times as likely as the best; always one.
pub fn min_p(candidates: &mut Vec<Candidate>, p: f64) {
    if p <= 0.0 {
        return;
    }
    let Some((_, best)) = candidates.first().copied() else { return };
    let keep = candidates.iter().take_while(|(_, score)| *score == best || (score - best).exp() >= p).count();
    candidates.truncate(keep.max(1));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of_probabilities(probabilities: &[f64]) -> Vec<Candidate> {
        (0u32..).zip(probabilities).map(|(t, p)| (t, p.ln())).collect()
    }

    #[test]
    fn a_penalty_moves_scores_towards_less() {
        let mut scores = [2.0, -2.0, 3.0];
        penalise_repeats(&mut scores, &HashSet::from([0, 1, 99]), 2.0);
        assert_eq!(scores, [1.0, -4.0, 3.0]);
    }

    #[test]
    fn best_first_breaks_ties_by_token_and_drops_the_impossible() {
        let scores = [1.0, 3.0, f32::NEG_INFINITY, 3.0, 2.0];
        assert_eq!(best_first(&scores, 0.5, 3), [(1, 6.0), (3, 6.0), (4, 4.0)]);
        assert_eq!(best_first(&scores, 1.0, 0).len(), 4);
        assert_eq!(best_first(&scores, 1.0, 99).len(), 4);
    }

    #[test]
    fn top_p_keeps_the_token_that_reaches_p() {
        for (p, left) in [(0.0, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1.0, 4)] {
            let mut c = of_probabilities(&[0.5, 0.3, 0.15, 0.05]);
            top_p(&mut c, p);
            assert_eq!(c.len(), left, "top-p {p}");
        }
    }

    #[test]
    fn min_p_is_relative_to_the_best() {
        for (p, left) in [(0.0, 4), (0.05, 4), (0.2, 3), (0.5, 2), (1.0, 1)] {
            let mut c = of_probabilities(&[0.5, 0.3, 0.15, 0.05]);
            min_p(&mut c, p);
            assert_eq!(c.len(), left, "min-p {p}");
        }
    }

    #[test]
    fn an_infinite_score_takes_all() {
        let c = best_first(&[1.0, f32::INFINITY, 2.0], 1.0, 0);
        assert_eq!(softmax(&c), [1.0, 0.0, 0.0]);
    }

    proptest! {
        #[test]
        fn top_k_is_the_head_of_the_full_order(scores in prop::collection::vec(-9.0f32..9.0, 1..80), k in 1usize..90) {
            let all = best_first(&scores, 1.0, 0);
            let kept = best_first(&scores, 1.0, k);
            prop_assert_eq!(&kept[..], &all[..k.min(all.len())]);
        }

        #[test]
        fn top_p_keeps_the_smallest_head_that_reaches_p(
            scores in prop::collection::vec(-9.0f32..9.0, 1..80),
            p in 0.0f64..1.0,
        ) {
            let all = best_first(&scores, 1.0, 0);
            let probabilities = softmax(&all);
            let mut kept = all.clone();
            top_p(&mut kept, p);
            prop_assert_eq!(&kept[..], &all[..kept.len()]);
            let sum = |n: usize| probabilities[..n].iter().sum::<f64>();
            prop_assert!(sum(kept.len()) >= p - 1e-12);
            prop_assert!(kept.len() == 1 || sum(kept.len() - 1) < p);
        }

        #[test]
        fn min_p_splits_at_the_threshold(scores in prop::collection::vec(-9.0f32..9.0, 1..80), p in 0.001f64..1.0) {
            let all = best_first(&scores, 1.0, 0);
            let mut kept = all.clone();
            min_p(&mut kept, p);
            let relative = |c: &Candidate| (c.1 - all[0].1).exp();
            prop_assert!(kept.iter().skip(1).all(|c| relative(c) >= p));
            prop_assert!(all[kept.len()..].iter().all(|c| relative(c) < p));
        }

        #[test]
        fn probabilities_add_up_to_one(scores in prop::collection::vec(-99.0f32..99.0, 1..80), t in 0.01f64..9.0) {
            let sum: f64 = softmax(&best_first(&scores, t, 0)).iter().sum();
            prop_assert!((sum - 1.0).abs() < 1e-9);
        }
    }
}
