//! Chooses where to cut the spine: next to a node that every path passes (a dominator of the spine), where the fewest values are
//! live.

use crate::spine::Spine;
use std::ops::RangeInclusive;

/// A position where the spine can be cut: nodes at positions below `at` are on the left side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CutCandidate {
    pub at: usize,
    /// Number of values that cross.
    pub live: u64,
    /// Bytes that cross, with a nominal size for symbols.
    pub bytes: u64,
}

/// The cuts next to each dominator within a range of positions, in order. If both cuts next to a dominator are in the range, only the better one is
/// returned. A cut that a value of unknown element type would cross is left out.
pub(crate) fn candidates(spine: &Spine, range: RangeInclusive<usize>) -> Vec<CutCandidate> {
    let mut found = vec![];
    for position in spine.dominators.iter().filter_map(|n| spine.position(*n)) {
        let both = [candidate(spine, position), candidate(spine, position + 1)];
        let [before, after] = both;
        // If one value is live on either side, the dominator ends the left part. If several are, it joins them and
        // begins the right part.
        let choice =
            if before.live < after.live || (before.live == after.live && before.live > 1) { before } else { after };
        let fits: Vec<_> =
            both.into_iter().filter(|c| range.contains(&c.at) && spine.live_untyped[c.at] == 0).collect();
        found.extend(if fits.len() == 2 { vec![choice] } else { fits });
    }
    found
}

fn candidate(spine: &Spine, at: usize) -> CutCandidate {
    CutCandidate { at, live: spine.live[at], bytes: spine.live_bytes[at] }
}

/// The last candidate with the fewest live values; without candidates, the position that [`least_live`] finds.
pub(crate) fn best_cut(spine: &Spine, range: RangeInclusive<usize>) -> usize {
    let found = candidates(spine, range.clone());
    match found.iter().rev().min_by_key(|c| c.live) {
        Some(best) => best.at,
        None => least_live(spine, range),
    }
}

/// The last position with the fewest live values of unknown type; among those, the fewest fast-growing live values, then the
/// fewest live values, then the fewest live bytes.
pub(crate) fn least_live(spine: &Spine, range: RangeInclusive<usize>) -> usize {
    let end = *range.end();
    let crossing =
        |at: &usize| (spine.live_untyped[*at], spine.live_fast_growing[*at], spine.live[*at], spine.live_bytes[*at]);
    range.rev().min_by_key(crossing).unwrap_or(end)
}
