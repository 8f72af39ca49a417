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

#[cfg(test)]
mod tests {
    use crate::trials::instances::instance;
    use crate::{BlockPlacement, Mechanisms, Objective, Options, Placement, Planner, evaluate, fits, plan};

    /// With all blocks but two assigned, the plan is the best placement of these two, and known to be.
    #[test]
    fn few_free_blocks_are_placed_best() {
        let mechanisms = Mechanisms::ResidentCpuDisk;
        let options = Options { planner: Planner::Exact, objective: Objective::Mixed, mechanisms, slots: None };
        for seed in 0..40 {
            let mut problem = instance(seed, 6, 2);
            problem.budget.vram.fill(1 << 40);
            for (at, block) in problem.blocks.iter_mut().enumerate().skip(1).take(4) {
                block.assigned = Some(Placement::Resident(at % 2));
            }
            let places = |block| problem.placements(block, mechanisms);
            let mut best = f64::INFINITY;
            for (first, last) in
                places(0).into_iter().flat_map(|first| places(5).into_iter().map(move |last| (first, last)))
            {
                let between = (1..5).map(|at| places(at)[0]);
                let all: Vec<BlockPlacement> = std::iter::once(first).chain(between).chain([last]).collect();
                if fits(&problem, &all, &[0, 0], mechanisms).is_ok() {
                    best = best.min(evaluate(&problem, &options, all, vec![0, 0]).objective_ms);
                }
            }
            match plan(&problem, &options) {
                Ok(found) => assert!(found.proven && (found.objective_ms - best).abs() <= 1e-9 * best, "seed {seed}"),
                Err(_) => assert!(best.is_infinite(), "seed {seed}"),
            }
        }
    }
}
