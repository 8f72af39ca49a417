//! Local search: applies small changes to a placement and keeps those that improve it.

use crate::Choice;
use crate::evaluate::{Candidate, Evaluator};

/// Improves `start` until no small change helps or `most` placements were evaluated.
pub(crate) fn improve(evaluator: &mut Evaluator, allowed: &[Vec<Choice>], start: Candidate, most: usize) -> Candidate {
    let limit = evaluator.evaluations + most;
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

/// A small change.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// Changes the choice of one block.
    Move(usize, Choice),
    /// Exchanges the choices of two blocks.
    Swap(usize, usize),
}

impl Change {
    fn apply(self, choices: &mut [Choice]) {
        match self {
            Change::Move(block, choice) => choices[block] = choice,
            Change::Swap(a, b) => choices.swap(a, b),
        }
    }
}

/// Changes of blocks at the ends of runs of one choice: moves to any place, swaps with other ends, and swaps with blocks nearby, which
/// shift a run.
fn changes(choices: &[Choice], allowed: &[Vec<Choice>]) -> Vec<Change> {
    let ends = ends(choices);
    let mut changes: Vec<Change> = Vec::new();
    for &block in &ends {
        changes.extend(allowed[block].iter().filter(|c| **c != choices[block]).map(|c| Change::Move(block, *c)));
    }
    let may = |a: usize, b: usize| allowed[a].contains(&choices[b]) && allowed[b].contains(&choices[a]);
    for &a in &ends {
        for b in [a + 1, a + 2, a + 3, a + 5, a + 8] {
            if b < choices.len() && choices[a] != choices[b] && may(a, b) {
                changes.push(Change::Swap(a, b));
            }
        }
        for b in [a.checked_sub(1), a.checked_sub(2), a.checked_sub(3), a.checked_sub(5), a.checked_sub(8)] {
            if let Some(b) = b.filter(|b| choices[a] != choices[*b] && may(a, *b)) {
                changes.push(Change::Swap(b, a));
            }
        }
    }
    let far = ends.iter().flat_map(|a| ends.iter().map(move |b| (*a, *b)));
    let far = far.filter(|(a, b)| a + 8 < *b && choices[*a] != choices[*b] && may(*a, *b));
    changes.extend(far.map(|(a, b)| Change::Swap(a, b)));
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
