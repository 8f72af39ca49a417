//! A table of successors: which token followed each pair of tokens last, in all texts of an engine.

use std::collections::HashMap;

/// Pairs of a generation of the table; at most two generations are kept, of about 4 MB each.
const MOST_PAIRS: usize = 1 << 17;

/// The token after each of the pairs that were seen last.
#[derive(Debug, Default)]
pub struct SuccessorTable {
    recent: HashMap<[u32; 2], u32>,
    /// What `recent` was when it was full.
    older: HashMap<[u32; 2], u32>,
}

impl SuccessorTable {
    /// Notes that a token followed a pair.
    pub fn note(&mut self, pair: [u32; 2], next: u32) {
        if self.recent.len() >= MOST_PAIRS && !self.recent.contains_key(&pair) {
            self.older = std::mem::take(&mut self.recent);
        }
        self.recent.insert(pair, next);
    }

    /// The token that followed a pair last.
    pub fn after(&self, pair: [u32; 2]) -> Option<u32> {
        self.recent.get(&pair).or_else(|| self.older.get(&pair)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_successor_counts() {
        let mut table = SuccessorTable::default();
        table.note([1, 2], 3);
        table.note([1, 2], 4);
        assert_eq!((table.after([1, 2]), table.after([2, 1])), (Some(4), None));
    }

    #[test]
    fn a_full_table_forgets_what_was_seen_first() {
        let mut table = SuccessorTable::default();
        (0..3 * MOST_PAIRS as u32).for_each(|token| table.note([token, 0], token));
        assert!(table.recent.len() + table.older.len() <= 2 * MOST_PAIRS);
        let last = 3 * MOST_PAIRS as u32 - 1;
        assert_eq!((table.after([0, 0]), table.after([last, 0])), (None, Some(last)));
        assert_eq!(table.after([last - MOST_PAIRS as u32, 0]), Some(last - MOST_PAIRS as u32));
    }
}
