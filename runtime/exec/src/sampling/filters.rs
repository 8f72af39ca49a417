//! From scores to a token by chance: temperature, then top-k, top-p and min-p, in the order `transformers` has them.
//!
//! What is drawn is what sorting the whole vocabulary would give, without sorting it: [`Candidates`] holds a beginning of that
//! order, chosen by a threshold that cannot matter, and where the beginning turns out too short the whole order is used.

use super::RandomChoice;
use super::candidates::Candidates;
use super::mass::{highest, mass};
use std::collections::HashSet;

/// A threshold is lower than computed by this share, so that rounding cannot matter.
const SLACK: f64 = 0.999;

/// Makes tokens already in the text less likely.
pub fn penalise_repeats(scores: &mut [f32], seen: &HashSet<u32>, penalty: f64) {
    for token in seen {
        if let Some(score) = scores.get_mut(*token as usize) {
            let s = f64::from(*score);
            *score = (if s > 0.0 { s / penalty } else { s * penalty }) as f32;
        }
    }
}

/// The token at `chance`, a number in `[0, 1)`, among those that stay; `None` where no token can be drawn.
pub fn draw(scores: &[f32], choice: &RandomChoice, chance: f64, work: &mut Candidates) -> Option<u32> {
    let best = highest(scores);
    if best == f32::NEG_INFINITY {
        return None;
    }
    let row = Row { best, choice, chance };
    if choice.top_k > 0 && choice.top_k < scores.len() {
        work.top(scores, choice.top_k);
        let total = (0..work.len()).filter_map(|place| work.get(place)).map(|c| row.weight(c.1)).sum();
        return row.pick(work, total, true);
    }
    // Min-p alone compares with the best token, not with the sum of all.
    let summed = choice.top_p < 1.0 || choice.min_p <= 0.0;
    let total = if summed { mass(scores, best, choice.temperature) } else { 0.0 };
    let mean = total / scores.len() as f64;
    work.at_least(scores, row.least_score(mean));
    let complete = choice.min_p > row.least_by_mass(mean);
    row.pick(work, total, complete).or_else(|| {
        work.at_least(scores, f32::NEG_INFINITY);
        row.pick(work, total, true)
    })
}

/// How one token is chosen from one row of scores.
struct Row<'a> {
    best: f32,
    choice: &'a RandomChoice,
    chance: f64,
}

impl Row<'_> {
    /// How likely a token is, relative to the best.
    fn weight(&self, score: f32) -> f64 {
        if score == self.best {
            return 1.0;
        }
        ((f64::from(score) - f64::from(self.best)) / self.choice.temperature).exp()
    }

    /// A score below which no token can be drawn, where tokens have this mean weight: all those together that are lighter than a
    /// share of the mean have less than that share of the mass.
    fn least_score(&self, mean: f64) -> f32 {
        let weight = self.least_by_mass(mean).max(self.choice.min_p) * SLACK;
        let score = f64::from(self.best) + weight.ln() * self.choice.temperature;
        // Rounded down, and the best stays.
        (score as f32).next_down().min(self.best)
    }

    /// The weight below which tokens lie beyond what top-p keeps or, without it, beyond what is drawn.
    fn least_by_mass(&self, mean: f64) -> f64 {
        let RandomChoice { top_p, min_p, .. } = *self.choice;
        match (top_p < 1.0, min_p > 0.0) {
            (true, _) => (1.0 - top_p) * mean,
            (false, false) => (1.0 - self.chance) * mean,
            (false, true) => 0.0,
        }
    }

    /// Walks the order, best first, to the token that is drawn. `None` where the candidates end before that is known, which they
    /// cannot where they are `complete`: where no other token could stay.
    fn pick(&self, candidates: &mut Candidates, total: f64, complete: bool) -> Option<u32> {
        let (count, stays) = self.staying(candidates, total, complete)?;
        let (mut sum, mut last) = (0.0, None);
        for place in 0..count {
            let Some((token, score)) = candidates.get(place) else { return last.filter(|_| complete) };
            last = Some(token);
            sum += self.weight(score);
            if sum > self.chance * stays {
                break;
            }
        }
        // Rounding may leave a crumb behind the last one.
        last
    }

    /// How many of the best candidates top-p and min-p leave, one at least, and their mass.
    fn staying(&self, candidates: &mut Candidates, total: f64, complete: bool) -> Option<(usize, f64)> {
        let RandomChoice { top_p, min_p, .. } = *self.choice;
        if top_p >= 1.0 && min_p <= 0.0 {
            return Some((usize::MAX, total));
        }
        let mut sum = 0.0;
        for place in 0.. {
            let Some((_, score)) = candidates.get(place) else { return complete.then_some((place, sum)) };
            let weight = self.weight(score);
            if place > 0 && (weight < min_p || (top_p < 1.0 && sum >= top_p * total)) {
                return Some((place, sum));
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

    const ALL: RandomChoice = RandomChoice { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 };

    /// The same by sorting every token.
    fn by_full_sort(scores: &[f32], choice: &RandomChoice, chance: f64) -> Option<u32> {
        let mut all: Vec<(u32, f32)> = (0..).zip(scores.iter().copied()).filter(|c| c.1 > f32::NEG_INFINITY).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let best = all.first()?.1;
        let weight =
            |s: f32| if s == best { 1.0 } else { ((f64::from(s) - f64::from(best)) / choice.temperature).exp() };
        let mut total = mass(scores, best, choice.temperature);
        if choice.top_k > 0 && choice.top_k < scores.len() {
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
    fn drawn(probabilities: &[f64], choice: RandomChoice) -> usize {
        let scores: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32).collect();
        let mut work = Candidates::default();
        let tokens = (0..1000).map(|n| draw(&scores, &choice, f64::from(n) / 1000.0, &mut work));
        tokens.collect::<HashSet<_>>().len()
    }

    #[test]
    fn a_penalty_moves_scores_towards_less() {
        let mut scores = [2.0, -2.0, 3.0];
        penalise_repeats(&mut scores, &HashSet::from([0, 1, 99]), 2.0);
        assert_eq!(scores, [1.0, -4.0, 3.0]);
    }

    #[test]
    fn top_p_keeps_the_token_that_reaches_p() {
        for (top_p, left) in [(0.0, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1.0, 4)] {
            assert_eq!(drawn(&[0.3, 0.5, 0.05, 0.15], RandomChoice { top_p, ..ALL }), left, "top-p {top_p}");
        }
    }

    #[test]
    fn min_p_is_relative_to_the_best() {
        for (min_p, left) in [(0.0, 4), (0.05, 4), (0.2, 3), (0.5, 2), (1.0, 1)] {
            assert_eq!(drawn(&[0.3, 0.5, 0.05, 0.15], RandomChoice { min_p, ..ALL }), left, "min-p {min_p}");
        }
    }

    #[test]
    fn top_p_counts_what_top_k_leaves() {
        let choice = RandomChoice { top_k: 2, top_p: 0.6, ..ALL };
        assert_eq!(drawn(&[0.3, 0.5, 0.05, 0.15], choice), 1, "0.5 of 0.8 is more than 0.6");
    }

    #[test]
    fn an_infinite_score_takes_all() {
        let mut work = Candidates::default();
        for top_p in [0.5, 1.0] {
            let choice = RandomChoice { top_p, ..ALL };
            assert_eq!(draw(&[1.0, f32::INFINITY, 2.0], &choice, 0.999, &mut work), Some(1));
        }
    }

    /// Many tokens, so that thresholds and pieces matter, and few different scores, so that ties do.
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
            scores in row(),
            (top_p, min_p) in (share(), prop_oneof![2 => Just(0.0), 1 => share()]),
            top_k in prop_oneof![2 => Just(0usize), 1 => 1usize..5000],
            temperature in prop_oneof![Just(1.0), 0.000_001f64..3.0],
            chances in prop::collection::vec(prop_oneof![Just(0.0), Just(1.0 - f64::EPSILON / 2.0), 0.0f64..1.0], 1..8),
        ) {
            let choice = RandomChoice { temperature, top_k, top_p, min_p, seed: 0 };
            let mut work = Candidates::default();
            for chance in chances {
                prop_assert_eq!(draw(&scores, &choice, chance, &mut work), by_full_sort(&scores, &choice, chance));
            }
        }
    }
}
