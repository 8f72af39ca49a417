//! Local search: applies local changes to a placement and keeps those that improve it.

use crate::BlockPlacement;
use crate::evaluate::{Evaluator, ScoredPlacement};

/// Improves `start` until no local change helps or `max_evaluations` placements were evaluated. Takes the first change that helps.
pub(crate) fn improve(
    evaluator: &mut Evaluator,
    allowed: &[Vec<BlockPlacement>],
    start: ScoredPlacement,
    max_evaluations: usize,
) -> ScoredPlacement {
    let limit = evaluator.evaluations + max_evaluations;
    let mut best = start;
    loop {
        let mut improved = false;
        for change in changes(&best.placements, allowed) {
            if evaluator.evaluations >= limit {
                return best;
            }
            let mut placements = best.placements.clone();
            change.apply(&mut placements);
            if placements != best.placements
                && let Some(candidate) = evaluator.evaluate(&placements)
                && candidate.beats(&best)
            {
                best = candidate;
                improved = true;
                break;
            }
        }
        if !improved {
            return best;
        }
    }
}

/// A change of one or two blocks.
#[derive(Clone, Copy, Debug)]
enum LocalChange {
    /// Changes the placement of one block.
    Move(usize, BlockPlacement),
    /// Exchanges the placements of two blocks.
    Swap(usize, usize),
}

impl LocalChange {
    fn apply(self, placements: &mut [BlockPlacement]) {
        match self {
            LocalChange::Move(block, placement) => placements[block] = placement,
            LocalChange::Swap(a, b) => placements.swap(a, b),
        }
    }
}

/// Changes of blocks at the ends of runs of one block placement: moves to any place, swaps with other ends, and swaps with blocks nearby, which
/// shift a run.
fn changes(placements: &[BlockPlacement], allowed: &[Vec<BlockPlacement>]) -> Vec<LocalChange> {
    let ends = ends(placements);
    let mut changes: Vec<LocalChange> = Vec::new();
    for &block in &ends {
        changes
            .extend(allowed[block].iter().filter(|c| **c != placements[block]).map(|c| LocalChange::Move(block, *c)));
    }
    let can_swap = |a: usize, b: usize| allowed[a].contains(&placements[b]) && allowed[b].contains(&placements[a]);
    for &a in &ends {
        for b in [a + 1, a + 2, a + 3, a + 5, a + 8] {
            if b < placements.len() && placements[a] != placements[b] && can_swap(a, b) {
                changes.push(LocalChange::Swap(a, b));
            }
        }
        for b in [a.checked_sub(1), a.checked_sub(2), a.checked_sub(3), a.checked_sub(5), a.checked_sub(8)] {
            if let Some(b) = b.filter(|b| placements[a] != placements[*b] && can_swap(a, *b)) {
                changes.push(LocalChange::Swap(b, a));
            }
        }
    }
    let far = ends.iter().flat_map(|a| ends.iter().map(move |b| (*a, *b)));
    let far = far.filter(|(a, b)| a + 8 < *b && placements[*a] != placements[*b] && can_swap(*a, *b));
    changes.extend(far.map(|(a, b)| LocalChange::Swap(a, b)));
    changes
}

/// The first and last block of each run of one block placement.
fn ends(placements: &[BlockPlacement]) -> Vec<usize> {
    let is_end = |i: &usize| {
        let differs =
            |j: Option<usize>| j.is_none_or(|j| placements.get(j).is_none_or(|other| *other != placements[*i]));
        differs(i.checked_sub(1)) || differs(Some(i + 1))
    };
    (0..placements.len()).filter(is_end).collect()
}
