//! Whether compressed copies of a model's weights are worth their place on the disk.

use crate::cli::{CompressArg, SplitArgs};
use crate::costs::Costs;
use crate::partitioning::Partitioning;
use crate::request::PlanningRequest;
use hpp_model::{Analysis, host_kernels};
use hpp_partition::{Packing, Problem, evaluate};

/// The least gain of speed for which a copy is written.
const MIN_GAIN: f64 = 0.03;

/// Plans without compressed copies if they would gain too little: because reading is not the bottleneck, because hardly anything becomes
/// smaller, or because the rate of decompressing is only assumed (on a disk of 3.8 GB/s two cores were not faster with copies). Returns
/// whether that changes the problem. Weights that are written for their kernels anyway are compressed wherever that pays.
pub fn drop_useless_copies(
    request: &mut PlanningRequest,
    args: &SplitArgs,
    analysis: &Analysis,
    costs: &Costs,
    planned: &Partitioning,
) -> bool {
    let is_asked_for = args.planning.compress != CompressArg::Auto;
    if is_asked_for || args.planning.refine.is_some() || host_kernels(analysis.model.proto()).packed {
        return false;
    }
    let uncompressed = without_compression(&planned.problem(request));
    let solution = &planned.solution;
    let other = evaluate(&uncompressed, &request.options, solution.placements.clone(), solution.slots.clone());
    let gains = other.objective_ms > solution.objective_ms * (1.0 + MIN_GAIN);
    if gains && costs.source().knows_decompression() {
        return false;
    }
    request.compress_permille = 0;
    let is_changed = request.problem.budget.packing.decompressed_permille > 0;
    request.problem = without_compression(&request.problem);
    request.single = request.single.as_ref().map(without_compression);
    is_changed
}

fn without_compression(problem: &Problem) -> Problem {
    let mut problem = problem.clone();
    problem.budget.packing = Packing { growth_permille: problem.budget.packing.growth_permille, ..Packing::default() };
    problem
}
