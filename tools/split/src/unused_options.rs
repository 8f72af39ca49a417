//! Options that change nothing in the plan that came out: a user who gave one expects otherwise.

use crate::cli::{CompressArg, ExpertsArg, KvHomeArg, SplitArgs};
use hpp_graph::ExpertCounts;
use hpp_model::Analysis;
use hpp_schema::{Device, DeviceKind, Partition, Plan, Provider};

/// A sentence for each option that was given and has no effect, or less than asked.
pub fn notes(args: &SplitArgs, analysis: &Analysis, plan: &Plan) -> Vec<String> {
    let planning = &args.planning;
    let is_gpu = |device: &Device| device.kind == DeviceKind::Gpu;
    let computes_on_gpu = plan.devices.iter().any(is_gpu);
    let streams_to_gpu = plan.devices.iter().any(|device| is_gpu(device) && device.ring.is_some());
    let reads_disk = plan.devices.iter().any(|device| device.window.is_some());
    let has_experts =
        analysis.segmentation.blocks.iter().any(|block| ExpertCounts::of(&analysis.graph, block).is_some());
    let (no_reads, no_experts) = ("no weights are read from disk in each pass", "no mixture of experts was found");
    let unused = [
        (planning.slots.is_some() && !streams_to_gpu, "--slots", "no weights are streamed to a GPU"),
        (args.margin.is_some() && plan.budgets.vram.is_empty(), "--margin", "the plan is for no GPU"),
        (args.movable && !computes_on_gpu, "--movable", "no layer computes on a GPU"),
        (planning.compress != CompressArg::Auto && !reads_disk, "--compress", no_reads),
        (planning.experts != ExpertsArg::Auto && !has_experts, "--experts", no_experts),
        (planning.experts != ExpertsArg::Auto && has_experts && !reads_disk, "--experts", no_reads),
        (
            analysis.integer_operators == Some(0),
            "--int8-activations",
            "no MatMulNBits or QMoE of the model computes with activations in floats that can be rounded",
        ),
        (args.kv != KvHomeArg::Auto && plan.states.is_empty(), "--kv", "the model keeps no states"),
    ];
    let fewer = (plan.partitions.len() < args.partitions).then(|| {
        format!(
            "--partitions {}: only {} are possible, because a block is not divided, nor cut from a block whose states it reads",
            args.partitions,
            plan.partitions.len()
        )
    });
    let kept = args.assign.as_ref().and_then(|assign| assign.experts_elsewhere());
    let kept = kept.map(|blocks| {
        format!(
            "--assign {blocks} has no effect: --cpu-moe, --n-cpu-moe and --gpu-experts keep these experts on the CPU; without them, layers are \
             placed whole"
        )
    });
    let lists_cpu_only = |part: &&Partition| part.providers.iter().all(|provider| *provider == Provider::CPU);
    let of_gpus = || plan.partitions.iter().filter(|part| part.device != "cpu");
    let without_gpu = !planning.providers.is_empty() && of_gpus().any(|part| lists_cpu_only(&part));
    let without_gpu = without_gpu.then(|| {
        "--providers lists none that computes on a GPU: the partitions of GPUs will run on the CPU, in host memory, and the estimates do not \
         know that; --vram 0 plans for the CPU"
            .to_owned()
    });
    let given = unused.into_iter().filter(|(is_unused, ..)| *is_unused);
    let notes = given
        .map(|(_, option, why)| format!("{option} has no effect: {why}"))
        .chain(fewer)
        .chain(kept)
        .chain(without_gpu);
    let is_on_host = plan.budgets.vram.is_empty() && !computes_on_gpu;
    notes.chain(if is_on_host { unused_providers(args, plan) } else { vec![] }).collect()
}

/// Sentences about providers that a plan without GPUs was to use and does not list. Those that HPP does not know have a note already.
fn unused_providers(args: &SplitArgs, plan: &Plan) -> Vec<String> {
    let planning = &args.planning;
    let is_listed = |provider: &Provider| plan.partitions.iter().any(|part| part.providers.contains(provider));
    let is_known = |provider: &Provider| provider.facts().provider.is_some();
    let unused = planning.providers.iter().filter(|provider| **provider != Provider::CPU && is_known(provider));
    let is_for_gpus = |provider: &Provider| !provider.uses_host_memory() || provider.facts().rank_on_gpus.is_some();
    let (for_gpus, for_host): (Vec<Provider>, Vec<Provider>) =
        unused.filter(|provider| !is_listed(provider)).partition(|provider| is_for_gpus(provider));
    // A described or profiled machine without a GPU takes no --vram.
    let why = match planning.machine.is_some() || planning.profile.is_some() {
        true => "the plan is for no GPU",
        false => "the plan is for no GPU; --vram SIZE plans for one, also where it is not here",
    };
    let why_not_on_host = match planning.profile.is_some() {
        true => "on the host the times of the profile decide, and it has none of it, or slower ones",
        false => "on the host only a --profile with its times chooses a provider",
    };
    let lists = [(for_gpus, why), (for_host, why_not_on_host)];
    let note = |(providers, why): (Vec<Provider>, &str)| {
        let names: Vec<&str> = providers.iter().map(Provider::id).collect();
        (!names.is_empty()).then(|| format!("--providers {} has no effect: {why}", names.join(",")))
    };
    lists.into_iter().filter_map(note).collect()
}
