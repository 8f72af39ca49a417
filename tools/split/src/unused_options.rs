//! Options that change nothing in the plan that came out: a user who gave one expects otherwise.

use crate::cli::{CompressArg, ExpertReads, KvHomeArg, SplitArgs};
use hpp_graph::ExpertCounts;
use hpp_model::Analysis;
use hpp_schema::{Device, DeviceKind, Plan};

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
        (planning.experts != ExpertReads::Auto && !has_experts, "--experts", no_experts),
        (planning.experts != ExpertReads::Auto && has_experts && !reads_disk, "--experts", no_reads),
        (
            analysis.integer_operators == Some(0),
            "--int8-activations",
            "the model has no operator that takes activations of 8 bits and does not already (MatMulNBits and QMoE with 4 or 8 bits in blocks)",
        ),
        (args.kv != KvHomeArg::Auto && plan.states.is_empty(), "--kv", "the model keeps no states"),
    ];
    let fewer = (plan.partitions.len() < args.partitions).then(|| {
        format!(
            "--partitions {}: only {} are possible, because a block is not divided",
            args.partitions,
            plan.partitions.len()
        )
    });
    let given = unused.into_iter().filter(|(is_unused, ..)| *is_unused);
    given.map(|(_, option, why)| format!("{option} has no effect: {why}")).chain(fewer).collect()
}
