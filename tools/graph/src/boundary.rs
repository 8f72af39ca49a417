//! Chooses where to cut between two positions of a spine: at a node everything passes, with the fewest values live.

use crate::spine::Spine;
use std::ops::RangeInclusive;

/// A place to cut: nodes at positions below `at` are on the left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub at: usize,
    /// Values that cross.
    pub live: u64,
    /// Known or nominal bytes that cross.
    pub bytes: u64,
}

/// Both cuts at each node that everything passes, within a range of cut positions, in order.
pub(crate) fn candidates(spine: &Spine, range: RangeInclusive<usize>) -> Vec<Candidate> {
    let mut found = vec![];
    for position in spine.chain.iter().filter_map(|n| spine.position(*n)) {
        let both = [candidate(spine, position), candidate(spine, position + 1)];
        let [before, after] = both;
        // With one tensor on each side, what ends here belongs to the left; with several, this node joins them again.
        let choice =
            if before.live < after.live || (before.live == after.live && before.live > 1) { before } else { after };
        let fits: Vec<_> = both.into_iter().filter(|c| range.contains(&c.at)).collect();
        found.extend(if fits.len() == 2 { vec![choice] } else { fits });
    }
    found
}

fn candidate(spine: &Spine, at: usize) -> Candidate {
    Candidate { at, live: spine.live[at], bytes: spine.live_bytes[at] }
}

/// The last cut with the fewest live values; where nothing dominates, the one with the fewest live bytes.
pub(crate) fn best_cut(spine: &Spine, range: RangeInclusive<usize>) -> usize {
    let found = candidates(spine, range.clone());
    match found.iter().rev().min_by_key(|c| c.live) {
        Some(best) => best.at,
        None => least_live(spine, range),
    }
}

/// The last position with the fewest live values, then bytes.
pub(crate) fn least_live(spine: &Spine, range: RangeInclusive<usize>) -> usize {
    let end = *range.end();
    range.rev().min_by_key(|at| (spine.live[*at], spine.live_bytes[*at])).unwrap_or(end)
}
