//! The n-gram drafter: drafts the tokens that followed the previous occurrence of the text's longest repeated suffix, or, where that is
//! short, those that followed its last two tokens in any text.

use super::successors::SuccessorTable;
use super::suffix_automaton::{Occurrence, SuffixAutomaton};
use super::{Drafter, FROM_OTHER_TEXTS, MOST_CONFIDENT};
use crate::error::GenerateError;
use std::cell::RefCell;
use std::rc::Rc;

/// From this many tokens on, a repeated suffix predicts what follows better than other texts do.
const LONG: usize = 3;

/// Drafts what followed the most recent occurrence of the longest suffix that the text repeats (prompt lookup with a suffix automaton), and
/// where that is short, what followed in any text of the same engine.
#[derive(Debug, Default)]
pub struct NgramDrafter {
    automaton: SuffixAutomaton,
    successors: Rc<RefCell<SuccessorTable>>,
}

impl NgramDrafter {
    /// A drafter that shares this table with those of other texts.
    pub fn new(successors: Rc<RefCell<SuccessorTable>>) -> Self {
        Self { automaton: SuffixAutomaton::default(), successors }
    }

    /// A repeated suffix that is long.
    fn long_suffix(&self) -> Option<Occurrence> {
        self.automaton.repeated_suffix().filter(|found| found.length >= LONG)
    }

    /// The last two tokens of the text.
    fn last_pair(&self) -> Option<[u32; 2]> {
        self.automaton.text().last_chunk().copied()
    }

    /// Drafts the token that followed the text's last two tokens in any text, then the one that followed the new last two, and so on.
    fn draft_from_table(&self, most: usize, draft_tokens: &mut Vec<u32>) {
        let (successors, mut pair) = (self.successors.borrow(), self.last_pair());
        while draft_tokens.len() < most
            && let Some(last) = pair
            && let Some(next) = successors.after(last)
        {
            draft_tokens.push(next);
            pair = Some([last[1], next]);
        }
    }
}

impl Drafter for NgramDrafter {
    fn extend(&mut self, tokens: &[u32]) {
        let mut successors = self.successors.borrow_mut();
        for token in tokens {
            if let Some(pair) = self.automaton.text().last_chunk() {
                successors.note(*pair, *token);
            }
            self.automaton.push(*token);
        }
    }

    fn confidence(&self) -> Option<usize> {
        let is_in_table = || self.last_pair().is_some_and(|pair| self.successors.borrow().after(pair).is_some());
        if self.long_suffix().is_none() && is_in_table() {
            return Some(FROM_OTHER_TEXTS);
        }
        self.automaton.repeated_suffix().map(|found| confidence(found.length))
    }

    fn is_free(&self) -> bool {
        true
    }

    fn draft(&mut self, most: usize, draft_tokens: &mut Vec<u32>) -> Result<(), GenerateError> {
        draft_tokens.clear();
        if self.long_suffix().is_none() {
            self.draft_from_table(most, draft_tokens);
        }
        let Some(found) = self.automaton.repeated_suffix().filter(|_| draft_tokens.is_empty()) else { return Ok(()) };
        let text = self.automaton.text();
        // Where the occurrence overlaps the end of the text, the text repeats itself with this period.
        let period = text.len() - found.end;
        draft_tokens.extend((0..most).map(|index| text[found.end + index % period]));
        Ok(())
    }
}

/// The level of a repeated suffix of this length: 0 to 5 for 1, 2, 3 to 4, 5 to 8, 9 to 16 or more tokens.
fn confidence(length: usize) -> usize {
    (length.max(1).next_power_of_two().trailing_zeros() as usize).min(MOST_CONFIDENT)
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
        assert_eq!(draft(&[1, 2, 3, 4, 5, 1, 2, 3], 3), (Some(2), vec![4, 5, 1]));
        assert_eq!(draft(&[1, 2, 3, 4, 1], 3), (Some(0), vec![2, 3, 4]));
        assert_eq!(draft(&[1, 2, 3], 3), (None, vec![]));
    }

    #[test]
    fn other_texts_tell_what_follows_two_tokens_unless_the_text_repeats_more() {
        let successors = Rc::<RefCell<SuccessorTable>>::default();
        let drafted = |text: &[u32], most| {
            let (mut drafter, mut draft) = (NgramDrafter::new(Rc::clone(&successors)), vec![]);
            drafter.extend(text);
            drafter.draft(most, &mut draft).unwrap();
            (drafter.confidence(), draft)
        };
        assert_eq!(drafted(&[1, 2, 3, 4, 5], 3), (None, vec![]));
        assert_eq!(drafted(&[9, 2, 3], 3), (Some(FROM_OTHER_TEXTS), vec![4, 5]));
        assert_eq!(drafted(&[2], 3), (None, vec![]));
        // The last successor in any text, this one included.
        assert_eq!(drafted(&[2, 3, 7, 2, 3], 2), (Some(FROM_OTHER_TEXTS), vec![7, 2]));
        assert_eq!(drafted(&[3, 4, 8, 8, 2, 3, 4, 6, 2, 3, 4], 2), (Some(2), vec![6, 2]));
    }

    #[test]
    fn a_draft_continues_a_repetition_beyond_the_end_of_the_text() {
        assert_eq!(draft(&[8, 1, 2, 1, 2, 1], 5), (Some(2), vec![2, 1, 2, 1, 2]));
        assert_eq!(draft(&[8, 8, 8], 3), (Some(FROM_OTHER_TEXTS), vec![8, 8, 8]));
    }

    #[test]
    fn longer_matches_have_more_confidence() {
        let levels = [1, 2, 3, 4, 5, 8, 9, 16, 17, 999].map(confidence);
        assert_eq!(levels, [0, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
    }
}
