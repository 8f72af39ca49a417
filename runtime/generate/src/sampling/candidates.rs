//! The candidates of one row of logits in falling order, sorted lazily.
//!
//! A vocabulary has hundreds of thousands of tokens and a draw examines few. A threshold on the logit excludes most tokens in one
//! pass, and the rest is sorted piece by piece as the draw proceeds. The buffers are reused from token to token.

/// A token id and its logit.
pub type Candidate = (u32, f32);

/// Candidates in the first sorted piece; later pieces are larger.
const FIRST_PIECE: usize = 64;

/// A prefix of a row's tokens in the order of falling logits, ties by token id.
#[derive(Default)]
pub struct Candidates {
    list: Vec<Candidate>,
    /// Length of the sorted prefix of `list`. Invariant: no later entry precedes an entry of the prefix.
    sorted: usize,
}

impl Candidates {
    /// Collects every token whose logit is at least `min`, except minus infinity, whose probability is zero.
    pub fn at_least(&mut self, logits: &[f32], min: f32) {
        self.clear();
        let possible = |s: f32| s >= min && s > f32::NEG_INFINITY;
        // Tests whole blocks first: most contain no candidate, and the test has no branch per logit.
        for (block, first) in logits.chunks(BLOCK).zip((0u32..).step_by(BLOCK)) {
            if block.iter().fold(false, |any, s| any | possible(*s)) {
                self.list.extend((first..).zip(block.iter().copied()).filter(|(_, s)| possible(*s)));
            }
        }
    }

    /// Collects the `keep` tokens with the largest logits.
    pub fn top(&mut self, logits: &[f32], keep: usize) {
        self.clear();
        let room = keep.saturating_mul(2).max(FIRST_PIECE);
        // Token ids rise here and the lowest id wins a tie, so a logit equal to the threshold is never kept.
        let mut threshold = f32::NEG_INFINITY;
        for (block, first) in logits.chunks(BLOCK).zip((0u32..).step_by(BLOCK)) {
            if !block.iter().fold(false, |any, s| any | (*s > threshold)) {
                continue;
            }
            for (token, logit) in (first..).zip(block.iter().copied()) {
                if logit > threshold {
                    self.list.push((token, logit));
                    if self.list.len() == room {
                        threshold = self.shrink(keep);
                    }
                }
            }
        }
        if self.list.len() > keep {
            self.shrink(keep);
        }
    }

    /// The candidate of this rank, 0 for the best.
    pub fn get(&mut self, rank: usize) -> Option<Candidate> {
        while rank >= self.sorted && self.sorted < self.list.len() {
            self.sort_more();
        }
        self.list.get(rank).copied()
    }

    /// Number of candidates.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    fn clear(&mut self) {
        self.list.clear();
        self.sorted = 0;
    }

    /// Drops all but the `keep` best and returns the smallest logit kept.
    fn shrink(&mut self, keep: usize) -> f32 {
        self.list.select_nth_unstable_by(keep - 1, order);
        self.list.truncate(keep);
        self.list[keep - 1].1
    }

    /// Extends the sorted prefix to four times its length.
    fn sort_more(&mut self) {
        let rest = &mut self.list[self.sorted..];
        let piece = (3 * self.sorted).max(FIRST_PIECE).min(rest.len());
        if piece < rest.len() {
            rest.select_nth_unstable_by(piece - 1, order);
        }
        rest[..piece].sort_unstable_by(order);
        self.sorted += piece;
    }
}

/// Logits tested together.
const BLOCK: usize = 64;

/// Falling logits, ties by token id.
fn order(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(candidates: &mut Candidates) -> Vec<Candidate> {
        (0..candidates.len()).filter_map(|rank| candidates.get(rank)).collect()
    }

    fn sorted(logits: &[f32]) -> Vec<Candidate> {
        let mut all: Vec<Candidate> =
            (0..).zip(logits.iter().copied()).filter(|(_, s)| *s > f32::NEG_INFINITY).collect();
        all.sort_by(order);
        all
    }

    #[test]
    fn ties_go_by_token_id_and_impossible_tokens_are_left_out() {
        let mut c = Candidates::default();
        c.top(&[1.0, 3.0, f32::NEG_INFINITY, 3.0, 2.0], 3);
        assert_eq!(all(&mut c), [(1, 3.0), (3, 3.0), (4, 2.0)]);
        c.at_least(&[1.0, 3.0, f32::NEG_INFINITY, 3.0, 2.0], f32::NEG_INFINITY);
        assert_eq!(all(&mut c), [(1, 3.0), (3, 3.0), (4, 2.0), (0, 1.0)]);
    }

    /// Few different logits, so that there are many ties.
    fn coarse() -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(prop_oneof![(0i8..9).prop_map(f32::from), Just(f32::NEG_INFINITY), -9.0f32..9.0], 0..500)
    }

    proptest! {
        #[test]
        fn both_collect_a_prefix_of_the_full_order(logits in coarse(), keep in 1usize..600, least in -9.0f32..9.0) {
            let whole = sorted(&logits);
            let mut c = Candidates::default();
            c.top(&logits, keep);
            prop_assert_eq!(&all(&mut c)[..], &whole[..keep.min(whole.len())]);
            c.at_least(&logits, least);
            let count = whole.iter().filter(|c| c.1 >= least).count();
            prop_assert_eq!(&all(&mut c)[..], &whole[..count]);
        }
    }
}
