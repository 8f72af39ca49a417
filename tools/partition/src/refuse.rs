//! The error if no placement fits: the device that is too small, its demand, and the required budget.

use crate::evaluate::Goal;
use crate::memory::usage_with_cuts;
use crate::plan::fewest_slots;
use crate::program::min_host_placement;
use crate::regions::regions;
use crate::{BlockPlacement, BlockSpec, Demand, DeviceId, KvHome, Options, OverBudget, Placement, Problem};

/// The smallest demand of a block on a GPU, with that GPU's budget, if no GPU can hold any block that it could compute: the plan then uses
/// the host only. `None` if a GPU can hold a block.
pub fn useless_gpus(problem: &Problem, options: &Options) -> Option<OverBudget> {
    let budget = &problem.budget;
    let check_alone = |block: usize, gpu: usize| {
        let BlockSpec { kv_bytes, workspace_bytes: workspace, .. } = problem.blocks[block];
        let kv = if budget.kv == KvHome::Host { problem.staged_state(block) } else { kv_bytes };
        let demand = Demand { weights: problem.weight_bytes(block), kv, workspace, ring: 0 };
        OverBudget::check(DeviceId::Gpu(gpu), demand, budget.vram[gpu], budget.margin)
    };
    let mut smallest: Option<OverBudget> = None;
    for gpu in 0..budget.vram.len() {
        for block in 0..problem.blocks.len() {
            if !problem.placements(block, options.mechanisms).contains(&BlockPlacement::both(Placement::Resident(gpu)))
            {
                continue;
            }
            match check_alone(block, gpu) {
                Ok(()) => return None,
                Err(error) => {
                    let is_smaller = |known: &OverBudget| error.required_budget() < known.required_budget();
                    if smallest.as_ref().is_none_or(is_smaller) {
                        smallest = Some(error);
                    }
                }
            }
        }
    }
    smallest
}

/// The error for a problem without a placement that fits. If the blocks that the user assigned exceed a GPU, the error names that GPU.
/// Otherwise it has the numbers of a placement that needs little host memory, with only those blocks on GPUs that must be there: host memory is
/// too small, unless these blocks exceed a GPU.
pub(crate) fn budget_error(problem: &Problem, options: &Options) -> OverBudget {
    let slots = vec![fewest_slots(problem, options); problem.budget.vram.len()];
    let assigned = problem.blocks.iter().map(|block| BlockPlacement::both(block.assigned.unwrap_or(Placement::Cpu)));
    if let Err(error) =
        usage_with_cuts(problem, &assigned.collect::<Vec<_>>(), &slots).check(problem, options.mechanisms)
        && error.device != DeviceId::Cpu
    {
        return error;
    }
    let placements = least_on_host(problem, options, &slots);
    let usage = usage_with_cuts(problem, &placements, &slots);
    let ram = problem.budget.ram.unwrap_or(u64::MAX);
    let host = OverBudget {
        device: DeviceId::Cpu,
        demand: usage.min_host_demand(problem, options.mechanisms),
        budget: ram,
        margin: problem.budget.process,
        draft: 0,
    };
    usage.check(problem, options.mechanisms).err().unwrap_or(host)
}

/// A placement within the budgets of GPUs, if there is one, that needs little host memory.
pub(crate) fn least_on_host(problem: &Problem, options: &Options, slots: &[u32]) -> Vec<BlockPlacement> {
    let goal = Goal { weights: [1.0; 2], mechanisms: options.mechanisms, slots: slots.to_vec() };
    let allowed: Vec<Vec<BlockPlacement>> =
        (0..problem.blocks.len()).map(|block| problem.placements(block, options.mechanisms)).collect();
    let first =
        |placements: &Vec<BlockPlacement>| placements.first().copied().unwrap_or(BlockPlacement::both(Placement::Cpu));
    let regions = regions(problem, &allowed);
    min_host_placement(problem, &goal, &regions, &allowed).unwrap_or_else(|| allowed.iter().map(first).collect())
}
