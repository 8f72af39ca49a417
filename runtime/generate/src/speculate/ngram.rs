//! The n-gram drafter (prompt lookup): drafts the tokens that followed the previous occurrence of the text's longest repeated suffix.

use super::suffix_automaton::SuffixAutomaton;
use super::{CONFIDENCES, Drafter};
use crate::error::GenerateError;

/// Drafts what followed the most recent occurrence of the longest suffix that the text repeats (prompt lookup with a suffix automaton).
#[derive(Debug, Default)]
pub struct NgramDrafter {
    automaton: SuffixAutomaton,
}

impl Drafter for NgramDrafter {
    fn extend(&mut self, tokens: &[u32]) {
        tokens.iter().for_each(|token| self.automaton.push(*token));
    }

    fn confidence(&self) -> Option<usize> {
        self.automaton.repeated_suffix().map(|found| confidence(found.length))
    }

    fn is_free(&self) -> bool {
        true
    }

    fn draft(&mut self, most: usize, draft_tokens: &mut Vec<u32>) -> Result<(), GenerateError> {
        draft_tokens.clear();
        let Some(found) = self.automaton.repeated_suffix() else { return Ok(()) };
        let text = self.automaton.text();
        // Where the occurrence overlaps the end of the text, the text repeats itself with this period.
        let period = text.len() - found.end;
        draft_tokens.extend((0..most).map(|index| text[found.end + index % period]));
        Ok(())
    }
}

/// 1, 2, 3 to 4, 5 to 8, 9 to 16 or more equal tokens.
fn confidence(length: usize) -> usize {
    (length.max(1).next_power_of_two().trailing_zeros() as usize).min(CONFIDENCES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(text: &[u32], most: usize) -> (Option<usize>, Vec<u32>) {
        let (mut drafter, mut draft) = (NgramDrafter::default(), vec![9]);
        drafter.extend(text);
        drafter.draft(most, &mut draft).unwrap();
        (drafter.confidence(), draft)
    }

    #[test]
    fn a_draft_is_what_followed_before() {
        assert_eq!(draft(&[1, 2, 3, 4, 5, 1, 2], 3), (Some(1), vec![3, 4, 5]));
        assert_eq!(draft(&[1, 2, 3], 3), (None, vec![]));
    }

    #[test]
    fn a_draft_continues_a_repetition_beyond_the_end_of_the_text() {
        assert_eq!(draft(&[8, 1, 2, 1, 2, 1], 5), (Some(2), vec![2, 1, 2, 1, 2]));
    }

    #[test]
    fn longer_matches_have_more_confidence() {
        let levels = [1, 2, 3, 4, 5, 8, 9, 16, 17, 999].map(confidence);
        assert_eq!(levels, [0, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
    }
}
