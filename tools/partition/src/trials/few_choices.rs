//! Problems in which the user assigned almost every block.

use super::instances::instance;
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
