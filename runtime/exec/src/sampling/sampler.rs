//! One text's sampler: settings, the tokens so far and the random numbers.

use super::candidates::Candidates;
use super::filters::{draw, penalise_repeats};
use super::mass::{all_numbers, highest};
use super::{Choice, Sampling};
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::collections::HashSet;

/// Chooses token after token of one text.
pub struct Sampler {
    settings: Sampling,
    seen: HashSet<u32>,
    random: Option<ChaCha12Rng>,
    /// Memory for scores that change, used again for each token.
    penalised: Vec<f32>,
    /// The same for candidates.
    candidates: Candidates,
}

/// Why no token could be chosen.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SamplingError {
    /// The scores hold something that is not a number.
    #[error("the model's score for token {token} is not a number (NaN)")]
    NotANumber {
        /// The first such token.
        token: usize,
    },
    /// There is nothing to choose from.
    #[error("the model gives no token a chance: all {count} scores are minus infinity")]
    NoCandidate {
        /// Number of scores.
        count: usize,
    },
}

impl Sampler {
    /// A sampler for one text; `prompt` counts as said for the repetition penalty.
    pub fn new(settings: Sampling, prompt: &[u32]) -> Self {
        let random = match settings.choice {
            Choice::Greedy => None,
            Choice::Random(choice) => Some(ChaCha12Rng::seed_from_u64(choice.seed)),
        };
        let seen = prompt.iter().copied().collect();
        Self { settings, seen, random, penalised: Vec::new(), candidates: Candidates::default() }
    }

    /// The next token of the text.
    pub fn next(&mut self, scores: &[f32]) -> Result<u32, SamplingError> {
        if !all_numbers(scores) {
            let token = scores.iter().position(|s| s.is_nan()).unwrap_or(0);
            return Err(SamplingError::NotANumber { token });
        }
        let scores = if self.settings.repetition_penalty == 1.0 {
            scores
        } else {
            self.penalised.clear();
            self.penalised.extend_from_slice(scores);
            penalise_repeats(&mut self.penalised, &self.seen, self.settings.repetition_penalty);
            &self.penalised
        };
        let token = match (self.settings.choice, &mut self.random) {
            (Choice::Random(choice), Some(random)) => draw(scores, &choice, unit(random), &mut self.candidates),
            _ => greedy(scores),
        };
        let token = token.ok_or(SamplingError::NoCandidate { count: scores.len() })?;
        self.seen.insert(token);
        Ok(token)
    }
}

/// The best-scored token, the lowest id among equals.
pub fn greedy(scores: &[f32]) -> Option<u32> {
    let best = highest(scores);
    if best == f32::NEG_INFINITY {
        return None;
    }
    (0u32..).zip(scores).find(|(_, score)| **score == best).map(|(token, _)| token)
}

/// A number in `[0, 1)` with 53 random bits.
fn unit(random: &mut ChaCha12Rng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::super::RandomChoice;
    use super::*;
    use proptest::prelude::*;

    fn random(seed: u64) -> RandomChoice {
        RandomChoice { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed }
    }

    fn sampler(choice: Choice) -> Sampler {
        Sampler::new(Sampling { choice, repetition_penalty: 1.0 }, &[])
    }

    #[test]
    fn greedy_takes_the_best_and_the_first_of_equals() {
        assert_eq!(sampler(Choice::Greedy).next(&[1.0, 5.0, 5.0, -1.0]), Ok(1));
        assert_eq!(sampler(Choice::Greedy).next(&[f32::NEG_INFINITY, -7.0]), Ok(1));
    }

    #[test]
    fn bad_scores_are_errors() {
        for choice in [Choice::Greedy, Choice::Random(random(1))] {
            let impossible = [f32::NEG_INFINITY; 3];
            assert_eq!(sampler(choice).next(&[0.0, f32::NAN]), Err(SamplingError::NotANumber { token: 1 }));
            assert_eq!(sampler(choice).next(&impossible), Err(SamplingError::NoCandidate { count: 3 }));
            assert_eq!(sampler(choice).next(&[]), Err(SamplingError::NoCandidate { count: 0 }));
        }
    }

    #[test]
    fn the_penalty_turns_greedy_away_from_what_was_said() {
        let settings = Sampling { choice: Choice::Greedy, repetition_penalty: 1.5 };
        let mut sampler = Sampler::new(settings, &[2]);
        let scores = [1.0, 0.9, 1.2];
        assert_eq!(sampler.next(&scores), Ok(0));
        assert_eq!(sampler.next(&scores), Ok(1));
        assert_eq!(sampler.next(&scores), Ok(2));
    }

    #[test]
    fn chance_follows_the_probabilities() {
        let scores = [0.6f32.ln(), 0.3f32.ln(), 0.1f32.ln()];
        let mut s = sampler(Choice::Random(random(7)));
        let mut counts = [0u32; 3];
        for _ in 0..20_000 {
            counts[s.next(&scores).unwrap() as usize] += 1;
        }
        for (count, expected) in counts.iter().zip([12_000.0, 6_000.0, 2_000.0]) {
            assert!((f64::from(*count) - expected).abs() < 300.0, "{counts:?}");
        }
    }

    #[test]
    fn one_seed_gives_one_text() {
        let scores: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let text = |seed| {
            let mut s = sampler(Choice::Random(random(seed)));
            (0..40).map(|_| s.next(&scores).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(text(3), text(3));
        assert_ne!(text(3), text(4));
    }

    proptest! {
        #[test]
        fn top_k_one_is_greedy(scores in prop::collection::vec(-9.0f32..9.0, 1..60), seed: u64) {
            let choice = RandomChoice { top_k: 1, ..random(seed) };
            prop_assert_eq!(
                sampler(Choice::Random(choice)).next(&scores),
                sampler(Choice::Greedy).next(&scores)
            );
        }

        #[test]
        fn any_scores_give_a_possible_token_or_an_error(
            scores in prop::collection::vec(prop::num::f32::ANY, 0..60),
            seed: u64, top_k in 0usize..70, top_p in 0.0f64..=1.0, min_p in 0.0f64..=1.0, temperature in 0.001f64..100.0,
        ) {
            let choice = RandomChoice { temperature, top_k, top_p, min_p, seed };
            if let Ok(token) = sampler(Choice::Random(choice)).next(&scores) {
                prop_assert!(scores[token as usize] > f32::NEG_INFINITY);
            }
        }
    }
}
