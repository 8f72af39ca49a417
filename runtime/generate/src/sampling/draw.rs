//! Draws a token at random: temperature, then top-k, top-p and min-p, in the order of `transformers`.
//!
//! Invariant: the token is the one that sorting the whole vocabulary would give. The draw does not sort it: [`Candidates`] holds a
//! prefix of that order, cut at a logit below which no token can be drawn. Where rounding makes the prefix too short, the draw
//! runs again on the whole row.

use super::RandomSampling;
use super::candidates::Candidates;
use super::exp_sum::{exp_sum, max_logit};
use std::collections::HashSet;

/// Factor that lowers a computed threshold, so that its rounding error cannot exclude a token.
const SLACK: f64 = 0.999;

/// Divides positive logits of the tokens in `seen` by the penalty and multiplies negative ones.
pub fn penalise_repeats(logits: &mut [f32], seen: &HashSet<u32>, penalty: f64) {
    for token in seen {
        if let Some(logit) = logits.get_mut(*token as usize) {
            let value = f64::from(*logit);
            *logit = (if value > 0.0 { value / penalty } else { value * penalty }) as f32;
        }
    }
}

/// The token at quantile `chance`, a number in `[0, 1)`, of the distribution that the filters leave, tokens in falling order of
/// probability. `None` if every logit is minus infinity.
pub fn draw(logits: &[f32], choice: &RandomSampling, chance: f64, candidates: &mut Candidates) -> Option<u32> {
    let max = max_logit(logits);
    if max == f32::NEG_INFINITY {
        return None;
    }
    let row = Row { max, choice, chance };
    if choice.top_k > 0 && choice.top_k < logits.len() {
        candidates.top(logits, choice.top_k);
        let total = (0..candidates.len()).filter_map(|rank| candidates.get(rank)).map(|c| row.weight(c.1)).sum();
        return row.pick(candidates, total, true);
    }
    // Min-p alone compares with the most likely token and needs no sum over all.
    let needs_total = choice.top_p < 1.0 || choice.min_p <= 0.0;
    let total = if needs_total { exp_sum(logits, max, choice.temperature) } else { 0.0 };
    let mean = total / logits.len() as f64;
    candidates.at_least(logits, row.min_logit(mean));
    let complete = choice.min_p > row.min_weight(mean);
    row.pick(candidates, total, complete).or_else(|| {
        candidates.at_least(logits, f32::NEG_INFINITY);
        row.pick(candidates, total, true)
    })
}

/// What a draw from one row depends on. The weight of a token is its probability relative to the most likely token's.
struct Row<'a> {
    max: f32,
    choice: &'a RandomSampling,
    chance: f64,
}

impl Row<'_> {
    /// `exp((logit - max) / temperature)`.
    fn weight(&self, logit: f32) -> f64 {
        if logit == self.max {
            return 1.0;
        }
        ((f64::from(logit) - f64::from(self.max)) / self.choice.temperature).exp()
    }

    /// A logit below which no token can be drawn, given the mean weight of all tokens.
    fn min_logit(&self, mean: f64) -> f32 {
        let weight = self.min_weight(mean).max(self.choice.min_p) * SLACK;
        let logit = f64::from(self.max) + weight.ln() * self.choice.temperature;
        // Rounded down, and never above the maximum.
        (logit as f32).next_down().min(self.max)
    }

    /// The weight below which tokens come after those that top-p keeps or, without top-p, after the token at `chance`.
    ///
    /// All tokens lighter than a fraction of the mean weight have together less than that fraction of the total.
    fn min_weight(&self, mean: f64) -> f64 {
        let RandomSampling { top_p, min_p, .. } = *self.choice;
        match (top_p < 1.0, min_p > 0.0) {
            (true, _) => (1.0 - top_p) * mean,
            (false, false) => (1.0 - self.chance) * mean,
            (false, true) => 0.0,
        }
    }

    /// Walks the candidates in order to the token at `chance`. `None` if they end before it, which cannot happen if they are
    /// `complete`, that is, hold every token that the filters may keep.
    fn pick(&self, candidates: &mut Candidates, total: f64, complete: bool) -> Option<u32> {
        let (kept, kept_total) = self.kept(candidates, total, complete)?;
        let (mut sum, mut last) = (0.0, None);
        for rank in 0..kept {
            let Some((token, logit)) = candidates.get(rank) else { return last.filter(|_| complete) };
            last = Some(token);
            sum += self.weight(logit);
            if sum > self.chance * kept_total {
                break;
            }
        }
        // Rounding may leave the sum of all slightly below the target: then the last one.
        last
    }

    /// How many candidates top-p and min-p keep, at least one, and the sum of their weights.
    fn kept(&self, candidates: &mut Candidates, total: f64, complete: bool) -> Option<(usize, f64)> {
        let RandomSampling { top_p, min_p, .. } = *self.choice;
        if top_p >= 1.0 && min_p <= 0.0 {
            return Some((usize::MAX, total));
        }
        let mut sum = 0.0;
        for rank in 0.. {
            let Some((_, logit)) = candidates.get(rank) else { return complete.then_some((rank, sum)) };
            let weight = self.weight(logit);
            if rank > 0 && (weight < min_p || (top_p < 1.0 && sum >= top_p * total)) {
                return Some((rank, sum));
            }
            sum += weight;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: RandomSampling = RandomSampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 };

    /// The token that [`draw`] must give, found by sorting every token.
    fn by_full_sort(logits: &[f32], choice: &RandomSampling, chance: f64) -> Option<u32> {
        let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).filter(|c| c.1 > f32::NEG_INFINITY).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let best = all.first()?.1;
        let weight =
            |s: f32| if s == best { 1.0 } else { ((f64::from(s) - f64::from(best)) / choice.temperature).exp() };
        let mut total = exp_sum(logits, best, choice.temperature);
        if choice.top_k > 0 && choice.top_k < logits.len() {
            all.truncate(choice.top_k);
            total = all.iter().map(|c| weight(c.1)).sum();
        }
        let (mut kept, mut sum) = (0, 0.0);
        while kept < all.len() {
            let weight = weight(all[kept].1);
            if kept > 0 && ((choice.top_p < 1.0 && sum >= choice.top_p * total) || weight < choice.min_p) {
                break;
            }
            sum += weight;
            kept += 1;
        }
        let stays = if choice.top_p >= 1.0 && choice.min_p <= 0.0 { total } else { sum };
        let mut sum = 0.0;
        let drawn = all[..kept].iter().find(|c| {
            sum += weight(c.1);
            sum > chance * stays
        });
        drawn.or(all[..kept].last()).map(|c| c.0)
    }

    /// Tokens that can be drawn.
    fn drawn(probabilities: &[f64], choice: RandomSampling) -> usize {
        let logits: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32).collect();
        let mut work = Candidates::default();
        let tokens = (0..1000).map(|n| draw(&logits, &choice, f64::from(n) / 1000.0, &mut work));
        tokens.collect::<HashSet<_>>().len()
    }

    #[test]
    fn a_penalty_lowers_logits() {
        let mut logits = [2.0, -2.0, 3.0];
        penalise_repeats(&mut logits, &HashSet::from([0, 1, 99]), 2.0);
        assert_eq!(logits, [1.0, -4.0, 3.0]);
    }

    #[test]
    fn top_p_keeps_the_token_that_reaches_p() {
        for (top_p, left) in [(0.0, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1.0, 4)] {
            assert_eq!(drawn(&[0.3, 0.5, 0.05, 0.15], RandomSampling { top_p, ..ALL }), left, "top-p {top_p}");
        }
    }

    #[test]
    fn min_p_is_relative_to_the_best() {
        for (min_p, left) in [(0.0, 4), (0.05, 4), (0.2, 3), (0.5, 2), (1.0, 1)] {
            assert_eq!(drawn(&[0.3, 0.5, 0.05, 0.15], RandomSampling { min_p, ..ALL }), left, "min-p {min_p}");
        }
    }

    #[test]
    fn top_p_counts_what_top_k_leaves() {
        let choice = RandomSampling { top_k: 2, top_p: 0.6, ..ALL };
        assert_eq!(drawn(&[0.3, 0.5, 0.05, 0.15], choice), 1, "0.5 of 0.8 is more than 0.6");
    }

    #[test]
    fn an_infinite_logit_has_probability_one() {
        let mut work = Candidates::default();
        for top_p in [0.5, 1.0] {
            let choice = RandomSampling { top_p, ..ALL };
            assert_eq!(draw(&[1.0, f32::INFINITY, 2.0], &choice, 0.999, &mut work), Some(1));
        }
    }

    /// Many tokens, so that thresholds and pieces matter, and few different logits, so that ties do.
    fn row() -> impl Strategy<Value = Vec<f32>> {
        let wide = (1usize..4000, 1.0f32..60.0, 1u32..2000).prop_map(|(count, range, step)| {
            (0..count as u32)
                .map(|i| ((i.wrapping_mul(2_654_435_761) >> 16) % step) as f32 / step as f32 * range)
                .collect()
        });
        let odd = prop_oneof![Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(0.0), Just(-0.0), -1e30f32..1e30];
        prop_oneof![3 => wide, 1 => prop::collection::vec(odd, 0..40)]
    }

    fn share() -> impl Strategy<Value = f64> {
        prop_oneof![Just(0.0), Just(1.0), Just(0.9), Just(0.999_999_999), 0.0f64..1.0]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn the_token_is_the_one_a_full_sort_gives(
            logits in row(),
            (top_p, min_p) in (share(), prop_oneof![2 => Just(0.0), 1 => share()]),
            top_k in prop_oneof![2 => Just(0usize), 1 => 1usize..5000],
            temperature in prop_oneof![Just(1.0), 0.000_001f64..3.0],
            chances in prop::collection::vec(prop_oneof![Just(0.0), Just(1.0 - f64::EPSILON / 2.0), 0.0f64..1.0], 1..8),
        ) {
            let choice = RandomSampling { temperature, top_k, top_p, min_p, seed: 0 };
            let mut work = Candidates::default();
            for chance in chances {
                prop_assert_eq!(draw(&logits, &choice, chance, &mut work), by_full_sort(&logits, &choice, chance));
            }
        }
    }
}
