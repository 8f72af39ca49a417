//! Problems with few placements, because almost every block is assigned: all of them are evaluated.

use crate::evaluate::{Evaluator, Goal};
use crate::search::SearchResult;
use crate::{BlockPlacement, Problem};

/// The most placements that are evaluated one by one.
const MOST: usize = 64;

/// All placements that these places of each block allow; `None` if they are many, or if no block is assigned.
pub(crate) fn all(problem: &Problem, allowed: &[Vec<BlockPlacement>]) -> Option<Vec<Vec<BlockPlacement>>> {
    let count = allowed.iter().try_fold(1usize, |product, places| product.checked_mul(places.len()));
    let is_few =
        count.is_some_and(|count| count <= MOST) && problem.blocks.iter().any(|block| block.assigned.is_some());
    is_few.then(|| {
        allowed.iter().fold(vec![vec![]], |begun, places| {
            let extended = |begun: &Vec<BlockPlacement>, place: &BlockPlacement| [&begun[..], &[*place]].concat();
            begun.iter().flat_map(|begun| places.iter().map(|place| extended(begun, place))).collect()
        })
    })
}

/// The best of these placements, at most `count`; `None` if none fits.
pub(crate) fn best(problem: &Problem, goal: Goal, all: &[Vec<BlockPlacement>], count: usize) -> Option<SearchResult> {
    let mut evaluator = Evaluator::new(problem, goal, count);
    let mut best: Vec<_> = all.iter().filter_map(|placements| evaluator.evaluate(placements)).collect();
    best.sort_by(|a, b| a.order(b));
    best.truncate(count);
    let bound = best.first()?.score.objective;
    Some(SearchResult { best, bound })
}
