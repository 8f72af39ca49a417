//! From settings to a place for every block.

use crate::cli::{GpuLayers, KvPlace, SplitArgs};
use crate::error::SplitError;
use hpp_partition::{
    Block, Budget, KvHome, NoFit, Place, Rates, Run, check, gpu_layers, greedy, one_gpu_block_each, runs,
};

/// A placement, and the budget it keeps.
#[derive(Debug)]
pub struct Placement {
    /// Runs of blocks that become partitions.
    pub runs: Vec<Run>,
    /// One place for each block.
    pub places: Vec<Place>,
    /// The limits.
    pub budget: Budget,
    /// How the places came about, for the reasons in the plan.
    pub by_hand: bool,
}

impl Placement {
    /// Makes a run part of the one after it, on that one's device.
    pub fn join_with_next(&mut self, index: usize) {
        let joined = self.runs.remove(index).blocks;
        let next = &mut self.runs[index];
        next.blocks.start = joined.start;
        self.places[joined].fill(next.place);
    }
}

/// Refuses a placement that needs more memory than there is.
pub fn check_budget(blocks: &[Block], placement: &Placement) -> Result<(), SplitError> {
    check(blocks, &placement.places, &placement.budget).map_err(no_fit)
}

/// Decides where every block computes.
pub fn place(blocks: &[Block], args: &SplitArgs) -> Result<Placement, SplitError> {
    let budget = budget(args);
    let (mut places, mut by_hand) = match args.gpu_layers {
        Some(GpuLayers::Count(count)) => (gpu_layers(blocks, count), true),
        Some(GpuLayers::Auto) if budget.vram.is_empty() => {
            return Err(SplitError::setting(
                "--gpu-layers auto needs a budget",
                "say how much VRAM there is: --vram 24G",
            ));
        }
        _ => match (greedy(blocks, &budget, &Rates::ASSUMED), &args.assign) {
            (Ok(places), _) => (places, false),
            // Placing by hand starts from the host when the budget alone leads nowhere.
            (Err(_), Some(_)) => (vec![Place::Cpu; blocks.len()], true),
            (Err(source), None) => return Err(no_fit(source)),
        },
    };
    if let Some(assign) = &args.assign {
        assign.apply(blocks, &mut places)?;
        by_hand = true;
    }
    refuse_unknown_gpu(&places, &budget)?;
    check(blocks, &places, &budget).map_err(no_fit)?;
    refuse_split_kv(blocks, &places, args.kv)?;
    let mut runs = runs(blocks, &places, args.partitions);
    if budget.kv == KvHome::Host {
        runs = one_gpu_block_each(runs);
    }
    refuse_too_many(&runs, args.max_partitions)?;
    Ok(Placement { runs, places, budget, by_hand })
}

fn budget(args: &SplitArgs) -> Budget {
    let vram: Vec<u64> = args.vram.iter().map(|size| size.0).collect();
    let default_margin = vram.iter().min().map_or(0, |smallest| (smallest / 16).min(1 << 30));
    Budget {
        vram,
        ram: args.ram.map(|size| size.0),
        margin: args.margin.map_or(default_margin, |size| size.0),
        kv: if args.kv == KvPlace::Cpu { KvHome::Host } else { KvHome::Device },
    }
}

fn no_fit(source: NoFit) -> SplitError {
    let what = match source.place {
        Place::Cpu => "host memory is too small for what the GPUs do not hold".to_owned(),
        Place::Gpu(index) => format!("the budget of gpu{index} is too small"),
    };
    SplitError::NoFit { what, source }
}

/// With budgets given, a block may only go to a GPU that has one.
fn refuse_unknown_gpu(places: &[Place], budget: &Budget) -> Result<(), SplitError> {
    let highest = places.iter().filter_map(|p| if let Place::Gpu(index) = p { Some(*index) } else { None }).max();
    match highest {
        Some(index) if !budget.vram.is_empty() && index >= budget.vram.len() => Err(SplitError::setting(
            format!("gpu{index} is asked for, but --vram names {} GPU(s)", budget.vram.len()),
            "give --vram one size for each GPU, such as 24G,12G",
        )),
        _ => Ok(()),
    }
}

fn refuse_split_kv(blocks: &[Block], places: &[Place], kv: KvPlace) -> Result<(), SplitError> {
    let on_host = blocks.iter().zip(places).filter(|(b, p)| b.kv_bytes > 0 && **p == Place::Cpu).count();
    if kv == KvPlace::Gpu && on_host > 0 {
        return Err(SplitError::setting(
            format!("--kv gpu, but {on_host} layers with a KV cache compute on the CPU"),
            "a CPU layer's cache in VRAM would cross the bus twice for each token: use --kv follow, or place the layers on the GPU",
        ));
    }
    Ok(())
}

fn refuse_too_many(runs: &[Run], most: Option<usize>) -> Result<(), SplitError> {
    match most {
        Some(most) if runs.len() > most => Err(SplitError::setting(
            format!("this placement needs {} partitions, but --max-partitions is {most}", runs.len()),
            "allow more partitions, or place neighbouring blocks on one device",
        )),
        _ => Ok(()),
    }
}
