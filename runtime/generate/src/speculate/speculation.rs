//! Speculation on one text: drafts tokens, and learns the acceptance from the tokens that the model chooses.

use super::{DraftLength, Drafter, MAX_DRAFT};
use crate::error::GenerateError;
use std::time::{Duration, Instant};

/// Drafts the tokens of one text.
pub struct Speculation {
    drafter: Box<dyn Drafter>,
    length: DraftLength,
    /// The drafted tokens. One pass verifies the first `used`; the token after them is compared too, which costs nothing.
    draft_tokens: Vec<u32>,
    used: usize,
    confidence: usize,
    stats: SpeculationStats,
}

/// Counts of a speculation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SpeculationStats {
    /// Tokens drafted and verified.
    pub drafted: u64,
    /// Drafted tokens that the model chose.
    pub accepted: u64,
    /// Passes after the prompt.
    pub passes: u64,
    /// Seconds of a pass of one token, if there was one.
    pub single_seconds: Option<f64>,
}

impl Speculation {
    /// A speculation on an empty text. Drafts are as long as pays.
    pub fn new(drafter: Box<dyn Drafter>) -> Self {
        Self::with_length(drafter, DraftLength::default())
    }

    /// Like [`new`](Self::new), but with another [`DraftLength`].
    pub fn with_length(drafter: Box<dyn Drafter>, length: DraftLength) -> Self {
        let stats = SpeculationStats::default();
        Self { drafter, length, draft_tokens: Vec::new(), used: 0, confidence: 0, stats }
    }

    /// Counts so far.
    pub fn stats(&self) -> SpeculationStats {
        SpeculationStats { single_seconds: self.length.single_seconds(), ..self.stats }
    }

    /// Appends tokens that were not chosen: the prompt.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.drafter.extend(tokens);
    }

    /// Tokens that may come next, at most `most`.
    pub fn draft(&mut self, most: usize) -> Result<&[u32], GenerateError> {
        self.draft_tokens.clear();
        self.used = 0;
        let Some(confidence) = self.drafter.confidence() else { return Ok(&[]) };
        let wanted = self.length.choose(confidence, most.min(MAX_DRAFT));
        let is_free = self.drafter.is_free();
        let least = usize::from(is_free);
        let started = Instant::now();
        if wanted.max(least) > 0 {
            self.drafter.draft(wanted.max(least), &mut self.draft_tokens)?;
        }
        if wanted > 0 && !is_free {
            self.length.drafted(self.draft_tokens.len(), started.elapsed());
        }
        (self.confidence, self.used) = (confidence, wanted.min(self.draft_tokens.len()));
        Ok(&self.draft_tokens[..self.used])
    }

    /// Lets measured times count less, because passes may take another time than before.
    pub fn discount_measured_times(&mut self) {
        self.length.discount_measured_times();
    }

    /// Shortens the last draft: only its first `count` tokens are verified.
    pub fn shorten(&mut self, count: usize) {
        self.used = self.used.min(count);
    }

    /// Records that a pass of `tokens` tokens, the draft included, took `time`, and that the model chose `chosen`.
    pub fn passed(&mut self, tokens: usize, time: Duration, chosen: &[u32]) {
        let accepted = chosen.iter().zip(&self.draft_tokens[..self.used]).take_while(|(a, b)| a == b).count();
        self.length.passed(tokens, time);
        match (chosen.get(accepted), self.draft_tokens.get(accepted)) {
            // Nothing was verified, or all that was verified was right: was the drafted token after it right too?
            (Some(chosen), Some(next)) if accepted == self.used => {
                self.length.verified(self.confidence, accepted + usize::from(chosen == next), chosen != next);
            }
            (chosen, _) => {
                self.length.verified(self.confidence, accepted, accepted < self.used && chosen.is_some());
            }
        }
        self.stats.passes += 1;
        self.stats.drafted += self.used as u64;
        self.stats.accepted += accepted as u64;
        self.draft_tokens.clear();
        self.used = 0;
        self.drafter.extend(chosen);
    }
}

#[cfg(test)]
mod tests {
    use super::super::NgramDrafter;
    use super::*;

    #[test]
    fn a_text_that_repeats_is_drafted_and_counted() {
        let mut speculation = Speculation::new(Box::<NgramDrafter>::default());
        let text: Vec<u32> = (0..20).collect();
        speculation.extend(&text);
        assert!(speculation.draft(9).unwrap().is_empty());
        speculation.passed(1, Duration::from_millis(10), &[0]);
        let mut next = 1;
        while next < 20 {
            let draft = speculation.draft(9).unwrap().to_vec();
            let fed = 1 + draft.len();
            let chosen: Vec<u32> = (next..).take(fed).collect();
            assert!(chosen.starts_with(&draft) || next as usize + draft.len() > 20);
            speculation.passed(fed, Duration::from_millis(10), &chosen);
            next += fed as u32;
        }
        let stats = speculation.stats();
        assert!(stats.drafted > 0 && stats.accepted > 0 && stats.passes < 20, "{stats:?}");
    }

    #[test]
    fn acceptance_is_learnt_without_drafting() {
        let mut speculation = Speculation::new(Box::<NgramDrafter>::default());
        // A machine where a draft costs as much as a pass of its own for each token.
        speculation.length.passed(1, Duration::from_millis(10));
        for tokens in [2, 4, 8, 16, 32] {
            speculation.length.passed(tokens, Duration::from_millis(10 * tokens as u64));
        }
        let before = speculation.length.clone();
        for token in [1, 2, 1, 2, 1, 2, 1, 2] {
            assert!(speculation.draft(9).unwrap().is_empty());
            speculation.passed(1, Duration::from_millis(10), &[token]);
        }
        assert_ne!(format!("{before:?}"), format!("{:?}", speculation.length));
        let stats = speculation.stats();
        assert_eq!((stats.drafted, stats.accepted, stats.passes), (0, 0, 8));
        assert!((stats.single_seconds.unwrap() - 0.01).abs() < 1e-6);
    }
}
