//! Plans for a range of device memory budgets.

use crate::plan::plan_from;
use crate::{Options, OverBudget, Problem, Solution};

/// The result for one budget.
#[derive(Clone, Debug, PartialEq)]
pub struct SweepPoint {
    /// Device memory of each GPU, bytes.
    pub vram: u64,
    /// The best placement found.
    pub solution: Result<Solution, OverBudget>,
}

/// Plans once for each budget in `vram`, with the same budget for every GPU; results are in the given order. Budgets are planned in
/// ascending order, and each plan starts from the previous one, so more memory is never worse.
pub fn sweep(problem: &Problem, options: &Options, vram: &[u64]) -> Vec<SweepPoint> {
    let mut order: Vec<usize> = (0..vram.len()).collect();
    order.sort_by_key(|at| vram[*at]);
    let mut points: Vec<Option<SweepPoint>> = vec![None; vram.len()];
    let mut previous: Option<Solution> = None;
    for at in order {
        let mut problem = problem.clone();
        problem.budget.vram.fill(vram[at]);
        let known: Vec<&Solution> = previous.iter().collect();
        let solution = plan_from(&problem, options, &known);
        if let Ok(found) = &solution {
            previous = Some(found.clone());
        }
        points[at] = Some(SweepPoint { vram: vram[at], solution });
    }
    points.into_iter().flatten().collect()
}
