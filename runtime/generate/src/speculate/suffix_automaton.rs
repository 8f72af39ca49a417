//! A suffix automaton of a growing text: for each new token, the longest suffix that occurred before, in amortised constant time.
//!
//! Source: A. Blumer et al., The smallest automaton recognizing the subwords of a text, 1985.

use std::collections::HashMap;

/// Most states that learn a new end position with each token. A text of one repeated token has a chain of states as long as the text.
const MAX_UPDATES: usize = 32;

type StateIndex = u32;
const ROOT: StateIndex = 0;

/// A set of substrings that end at the same positions.
#[derive(Clone, Copy, Debug)]
struct State {
    /// Length of the longest of them.
    length: u32,
    /// The state of the longest suffix of them that also ends elsewhere.
    link: StateIndex,
    /// The position after the last known occurrence before the newest.
    end: u32,
}

/// The automaton, with the text.
#[derive(Debug)]
pub struct SuffixAutomaton {
    text: Vec<u32>,
    states: Vec<State>,
    transitions: HashMap<(StateIndex, u32), StateIndex>,
    /// The outgoing tokens of each state, to copy a state.
    tokens: Vec<Vec<u32>>,
    /// The state of the whole text.
    last: StateIndex,
}

/// An earlier occurrence of the text's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occurrence {
    /// Tokens that are equal.
    pub length: usize,
    /// The position after it: the tokens from here on followed.
    pub end: usize,
}

impl Default for SuffixAutomaton {
    fn default() -> Self {
        let root = State { length: 0, link: ROOT, end: 0 };
        Self { text: vec![], states: vec![root], transitions: HashMap::new(), tokens: vec![vec![]], last: ROOT }
    }
}

impl SuffixAutomaton {
    /// The text.
    pub fn text(&self) -> &[u32] {
        &self.text
    }

    /// The longest suffix of the text that occurred before, and a recent occurrence. `None` if even the last token is new.
    pub fn repeated_suffix(&self) -> Option<Occurrence> {
        let state = self.states[self.states[self.last as usize].link as usize];
        let (length, end) = (state.length as usize, state.end as usize);
        (length > 0 && end < self.text.len()).then_some(Occurrence { length, end })
    }

    /// Appends a token.
    pub fn push(&mut self, token: u32) {
        let before = self.text.len() as u32;
        self.text.push(token);
        let new = self.add(State { length: before + 1, link: ROOT, end: before + 1 });
        let mut from = Some(self.last);
        let mut found = None;
        while let Some(state) = from {
            if let Some(next) = self.transitions.get(&(state, token)) {
                found = Some((state, *next));
                break;
            }
            self.connect(state, token, new);
            from = (state != ROOT).then(|| self.states[state as usize].link);
        }
        if let Some((state, next)) = found {
            self.states[new as usize].link = self.split(state, next, token);
        }
        // Note where the substrings end that the previous token completed. This is one token late, so that an occurrence is never the
        // suffix itself.
        self.note_ends(self.states[self.last as usize].link, before);
        self.last = new;
    }

    /// The state for the strings of `next` that end with `token` after those of `state`: `next`, or a copy of it for its shorter strings.
    fn split(&mut self, state: StateIndex, next: StateIndex, token: u32) -> StateIndex {
        let length = self.states[state as usize].length + 1;
        if self.states[next as usize].length == length {
            return next;
        }
        let copy = self.add(State { length, ..self.states[next as usize] });
        for token in self.tokens[next as usize].clone() {
            let target = self.transitions[&(next, token)];
            self.connect(copy, token, target);
        }
        self.states[next as usize].link = copy;
        let mut from = Some(state);
        while let Some(state) = from
            && self.transitions.get(&(state, token)) == Some(&next)
        {
            self.transitions.insert((state, token), copy);
            from = (state != ROOT).then(|| self.states[state as usize].link);
        }
        copy
    }

    fn note_ends(&mut self, mut state: StateIndex, end: u32) {
        for _ in 0..MAX_UPDATES {
            if state == ROOT {
                return;
            }
            self.states[state as usize].end = end;
            state = self.states[state as usize].link;
        }
    }

    fn add(&mut self, state: State) -> StateIndex {
        self.states.push(state);
        self.tokens.push(vec![]);
        (self.states.len() - 1) as StateIndex
    }

    fn connect(&mut self, from: StateIndex, token: u32, to: StateIndex) {
        if self.transitions.insert((from, token), to).is_none() {
            self.tokens[from as usize].push(token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn automaton(text: &[u32]) -> SuffixAutomaton {
        let mut automaton = SuffixAutomaton::default();
        text.iter().for_each(|token| automaton.push(*token));
        automaton
    }

    /// The length of the longest suffix that occurs before, by trying all.
    fn longest_repeated(text: &[u32]) -> usize {
        let occurs_before = |length: usize| {
            let suffix = &text[text.len() - length..];
            (length..text.len()).any(|end| &text[end - length..end] == suffix)
        };
        (0..text.len()).rev().find(|length| occurs_before(*length)).unwrap_or(0)
    }

    #[test]
    fn the_last_tokens_are_found_where_they_occurred_last() {
        let found = automaton(&[1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3]).repeated_suffix();
        assert_eq!(found, Some(Occurrence { length: 3, end: 7 }), "8 followed the last time");
        assert_eq!(automaton(&[1, 2, 3]).repeated_suffix(), None);
        assert_eq!(automaton(&[]).repeated_suffix(), None);
        assert_eq!(automaton(&[5, 5, 5]).repeated_suffix().map(|found| found.length), Some(2));
    }

    #[test]
    fn a_text_of_one_token_takes_time_proportional_to_its_length() {
        let automaton = automaton(&vec![7; 200_000]);
        assert!(automaton.states.len() <= 400_000);
        assert_eq!(automaton.repeated_suffix().map(|found| found.length), Some(199_999));
    }

    proptest! {
        #[test]
        fn the_longest_repeated_suffix_is_found(text in prop::collection::vec(0u32..4, 0..60)) {
            let automaton = automaton(&text);
            let found = automaton.repeated_suffix();
            prop_assert_eq!(found.map_or(0, |found| found.length), longest_repeated(&text));
            if let Some(Occurrence { length, end }) = found {
                prop_assert!(end < text.len() && end >= length);
                prop_assert_eq!(&text[end - length..end], &text[text.len() - length..]);
            }
        }
    }
}
