//! `--gpu-experts`: the most popular experts of each layer stay on a GPU. What it needs, and what a user is told.

use crate::amount::count;
use crate::cli::{GpuExpertsArg, SplitArgs};
use crate::error::SplitError;
use crate::input_errors::InputErrors;
use crate::request::PlanningRequest;
use hpp_model::{Analysis, GpuExperts};
use hpp_partition::{BlockPlacement, BlockSpec, DeviceId, Placement, gpu_layers, usage};

/// Refuses options that leave nothing to divide, or with which a number of experts takes long to find.
pub fn check(args: &SplitArgs, errors: &mut InputErrors) {
    let Some(experts) = args.gpu_experts else { return };
    errors.require(
        args.n_cpu_moe != Some(0),
        "--gpu-experts divides the experts of the layers that --n-cpu-moe names, and 0 are none",
        "omit --n-cpu-moe to divide the experts of all layers",
    );
    errors.require(
        experts != GpuExpertsArg::Count(0),
        "--gpu-experts 0 keeps no expert on the GPU",
        "give a larger number or `auto`; --cpu-moe computes all experts on the CPU",
    );
    errors.require(
        experts != GpuExpertsArg::Auto || !args.quantize.takes_long(),
        "--gpu-experts auto plans three times, and formats of weights that are chosen by measurements would be measured each time",
        "give --gpu-experts the number that a --dry-run without --bits-budget and --calibration names",
    );
}

/// Refuses a machine without a GPU.
pub fn check_gpus(args: &SplitArgs, gpus: usize) -> Result<(), SplitError> {
    if args.experts_on_gpu().is_none() || gpus > 0 {
        return Ok(());
    }
    Err(SplitError::setting(
        "--gpu-experts keeps experts on a GPU, and the plan is for none",
        "give --vram the memory of a GPU, such as 24G, or omit --gpu-experts",
    ))
}

/// Refuses a manual placement that computes the GPU's experts on the CPU.
pub fn refuse_on_host(args: &SplitArgs, blocks: &[BlockSpec], placements: &[BlockPlacement]) -> Result<(), SplitError> {
    let is_on_host =
        |(block, placement): &(&BlockSpec, &BlockPlacement)| block.needs_gpu && placement.computes_on_host();
    let found = blocks.iter().zip(placements).find(is_on_host).filter(|_| args.experts_on_gpu().is_some());
    let Some((block, _)) = found else { return Ok(()) };
    let label = &block.label;
    Err(SplitError::setting(
        format!("--gpu-experts keeps experts of {label} on a GPU, and this placement computes {label} on the CPU"),
        "use --gpu-layers all, or leave --gpu-layers, --assign and --planner out; beside --n-cpu-moe N, --gpu-experts divides the experts of the first N \
         layers only",
    ))
}

/// How many experts of each layer the GPUs hold beside the rest of the layers. `analysis` and `request` are with a divided model.
pub fn fitting(analysis: &Analysis, request: &PlanningRequest) -> Fitting {
    let Some(divided) = &analysis.gpu_experts else { return Fitting::None };
    let [smallest, largest] = divided.counts;
    let problem = &request.problem;
    let devices = gpu_layers(problem, u64::MAX);
    let place = |device: &DeviceId| match device {
        DeviceId::Gpu(gpu) => BlockPlacement::both(Placement::Resident(*gpu)),
        DeviceId::Cpu => BlockPlacement::both(Placement::Cpu),
    };
    let placements: Vec<BlockPlacement> = devices.iter().map(place).collect();
    let demands = usage(problem, &placements, &vec![0; problem.gpus.len()]).gpus;
    let more = demands.iter().zip(&problem.budget.vram).enumerate().filter_map(|(gpu, (demand, vram))| {
        let of_gpu = |(block, device): (&BlockSpec, &DeviceId)| match device {
            DeviceId::Gpu(on) if *on == gpu => divided.expert_bytes.get(&block.label).copied().unwrap_or(0),
            _ => 0,
        };
        let one_of_each: u64 = problem.blocks.iter().zip(&devices).map(of_gpu).sum();
        let needed = problem.budget.margin.saturating_add(demand.total());
        (i128::from(*vram) - i128::from(needed)).checked_div_euclid(i128::from(one_of_each))
    });
    match i128::from(divided.experts) + more.min().unwrap_or(0) {
        experts if experts < 1 => Fitting::None,
        experts if experts >= i128::from(largest) => Fitting::All,
        experts => Fitting::Some((experts as u64).min(smallest - 1)),
    }
}

/// How many experts of each layer fit on the GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fitting {
    /// Not one.
    None,
    /// This many, not all.
    Some(u64),
    /// All.
    All,
}

impl Fitting {
    /// The settings with this number of experts: without `--gpu-experts` if the GPUs hold all experts, with the experts on the CPU if they hold
    /// none.
    pub fn apply(self, args: &SplitArgs) -> SplitArgs {
        let args = args.clone();
        match self {
            Fitting::None => {
                tell!(
                    "note: --gpu-experts auto: the GPU has no room for an expert of each layer beside the rest of the layers"
                );
                SplitArgs { gpu_experts: None, cpu_moe: args.n_cpu_moe.is_none(), ..args }
            }
            Fitting::Some(experts) => SplitArgs { gpu_experts: Some(GpuExpertsArg::Count(experts)), ..args },
            Fitting::All => {
                tell!("note: --gpu-experts auto: the GPU has room for all experts, so layers are placed whole");
                SplitArgs { gpu_experts: None, cpu_moe: false, n_cpu_moe: None, ..args }
            }
        }
    }
}

/// Which experts stay on the GPU, and how much they are expected to spare the CPU; `None` if no mixture is divided.
pub fn note(analysis: &Analysis) -> Option<String> {
    let GpuExperts { experts, expert_bytes, share, is_counted, .. } = analysis.gpu_experts.as_ref()?;
    let whose = match is_counted {
        true => "the profile's corpus selected most",
        false => "come first, because no profile has counted which are popular (hpp-profile --prompts counts them)",
    };
    Some(format!(
        "--gpu-experts: of each of {} layers the GPU computes {}, those that {whose}; {:.0} % of the selections are expected to fall on them",
        expert_bytes.len(),
        count(*experts as usize, "expert"),
        share * 100.0
    ))
}
