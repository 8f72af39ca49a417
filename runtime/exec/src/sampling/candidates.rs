//! The best candidates of one row of scores, best first, sorted only as far as somebody looks.
//!
//! A vocabulary has hundreds of thousands of tokens and a choice looks at a few: a threshold on the score leaves most of them
//! out in one pass, and what is left is sorted piece by piece. Memory is reused from token to token.

/// A token and its score.
pub type Candidate = (u32, f32);

/// Candidates sorted at first; later pieces are larger.
const FIRST_PIECE: usize = 64;

/// Some candidates of a row, in the order of falling score, ties by token id.
#[derive(Default)]
pub struct Candidates {
    list: Vec<Candidate>,
    /// So many at the beginning of the list are the best of it, in order.
    sorted: usize,
}

impl Candidates {
    /// Takes every token that scores at least this much and can be drawn at all: minus infinity never is. What is taken is a
    /// beginning of the whole row's order.
    pub fn at_least(&mut self, scores: &[f32], least: f32) {
        self.clear();
        let possible = |s: f32| s >= least && s > f32::NEG_INFINITY;
        // Blocks are looked at whole first: most hold nothing, and that takes no branch for each score.
        for (block, first) in scores.chunks(BLOCK).zip((0u32..).step_by(BLOCK)) {
            if block.iter().fold(false, |any, s| any | possible(*s)) {
                self.list.extend((first..).zip(block.iter().copied()).filter(|(_, s)| possible(*s)));
            }
        }
    }

    /// Takes the `keep` best tokens of a row.
    pub fn top(&mut self, scores: &[f32], keep: usize) {
        self.clear();
        let room = keep.saturating_mul(2).max(FIRST_PIECE);
        // Of equals the lower token id wins, and ids rise here: what equals the last of those kept comes too late.
        let mut beyond = f32::NEG_INFINITY;
        for (block, first) in scores.chunks(BLOCK).zip((0u32..).step_by(BLOCK)) {
            if !block.iter().fold(false, |any, s| any | (*s > beyond)) {
                continue;
            }
            for (token, score) in (first..).zip(block.iter().copied()) {
                if score > beyond {
                    self.list.push((token, score));
                    if self.list.len() == room {
                        beyond = self.shrink(keep);
                    }
                }
            }
        }
        if self.list.len() > keep {
            self.shrink(keep);
        }
    }

    /// The candidate at this place of the order.
    pub fn get(&mut self, place: usize) -> Option<Candidate> {
        while place >= self.sorted && self.sorted < self.list.len() {
            self.sort_more();
        }
        self.list.get(place).copied()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    fn clear(&mut self) {
        self.list.clear();
        self.sorted = 0;
    }

    /// Leaves the best ones, and says what the last of them scores.
    fn shrink(&mut self, keep: usize) -> f32 {
        self.list.select_nth_unstable_by(keep - 1, order);
        self.list.truncate(keep);
        self.list[keep - 1].1
    }

    fn sort_more(&mut self) {
        let rest = &mut self.list[self.sorted..];
        // Four times as many in all.
        let piece = (3 * self.sorted).max(FIRST_PIECE).min(rest.len());
        if piece < rest.len() {
            rest.select_nth_unstable_by(piece - 1, order);
        }
        rest[..piece].sort_unstable_by(order);
        self.sorted += piece;
    }
}

/// Scores looked at together.
const BLOCK: usize = 64;

/// Best first, ties by token id.
fn order(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(candidates: &mut Candidates) -> Vec<Candidate> {
        (0..candidates.len()).filter_map(|place| candidates.get(place)).collect()
    }

    fn sorted(scores: &[f32]) -> Vec<Candidate> {
        let mut all: Vec<Candidate> =
            (0..).zip(scores.iter().copied()).filter(|(_, s)| *s > f32::NEG_INFINITY).collect();
        all.sort_by(order);
        all
    }

    #[test]
    fn ties_go_by_token_and_the_impossible_is_left_out() {
        let mut c = Candidates::default();
        c.top(&[1.0, 3.0, f32::NEG_INFINITY, 3.0, 2.0], 3);
        assert_eq!(all(&mut c), [(1, 3.0), (3, 3.0), (4, 2.0)]);
        c.at_least(&[1.0, 3.0, f32::NEG_INFINITY, 3.0, 2.0], f32::NEG_INFINITY);
        assert_eq!(all(&mut c), [(1, 3.0), (3, 3.0), (4, 2.0), (0, 1.0)]);
    }

    /// Few different scores, so that there are many ties.
    fn coarse() -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(prop_oneof![(0i8..9).prop_map(f32::from), Just(f32::NEG_INFINITY), -9.0f32..9.0], 0..500)
    }

    proptest! {
        #[test]
        fn both_take_a_beginning_of_the_whole_order(scores in coarse(), keep in 1usize..600, least in -9.0f32..9.0) {
            let whole = sorted(&scores);
            let mut c = Candidates::default();
            c.top(&scores, keep);
            prop_assert_eq!(&all(&mut c)[..], &whole[..keep.min(whole.len())]);
            c.at_least(&scores, least);
            let count = whole.iter().filter(|c| c.1 >= least).count();
            prop_assert_eq!(&all(&mut c)[..], &whole[..count]);
        }
    }
}
