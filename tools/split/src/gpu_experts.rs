//! `--gpu-experts`: the most popular experts of each layer stay on a GPU. What it needs, and what a user is told.

use crate::amount::count;
use crate::cli::SplitArgs;
use crate::error::SplitError;
use hpp_model::{Analysis, GpuExperts};

/// Refuses a machine without a GPU.
pub fn check_gpus(args: &SplitArgs, gpus: usize) -> Result<(), SplitError> {
    if args.gpu_experts.is_none_or(|experts| experts == 0) || gpus > 0 {
        return Ok(());
    }
    Err(SplitError::setting(
        "--gpu-experts keeps experts on a GPU, and the plan is for none",
        "give --vram the memory of a GPU, such as 24G, or omit --gpu-experts",
    ))
}

/// Which experts stay on the GPU, and how much they are expected to spare the CPU; `None` if no mixture is divided.
pub fn note(analysis: &Analysis) -> Option<String> {
    let GpuExperts { experts, layers, share, is_counted, .. } = analysis.gpu_experts.as_ref()?;
    let whose = match is_counted {
        true => "the profile's corpus selected most",
        false => "come first, because no profile has counted which are popular (hpp-profile --prompts counts them)",
    };
    Some(format!(
        "--gpu-experts: of each of {layers} layers the GPU computes {}, those that {whose}; {:.0} % of the selections are expected to fall on them",
        count(*experts as usize, "expert"),
        share * 100.0
    ))
}
