//! The greedy planner: grows one contiguous run of blocks on the GPUs, hottest neighbour first, while it fits.
//!
//! Hotness is milliseconds saved per byte of device memory. All layers of a dense model are equally hot, so the ends decide: the run
//! grows towards the head, which is large and read whole for each token. The embedding stays on the host, because a token reads only
//! one row of it.

use crate::memory::check_gpu;
use crate::{BlockPlacement, Mechanisms, Placement, Problem};
use std::ops::Range;

/// Places blocks greedily and contiguously by their decode times, on the host if none fits on a GPU; does not check host memory. Blocks that
/// the user streams go through a ring of `slots`.
pub(crate) fn greedy_run(problem: &Problem, slots: u32) -> Vec<BlockPlacement> {
    let gain: Vec<f64> = (0..problem.blocks.len()).map(|block| hotness(problem, block)).collect();
    let mut order: Vec<usize> = (0..gain.len()).filter(|block| gain[*block] > 0.0).collect();
    order.sort_by(|a, b| gain[*b].total_cmp(&gain[*a]).then(b.cmp(a)));
    let first = order.into_iter().find_map(|start| Some((start..start + 1, fill(problem, start..start + 1, slots)?)));
    first.map_or_else(|| on_host(problem), |(run, placements)| extend(problem, run, placements, &gain, slots))
}

/// Milliseconds that a block saves on the first GPU per byte; 0 if a GPU cannot compute it, or if the user assigned it.
fn hotness(problem: &Problem, block: usize) -> f64 {
    let Some(gpu) = problem.gpus.first() else { return 0.0 };
    let placements = problem.placements(block, Mechanisms::ResidentCpu);
    if problem.blocks[block].assigned.is_some()
        || !(0..problem.gpus.len()).all(|gpu| placements.contains(&BlockPlacement::both(Placement::Resident(gpu))))
    {
        return 0.0;
    }
    let saved = problem.cpu[block].decode_ms - gpu.blocks[block].decode_ms;
    saved / (problem.weight_bytes(block) + problem.blocks[block].kv_bytes).max(1) as f64
}

/// Blocks that the user did not assign on the host.
fn on_host(problem: &Problem) -> Vec<BlockPlacement> {
    problem.blocks.iter().map(|block| BlockPlacement::both(block.assigned.unwrap_or(Placement::Cpu))).collect()
}

/// Adds the hotter neighbour that fits until none fits. Steps over blocks that the user assigned.
fn extend(
    problem: &Problem,
    mut run: Range<usize>,
    mut placements: Vec<BlockPlacement>,
    gain: &[f64],
    slots: u32,
) -> Vec<BlockPlacement> {
    let is_assigned = |block: usize| problem.blocks[block].assigned.is_some();
    loop {
        let mut wider: Vec<(usize, Range<usize>)> = Vec::new();
        if run.end < gain.len() {
            wider.push((run.end, run.start..run.end + 1));
        }
        if run.start > 0 {
            wider.push((run.start - 1, run.start - 1..run.end));
        }
        wider.sort_by(|a, b| gain[b.0].total_cmp(&gain[a.0]));
        let is_possible = |block: usize| gain[block] > 0.0 || is_assigned(block);
        let grown = wider.into_iter().filter(|(block, _)| is_possible(*block)).find_map(|(_, wide)| {
            let placements = fill(problem, wide.clone(), slots)?;
            Some((wide, placements))
        });
        match grown {
            Some((wide, filled)) => (run, placements) = (wide, filled),
            None => return placements,
        }
    }
}

/// Places `run` on gpu0 until it is full, then on gpu1, and so on; everything else on the host. `None` if it does not fit.
fn fill(problem: &Problem, run: Range<usize>, slots: u32) -> Option<Vec<BlockPlacement>> {
    let mut placements = on_host(problem);
    let mut gpu = 0;
    for block in run.filter(|block| problem.blocks[*block].assigned.is_none()) {
        placements[block] = BlockPlacement::both(Placement::Resident(gpu));
        while check_gpu(problem, &placements, slots, gpu).is_err() {
            gpu += 1;
            if gpu >= problem.budget.vram.len() {
                return None;
            }
            placements[block] = BlockPlacement::both(Placement::Resident(gpu));
        }
    }
    Some(placements)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::tests::{dense, problem};
    use crate::{Budget, DeviceId, Mechanisms, Objective, Options, Planner, fits, useless_gpus};
    use proptest::prelude::*;

    /// The GPU of each block; `.` for the host.
    fn grow(layers: u32, budget: Budget) -> String {
        let shown = |placement: BlockPlacement| placement.decode.gpu().map_or('.', |gpu| char::from(b'0' + gpu as u8));
        greedy_run(&problem(dense(layers, 1 << 20), budget), 3).into_iter().map(shown).collect()
    }

    fn of(vram: &[u64]) -> Budget {
        Budget { vram: vram.to_vec(), ..Budget::default() }
    }

    #[test]
    fn every_block_that_gains_goes_to_a_large_gpu() {
        assert_eq!(grow(6, of(&[1 << 30])), ".0000000");
        assert_eq!(grow(6, of(&[])), "........", "without a GPU everything stays on the host");
    }

    #[test]
    fn a_small_gpu_holds_the_head_and_the_last_layers() {
        assert_eq!(grow(6, of(&[5 << 20])), ".....000");
    }

    #[test]
    fn a_second_gpu_takes_blocks_that_do_not_fit_on_the_first() {
        assert_eq!(grow(6, of(&[4 << 20, 5 << 20])), "..000111");
    }

    #[test]
    fn a_gpu_too_small_for_any_block_is_left_empty() {
        let options = Options {
            planner: Planner::Greedy,
            objective: Objective::Decode,
            mechanisms: Mechanisms::ResidentCpu,
            slots: None,
        };
        let useless = |vram: u64| useless_gpus(&problem(dense(6, 1 << 20), of(&[vram])), &options);
        let needed = useless(1 << 10).unwrap();
        assert_eq!((needed.device, needed.budget), (DeviceId::Gpu(0), 1 << 10));
        let (enough, too_small) = (needed.required_budget(), needed.required_budget() - 1);
        assert_eq!((useless(enough), useless(too_small).map(|it| it.required_budget())), (None, Some(enough)));
        assert_eq!(grow(6, of(&[enough])).matches('0').count(), 1);
        assert_eq!(grow(6, of(&[too_small])), "........");
    }

    #[test]
    fn the_run_ends_at_a_block_that_no_gpu_computes() {
        let mut problem = problem(dense(6, 1 << 20), of(&[1 << 30]));
        problem.gpus[0].blocks[4].decode_ms = f64::INFINITY;
        let found = greedy_run(&problem, 3);
        let on_gpu: Vec<usize> = (0..8).filter(|block| found[*block].decode.gpu().is_some()).collect();
        assert_eq!(on_gpu, [5, 6, 7]);
    }

    proptest! {
        #[test]
        fn placements_fit_and_are_one_run(layers in 1u32..12, vram in 1u64..40, second in 0u64..20, margin in 0u64..3) {
            let mib = 1 << 20;
            let mut budget = Budget { margin: margin * mib, ..of(&[vram * mib / 2]) };
            if second > 0 { budget.vram.push(second * mib / 2) }
            let problem = problem(dense(layers, mib), budget);
            let placements = greedy_run(&problem, 3);
            let slots = vec![0; problem.gpus.len()];
            prop_assert!(fits(&problem, &placements, &slots, Mechanisms::ResidentCpu).is_ok());
            let on: Vec<usize> = (0..placements.len()).filter(|i| placements[*i].decode.gpu().is_some()).collect();
            prop_assert!(on.windows(2).all(|pair| pair[1] == pair[0] + 1));
        }
    }
}
