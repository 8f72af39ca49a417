//! Local search: applies local changes to a placement and keeps those that improve it.

use crate::Choice;
use crate::evaluate::{Candidate, Evaluator};

/// Improves `start` until no local change helps or `max_evaluations` placements were evaluated. Takes the first change that helps.
pub(crate) fn improve(
    evaluator: &mut Evaluator,
    allowed: &[Vec<Choice>],
    start: Candidate,
    max_evaluations: usize,
) -> Candidate {
    let limit = evaluator.evaluations + max_evaluations;
    let mut best = start;
    loop {
        let mut improved = false;
        for change in changes(&best.choices, allowed) {
            if evaluator.evaluations >= limit {
                return best;
            }
            let mut choices = best.choices.clone();
            change.apply(&mut choices);
            if choices != best.choices
                && let Some(candidate) = evaluator.evaluate(&choices)
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
    /// Changes the choice of one block.
    Move(usize, Choice),
    /// Exchanges the choices of two blocks.
    Swap(usize, usize),
}

impl LocalChange {
    fn apply(self, choices: &mut [Choice]) {
        match self {
            LocalChange::Move(block, choice) => choices[block] = choice,
            LocalChange::Swap(a, b) => choices.swap(a, b),
        }
    }
}

/// Changes of blocks at the ends of runs of one choice: moves to any place, swaps with other ends, and swaps with blocks nearby, which
/// shift a run.
fn changes(choices: &[Choice], allowed: &[Vec<Choice>]) -> Vec<LocalChange> {
    let ends = ends(choices);
    let mut changes: Vec<LocalChange> = Vec::new();
    for &block in &ends {
        changes.extend(allowed[block].iter().filter(|c| **c != choices[block]).map(|c| LocalChange::Move(block, *c)));
    }
    let can_swap = |a: usize, b: usize| allowed[a].contains(&choices[b]) && allowed[b].contains(&choices[a]);
    for &a in &ends {
        for b in [a + 1, a + 2, a + 3, a + 5, a + 8] {
            if b < choices.len() && choices[a] != choices[b] && can_swap(a, b) {
                changes.push(LocalChange::Swap(a, b));
            }
        }
        for b in [a.checked_sub(1), a.checked_sub(2), a.checked_sub(3), a.checked_sub(5), a.checked_sub(8)] {
            if let Some(b) = b.filter(|b| choices[a] != choices[*b] && can_swap(a, *b)) {
                changes.push(LocalChange::Swap(b, a));
            }
        }
    }
    let far = ends.iter().flat_map(|a| ends.iter().map(move |b| (*a, *b)));
    let far = far.filter(|(a, b)| a + 8 < *b && choices[*a] != choices[*b] && can_swap(*a, *b));
    changes.extend(far.map(|(a, b)| LocalChange::Swap(a, b)));
    changes
}

/// The first and last block of each run of one choice.
fn ends(choices: &[Choice]) -> Vec<usize> {
    let is_end = |i: &usize| {
        let differs = |j: Option<usize>| j.is_none_or(|j| choices.get(j).is_none_or(|other| *other != choices[*i]));
        differs(i.checked_sub(1)) || differs(Some(i + 1))
    };
    (0..choices.len()).filter(is_end).collect()
}
