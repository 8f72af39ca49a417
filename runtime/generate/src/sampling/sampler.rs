//! The sampler of one text: its settings, the tokens so far and the random number generator.

use super::allowed::AllowedTokens;
use super::candidates::Candidates;
use super::draw::{draw, penalise_repeats};
use super::exp_sum::{exp_sum, has_nan, max_logit};
use super::{SamplingMethod, SamplingParams};
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::collections::HashSet;

/// Chooses the tokens of one text, one after another.
pub struct Sampler {
    params: SamplingParams,
    /// Tokens of the prompt and of the text so far, for the repetition penalty.
    seen: HashSet<u32>,
    random: Option<ChaCha12Rng>,
    /// Buffer for logits that are penalised or masked, reused for each token.
    adjusted: Vec<f32>,
    /// Buffer for candidates, reused for each token.
    candidates: Candidates,
}

/// Why no token could be chosen.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SamplingError {
    /// A logit is NaN.
    #[error("the model's logit for token {token} is not a number (NaN)")]
    NotANumber {
        /// The first token with such a logit.
        token: usize,
    },
    /// No token has a probability above zero.
    #[error("the model gives every token a probability of zero: all {count} logits are minus infinity")]
    NoCandidate {
        /// Number of logits.
        count: usize,
    },
}

impl Sampler {
    /// A sampler for one text. The repetition penalty applies to tokens of the `prompt` too.
    pub fn new(params: SamplingParams, prompt: &[u32]) -> Self {
        let random = params.seed().map(ChaCha12Rng::seed_from_u64);
        let seen = prompt.iter().copied().collect();
        Self { params, seen, random, adjusted: Vec::new(), candidates: Candidates::default() }
    }

    /// The next token, from `logits`: one for each token id.
    pub fn next(&mut self, logits: &[f32]) -> Result<u32, SamplingError> {
        let token = self.next_unless_tied(logits, 0.0, None)?;
        token.ok_or(SamplingError::NoCandidate { count: logits.len() })
    }

    /// Like [`next`](Self::next), but chooses only tokens of `allowed`; the others have no part in any filter. Returns `None` and changes
    /// nothing if the choice is greedy and the largest logit leads by no more than `tie` times the largest magnitude. Random choices are
    /// never tied.
    pub fn next_unless_tied(
        &mut self,
        logits: &[f32],
        tie: f32,
        allowed: Option<&AllowedTokens>,
    ) -> Result<Option<u32>, SamplingError> {
        if has_nan(logits) {
            let token = logits.iter().position(|s| s.is_nan()).unwrap_or(0);
            return Err(SamplingError::NotANumber { token });
        }
        let has_penalty = self.params.repetition_penalty != 1.0;
        let logits = if has_penalty || allowed.is_some() {
            self.adjusted.clear();
            self.adjusted.extend_from_slice(logits);
            if has_penalty {
                penalise_repeats(&mut self.adjusted, &self.seen, self.params.repetition_penalty);
            }
            if let Some(allowed) = allowed {
                allowed.mask(&mut self.adjusted);
            }
            &self.adjusted
        } else {
            logits
        };
        let token = match (self.params.choice, &mut self.random) {
            (SamplingMethod::Random(choice), Some(random)) => draw(logits, &choice, unit(random), &mut self.candidates),
            _ if tie > 0.0 && is_tied(logits, tie) => return Ok(None),
            _ => argmax(logits),
        };
        let token = token.ok_or(SamplingError::NoCandidate { count: logits.len() })?;
        self.seen.insert(token);
        Ok(Some(token))
    }
}

/// Whether the largest logit leads the next by at most `tie` times the largest magnitude. Only finite logits count.
fn is_tied(logits: &[f32], tie: f32) -> bool {
    let (mut first, mut second, mut magnitude) = (f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0f32);
    for logit in logits.iter().copied().filter(|logit| logit.is_finite()) {
        second = second.max(first.min(logit));
        first = first.max(logit);
        magnitude = magnitude.max(logit.abs());
    }
    second > f32::NEG_INFINITY && first - second <= tie * magnitude
}

/// The token with the largest logit, the lowest id among equals. A NaN is an error only if no logit is larger than minus infinity.
pub fn greedy(logits: &[f32]) -> Result<u32, SamplingError> {
    let nan = || logits.iter().position(|logit| logit.is_nan()).map(|token| SamplingError::NotANumber { token });
    argmax(logits).ok_or_else(|| nan().unwrap_or(SamplingError::NoCandidate { count: logits.len() }))
}

/// The token with the largest logit and its probability at temperature 1; `None` if there is none.
pub fn top_probability(logits: &[f32]) -> Option<(u32, f64)> {
    let token = argmax(logits)?;
    let total = exp_sum(logits, logits[token as usize], 1.0);
    Some((token, 1.0 / total))
}

/// The position of the largest logit, the first of equals; `None` if all are minus infinity.
fn argmax(logits: &[f32]) -> Option<u32> {
    let max = max_logit(logits);
    if max == f32::NEG_INFINITY {
        return None;
    }
    (0u32..).zip(logits).find(|(_, logit)| **logit == max).map(|(token, _)| token)
}

/// A number in `[0, 1)` with 53 random bits.
fn unit(random: &mut ChaCha12Rng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::super::RandomSampling;
    use super::*;
    use proptest::prelude::*;

    fn random(seed: u64) -> RandomSampling {
        RandomSampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed }
    }

    fn sampler(choice: SamplingMethod) -> Sampler {
        Sampler::new(SamplingParams { choice, repetition_penalty: 1.0 }, &[])
    }

    #[test]
    fn greedy_takes_the_largest_logit_and_the_first_of_equals() {
        assert_eq!(sampler(SamplingMethod::Greedy).next(&[1.0, 5.0, 5.0, -1.0]), Ok(1));
        assert_eq!(sampler(SamplingMethod::Greedy).next(&[f32::NEG_INFINITY, -7.0]), Ok(1));
    }

    #[test]
    fn near_ties_of_greedy_choices_are_not_decided() {
        let mut greedy = sampler(SamplingMethod::Greedy);
        assert_eq!(greedy.next_unless_tied(&[9.0, 10.0, 9.9999], 1e-4, None), Ok(None));
        assert_eq!(greedy.next_unless_tied(&[9.0, 10.0, 9.99], 1e-4, None), Ok(Some(1)));
        assert_eq!(greedy.next_unless_tied(&[-1e6, 10.0, 9.0], 1e-4, None), Ok(None), "large logits lose digits");
        assert_eq!(greedy.next_unless_tied(&[3.0, 3.0], 0.0, None), Ok(Some(0)));
        assert_eq!(greedy.next_unless_tied(&[f32::NEG_INFINITY, 3.0], 1e-4, None), Ok(Some(1)));
        assert_eq!(sampler(SamplingMethod::Random(random(1))).next_unless_tied(&[3.0], 1e-4, None), Ok(Some(0)));
    }

    #[test]
    fn only_allowed_tokens_are_chosen_and_counted_by_filters() {
        let logits = [9.0, 8.0, 1.0, 0.9, f32::NEG_INFINITY];
        let allowed: AllowedTokens = [2, 3, 4].into_iter().collect();
        let mut greedy = sampler(SamplingMethod::Greedy);
        assert_eq!(greedy.next_unless_tied(&logits, 0.0, Some(&allowed)), Ok(Some(2)));
        assert_eq!(greedy.next_unless_tied(&[9.0, 9.0, 1.0, 0.5], 1e-4, Some(&allowed)), Ok(Some(2)), "no tie");
        // None of the two most likely tokens of the whole vocabulary is allowed.
        let choice = SamplingMethod::Random(RandomSampling { top_k: 2, top_p: 0.99, ..random(1) });
        let mut random = sampler(choice);
        let drawn: Vec<_> = (0..50).map(|_| random.next_unless_tied(&logits, 0.0, Some(&allowed)).unwrap()).collect();
        assert!(drawn.contains(&Some(2)) && drawn.contains(&Some(3)), "{drawn:?}");
        assert!(drawn.iter().all(|token| matches!(token, Some(2 | 3))), "{drawn:?}");
        let none = AllowedTokens::default();
        assert_eq!(greedy.next_unless_tied(&logits, 0.0, Some(&none)), Err(SamplingError::NoCandidate { count: 5 }));
        assert_eq!(
            greedy.next_unless_tied(&[f32::NAN, 0.0], 0.0, Some(&[1].into_iter().collect())),
            Err(SamplingError::NotANumber { token: 0 })
        );
    }

    #[test]
    fn the_most_likely_token_has_its_probability() {
        let (token, probability) = top_probability(&[0.3f32.ln(), 0.6f32.ln(), 0.1f32.ln()]).unwrap();
        assert_eq!(token, 1);
        assert!((probability - 0.6).abs() < 1e-6);
        assert_eq!(top_probability(&[f32::NEG_INFINITY]), None);
    }

    #[test]
    fn rows_without_a_choice_are_errors() {
        for choice in [SamplingMethod::Greedy, SamplingMethod::Random(random(1))] {
            let impossible = [f32::NEG_INFINITY; 3];
            assert_eq!(sampler(choice).next(&[0.0, f32::NAN]), Err(SamplingError::NotANumber { token: 1 }));
            assert_eq!(greedy(&[f32::NEG_INFINITY, f32::NAN]), Err(SamplingError::NotANumber { token: 1 }));
            assert_eq!(greedy(&[f32::NEG_INFINITY; 2]), Err(SamplingError::NoCandidate { count: 2 }));
            assert_eq!(sampler(choice).next(&impossible), Err(SamplingError::NoCandidate { count: 3 }));
            assert_eq!(sampler(choice).next(&[]), Err(SamplingError::NoCandidate { count: 0 }));
        }
    }

    #[test]
    fn the_repetition_penalty_applies_to_greedy_choices() {
        let settings = SamplingParams { choice: SamplingMethod::Greedy, repetition_penalty: 1.5 };
        let mut sampler = Sampler::new(settings, &[2]);
        let logits = [1.0, 0.9, 1.2];
        assert_eq!(sampler.next(&logits), Ok(0));
        assert_eq!(sampler.next(&logits), Ok(1));
        assert_eq!(sampler.next(&logits), Ok(2));
    }

    #[test]
    fn random_choices_follow_the_probabilities() {
        let logits = [0.6f32.ln(), 0.3f32.ln(), 0.1f32.ln()];
        let mut s = sampler(SamplingMethod::Random(random(7)));
        let mut counts = [0u32; 3];
        for _ in 0..20_000 {
            counts[s.next(&logits).unwrap() as usize] += 1;
        }
        for (count, expected) in counts.iter().zip([12_000.0, 6_000.0, 2_000.0]) {
            assert!((f64::from(*count) - expected).abs() < 300.0, "{counts:?}");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_text() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let text = |seed| {
            let mut s = sampler(SamplingMethod::Random(random(seed)));
            (0..40).map(|_| s.next(&logits).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(text(3), text(3));
        assert_ne!(text(3), text(4));
    }

    proptest! {
        #[test]
        fn top_k_one_is_greedy(logits in prop::collection::vec(-9.0f32..9.0, 1..60), seed: u64) {
            let choice = RandomSampling { top_k: 1, ..random(seed) };
            prop_assert_eq!(
                sampler(SamplingMethod::Random(choice)).next(&logits),
                sampler(SamplingMethod::Greedy).next(&logits)
            );
        }

        #[test]
        fn any_logits_give_a_possible_token_or_an_error(
            logits in prop::collection::vec(prop::num::f32::ANY, 0..60),
            seed: u64, top_k in 0usize..70, top_p in 0.0f64..=1.0, min_p in 0.0f64..=1.0, temperature in 0.001f64..100.0,
        ) {
            let choice = RandomSampling { temperature, top_k, top_p, min_p, seed };
            if let Ok(token) = sampler(SamplingMethod::Random(choice)).next(&logits) {
                prop_assert!(logits[token as usize] > f32::NEG_INFINITY);
            }
        }
    }
}
