//! The error if no placement fits: the device that is too small, its demand, and the smallest budget that would do.

use crate::evaluate::Goal;
use crate::memory::usage;
use crate::program::least_host;
use crate::regions::regions;
use crate::{Choice, Demand, NoFit, Options, Place, Problem, Where};

/// Refuses a budget with which no GPU can hold any block: it is probably a mistake.
pub(crate) fn refuse_useless_gpus(problem: &Problem, options: &Options) -> Result<(), NoFit> {
    let budget = &problem.budget;
    let alone = |block: usize, gpu: usize| {
        let numbers = &problem.blocks[block];
        let demand = Demand {
            weights: problem.weight_bytes(block),
            kv: numbers.kv_bytes,
            workspace: numbers.workspace_bytes,
            ring: 0,
        };
        NoFit::unless(Place::Gpu(gpu), demand, budget.vram[gpu], budget.margin)
    };
    let mut refusal: Option<NoFit> = None;
    for gpu in 0..budget.vram.len() {
        for block in 0..problem.blocks.len() {
            if !problem.choices(block, options.mechanisms).contains(&Choice::both(Where::Resident(gpu))) {
                continue;
            }
            match alone(block, gpu) {
                Ok(()) => return Ok(()),
                Err(no_fit) if refusal.as_ref().is_none_or(|r| no_fit.smallest() < r.smallest()) => {
                    refusal = Some(no_fit)
                }
                Err(_) => {}
            }
        }
    }
    refusal.map_or(Ok(()), Err)
}

/// The error for a problem without a placement that fits. GPUs may stay empty, so host memory is too small, unless a block can only
/// compute on a GPU. The numbers are those of a placement that needs little host memory.
pub(crate) fn refuse(problem: &Problem, options: &Options) -> NoFit {
    let slots = if options.mechanisms.streams() { options.slots.unwrap_or(3) } else { 0 };
    let slots = vec![slots; problem.budget.vram.len()];
    let goal = Goal { weights: [1.0; 2], mechanisms: options.mechanisms, slots: slots.clone() };
    let allowed: Vec<Vec<Choice>> =
        (0..problem.blocks.len()).map(|block| problem.choices(block, options.mechanisms)).collect();
    let first = |choices: &Vec<Choice>| choices.first().copied().unwrap_or(Choice::both(Where::Cpu));
    let regions = regions(problem, &allowed);
    let choices = least_host(problem, &goal, &regions, &allowed).unwrap_or_else(|| allowed.iter().map(first).collect());
    let usage = usage(problem, &choices, &slots);
    let ram = problem.budget.ram.unwrap_or(u64::MAX);
    let host = NoFit {
        place: Place::Cpu,
        demand: usage.host_least(problem, options.mechanisms),
        budget: ram,
        margin: problem.budget.process,
    };
    usage.check(problem, options.mechanisms).err().unwrap_or(host)
}
