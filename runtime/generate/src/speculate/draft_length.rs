//! Chooses the number of tokens to draft: the one with the most tokens per second, by measured acceptance and measured times of passes.
//!
//! With an acceptance rate of `a` per token, a draft of `k` tokens gives `1 + a + ... + a^k` tokens per pass (Leviathan et al.,
//! arXiv:2211.17192). The pass takes `t(k + 1)`, after `k` times the time of drafting one token. Without a draft, a pass gives one token
//! in `t(1)`.

use super::CONFIDENCES;
use std::time::Duration;

/// Longest draft.
pub const MAX_DRAFT: usize = 31;
/// A draft must promise this many times the tokens per second of a pass without a draft.
const LEAST_GAIN: f64 = 1.05;
/// Each measurement multiplies the weight of earlier ones of its kind by this.
const ACCEPTANCE_MEMORY: f64 = 0.97;
const TIME_MEMORY: f64 = 0.7;
/// Each pass of one token multiplies the weight of acceptances and of longer passes' times by this, so that drafts are tried again.
const UNUSED_MEMORY: f64 = 0.99;
/// Assumed acceptance for each confidence before anything was verified; counts as much as `PRIOR_WEIGHT` tokens.
const PRIOR_ACCEPTANCE: [f64; CONFIDENCES] = [0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.3];
const PRIOR_WEIGHT: f64 = 4.0;
/// Assumed time of each further token of a pass relative to a pass of one token, before it was measured.
const PRIOR_SLOPE: f64 = 0.05;
/// Before a pass of one token is measured, predicted times are trusted while longer passes take at most this many times as long, or as
/// short.
const MOST_DEVIATION: f64 = 1.5;
/// A predicted time counts as much as this many measurements.
const PREDICTED_WEIGHT: f64 = 0.5;
/// Numbers of tokens in a pass whose times are recorded apart, in powers of two up to `MAX_DRAFT + 1`.
const SIZES: usize = 6;

/// A mean of measurements whose weights decay.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    sum: f64,
    weight: f64,
}

impl Mean {
    fn add(&mut self, value: f64, memory: f64) {
        *self = Mean { sum: self.sum * memory + value, weight: self.weight * memory + 1.0 };
    }

    fn decay(&mut self, memory: f64) {
        *self = Mean { sum: self.sum * memory, weight: self.weight * memory };
    }

    /// The mean, if anything was measured.
    fn average(self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.sum / self.weight)
    }

    /// The mean, where `prior` counts as much as `weight` measurements.
    fn with_prior(self, prior: f64, weight: f64) -> f64 {
        (self.sum + prior * weight) / (self.weight + weight)
    }
}

/// What was measured, and the choice that follows.
#[derive(Clone, Debug, Default)]
pub struct DraftLength {
    /// The length of every draft, whatever was measured.
    fixed: Option<usize>,
    acceptance: [Mean; CONFIDENCES],
    /// Seconds of a pass with one token.
    single: Mean,
    /// The predicted seconds of such a pass. Counts until one is measured, or a longer pass shows that the machine is not as predicted.
    predicted_single: Option<f64>,
    /// Seconds of drafting one token.
    drafting: Mean,
    /// Seconds of passes of `2^n` tokens relative to `single`, from `n = 1` on; sizes between count for the next larger.
    relative: [Mean; SIZES],
}

impl DraftLength {
    /// Starts with predicted times of passes, which count until passes of that size were measured. `passes`: tokens and milliseconds of
    /// each pass; without a pass of a single token they are ignored.
    pub fn predicted(passes: &[(u64, f64)]) -> Self {
        let mut length = Self::default();
        let Some((_, single)) = passes.iter().find(|(tokens, ms)| *tokens == 1 && *ms > 0.0) else { return length };
        length.predicted_single = Some(single / 1e3);
        for (tokens, ms) in passes.iter().filter(|(tokens, _)| *tokens > 1) {
            let tokens = usize::try_from(*tokens).unwrap_or(usize::MAX);
            if let Some(size) = tokens.checked_next_power_of_two().map(|_| size(tokens)) {
                length.relative[size] = Mean { sum: PREDICTED_WEIGHT * ms / single, weight: PREDICTED_WEIGHT };
            }
        }
        length
    }

    /// Always `tokens`, if there are as many.
    pub fn fixed(tokens: usize) -> Self {
        Self { fixed: Some(tokens), ..Self::default() }
    }

    /// The number of tokens to draft, at most `available`; 0 if no draft pays.
    pub fn choose(&self, confidence: usize, available: usize) -> usize {
        if let Some(fixed) = self.fixed {
            return fixed.min(available);
        }
        // All times are relative to a pass of one token: without a prediction the first pass is one.
        let Some(single) = self.known_single() else { return 0 };
        let acceptance = self.acceptance(confidence);
        let drafting = self.drafting.average().unwrap_or(0.0) / single;
        let (mut best, mut best_gain) = (0, LEAST_GAIN);
        let (mut tokens, mut all_accepted) = (1.0, 1.0);
        for length in 1..=available.min(MAX_DRAFT) {
            all_accepted *= acceptance;
            tokens += all_accepted;
            let gain = tokens / (self.relative_time(length + 1) + drafting * length as f64);
            if gain > best_gain {
                (best, best_gain) = (length, gain);
            }
        }
        best
    }

    /// Records that a pass of `tokens` tokens took `time`.
    pub fn passed(&mut self, tokens: usize, time: Duration) {
        let seconds = time.as_secs_f64();
        if tokens <= 1 {
            self.single.add(seconds, TIME_MEMORY);
            self.relative.iter_mut().chain(&mut self.acceptance).for_each(|mean| mean.decay(UNUSED_MEMORY));
        } else if let Some(single) = self.known_single() {
            let relative = seconds / single;
            let deviation = relative / self.relative_time(tokens);
            if self.single.weight > 0.0 || (1.0 / MOST_DEVIATION..=MOST_DEVIATION).contains(&deviation) {
                self.relative[size(tokens)].add(relative, TIME_MEMORY);
            } else {
                self.predicted_single = None;
            }
        }
    }

    /// Seconds of a pass of one token, measured or else predicted.
    fn known_single(&self) -> Option<f64> {
        self.single_seconds().or(self.predicted_single).filter(|single| *single > 0.0)
    }

    /// Lets measured times count as little as predicted ones, because passes may take another time than before.
    pub fn discount_measured_times(&mut self) {
        let times = self.relative.iter_mut().chain([&mut self.single, &mut self.drafting]);
        times.filter(|mean| mean.weight > PREDICTED_WEIGHT).for_each(|mean| mean.decay(PREDICTED_WEIGHT / mean.weight));
    }

    /// Seconds of a pass of one token, if there was one.
    pub fn single_seconds(&self) -> Option<f64> {
        self.single.average()
    }

    /// Records that drafting `tokens` tokens took `time`.
    pub fn drafted(&mut self, tokens: usize, time: Duration) {
        self.drafting.add(time.as_secs_f64() / tokens.max(1) as f64, TIME_MEMORY);
    }

    /// Records that the first `accepted` tokens of a draft were right and, if `rejected`, that the next one was wrong.
    pub fn verified(&mut self, confidence: usize, accepted: usize, rejected: bool) {
        let mean = &mut self.acceptance[confidence];
        (0..accepted).for_each(|_| mean.add(1.0, ACCEPTANCE_MEMORY));
        if rejected {
            mean.add(0.0, ACCEPTANCE_MEMORY);
        }
    }

    /// The probability that a drafted token is right if all drafted tokens before it are.
    fn acceptance(&self, confidence: usize) -> f64 {
        self.acceptance[confidence].with_prior(PRIOR_ACCEPTANCE[confidence], PRIOR_WEIGHT)
    }

    /// The time of a pass of `tokens` relative to one token: interpolated linearly between measured sizes, beyond them with the assumed
    /// slope.
    fn relative_time(&self, tokens: usize) -> f64 {
        let (mut below, mut at_below) = (1.0, 1.0);
        let wanted = tokens as f64;
        for (power, mean) in self.relative.iter().enumerate().skip(1) {
            let here = (1u32 << power) as f64;
            if mean.weight < 0.1 && here < wanted {
                continue;
            }
            let assumed = at_below + PRIOR_SLOPE * (here - below);
            let at_here = mean.with_prior(assumed, 0.1).max(1.0);
            if here >= wanted {
                return at_below + (at_here - at_below) * (wanted - below) / (here - below);
            }
            (below, at_below) = (here, at_here);
        }
        at_below + PRIOR_SLOPE * (wanted - below)
    }
}

/// The index of a number of tokens in `relative`.
fn size(tokens: usize) -> usize {
    (tokens.next_power_of_two().trailing_zeros() as usize).min(SIZES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds passes of a machine where `n` tokens take `time(n)` milliseconds.
    fn machine(time: impl Fn(usize) -> u64) -> DraftLength {
        let mut length = DraftLength::default();
        for tokens in [1, 1, 1, 2, 4, 8, 16, 32, 2, 4, 8, 16, 32] {
            length.passed(tokens, Duration::from_millis(time(tokens)));
        }
        length
    }

    #[test]
    fn where_weights_stream_drafts_are_long() {
        let streams = machine(|_| 100);
        assert_eq!(streams.choose(5, 100), MAX_DRAFT);
        assert_eq!(streams.choose(5, 7), 7);
        assert!(streams.choose(0, 100) >= 2, "even an unlikely token is free");
        assert_eq!(streams.choose(3, 0), 0);
    }

    #[test]
    fn where_each_token_costs_a_pass_nothing_is_drafted() {
        let computes = machine(|tokens| 100 * tokens as u64);
        assert!((0..CONFIDENCES).all(|confidence| computes.choose(confidence, 31) == 0));
    }

    #[test]
    fn a_quarter_pass_for_each_token_needs_likely_drafts() {
        let mut length = machine(|tokens| 100 + 25 * (tokens as u64 - 1));
        assert_eq!(length.choose(0, 31), 0);
        assert!((1..=15).contains(&length.choose(5, 31)));
        length.verified(5, 0, true);
        (0..40).for_each(|_| length.verified(5, 0, true));
        assert_eq!(length.choose(5, 31), 0, "drafts that were wrong");
        (0..40).for_each(|_| length.verified(5, 3, false));
        assert!(length.choose(5, 31) > 0, "and are right again");
    }

    #[test]
    fn predicted_times_count_until_passes_are_measured() {
        let mut computes =
            DraftLength::predicted(&[(1, 10.0), (2, 20.0), (4, 40.0), (8, 80.0), (16, 160.0), (32, 320.0)]);
        computes.passed(1, Duration::from_millis(10));
        assert!((0..CONFIDENCES).all(|confidence| computes.choose(confidence, 31) == 0));
        let as_predicted =
            DraftLength::predicted(&[(1, 10.0), (2, 10.0), (4, 10.0), (8, 10.0), (16, 10.0), (32, 10.0)]);
        let mut streams = as_predicted.clone();
        streams.passed(1, Duration::from_millis(7));
        assert!(streams.choose(5, 100) > MAX_DRAFT / 2);
        for tokens in [2, 4, 8, 16, 32] {
            (0..5).for_each(|_| streams.passed(tokens, Duration::from_millis(7 * tokens as u64)));
        }
        assert!(streams.choose(0, 100) == 0, "the machine is not as predicted");
        assert_eq!(DraftLength::predicted(&[]).choose(5, 9), 0, "without a prediction a first pass has one token");
        let mut unknown = DraftLength::default();
        unknown.passed(1, Duration::from_millis(7));
        assert_eq!(unknown.choose(5, 100), 13, "and the second a draft");
        for (ms, is_as_predicted) in [(10, true), (12, true), (8, true), (20, false), (5, false)] {
            let mut length = as_predicted.clone();
            assert!(length.choose(5, 100) > MAX_DRAFT / 2, "a first pass is drafted by predicted times");
            length.passed(MAX_DRAFT, Duration::from_millis(ms));
            assert_eq!(length.choose(5, 100) > 0, is_as_predicted, "after a pass of {ms} ms");
            assert_eq!(length.single_seconds(), None);
            length.passed(1, Duration::from_millis(ms));
            assert!(length.choose(5, 100) > MAX_DRAFT / 2, "after one token in {ms} ms");
        }
    }

    #[test]
    fn drafts_that_take_time_are_shorter() {
        let mut streams = machine(|_| 100);
        (0..40).for_each(|_| streams.verified(5, 3, true));
        let free = streams.choose(5, 31);
        streams.drafted(10, Duration::from_millis(200));
        let slow = streams.choose(5, 31);
        assert!(0 < slow && slow < free, "{slow} and {free}");
        streams.drafted(10, Duration::from_millis(100_000));
        assert_eq!(streams.choose(5, 31), 0);
    }

    #[test]
    fn after_a_change_new_times_count_more_than_old_ones() {
        let mut length = machine(|tokens| 100 * tokens as u64);
        (0..40).for_each(|_| length.verified(5, 3, false));
        assert_eq!(length.choose(5, 31), 0);
        let measure = |mut length: DraftLength| {
            [1, 2, 4, 8, 16, 32].into_iter().for_each(|tokens| length.passed(tokens, Duration::from_millis(500)));
            length.choose(5, 31)
        };
        let unaware = measure(length.clone());
        length.discount_measured_times();
        assert!(measure(length) > unaware);
    }

    #[test]
    fn a_time_that_was_measured_long_ago_is_tried_again() {
        let mut length = machine(|tokens| if tokens == 1 { 100 } else { 9000 });
        assert_eq!(length.choose(5, 31), 0);
        (0..900).for_each(|_| length.passed(1, Duration::from_millis(100)));
        assert!(length.choose(5, 31) > 0);
    }
}
