//! Refuses models with operators, opsets or element types that ONNX Runtime cannot run, before any file is written.

use crate::input_errors::{InputError, InputErrors};
use crate::partitioning::Partitioning;
use hpp_graph::{NodeId, PartitionGraph};
use hpp_model::{Analysis, has_paged_caches, machine_layouts, unknown_operators, without_cpu_kernel};

const UNKNOWN: &str = "export again with an opset and operators that ONNX Runtime supports (torch.onnx.export takes opset_version); if \
                       a custom operator library provides them, give --allow-unknown-operators";
const LAYOUTS: &str = "save it with ORT_ENABLE_EXTENDED instead of ORT_ENABLE_ALL, or take the original model";
const NO_KERNEL: &str = "export for the CPU (float32, float16 or 4-bit weights, and no operators of a GPU only) to compute there; or put these blocks on a GPU \
                         (more --vram or --gpu-layers; hpp-split also has --assign, which names blocks, and --allow-unknown-operators, which skips this check)";

const PAGED: &str = "export the model again without paged attention: HPP keeps KV caches itself";

/// Refuses opsets and operators that ONNX Runtime does not have, and those for the machine that saved the model.
pub fn check(analysis: &Analysis, allow: bool) -> Result<(), InputErrors> {
    refuse(machine_layouts(&analysis.model).filter(|_| !allow).into_iter().collect(), LAYOUTS)?;
    refuse(if allow { vec![] } else { unknown_operators(&analysis.model) }, UNKNOWN)
}

/// Refuses operators without a CPU kernel in a model of which everything computes on the host.
pub fn check_all_on_host(analysis: &Analysis, allow: bool) -> Result<(), InputErrors> {
    if allow { Ok(()) } else { refuse_on_host(analysis, nodes_of_blocks(analysis)) }
}

/// What [`check`] refuses, and what [`check_host`] refuses on the host, as notes.
pub fn notes(analysis: &Analysis) -> Vec<String> {
    let missing = machine_layouts(&analysis.model).into_iter().chain(unknown_operators(&analysis.model));
    let missing: Vec<String> = missing
        .map(|line| format!("hpp-split will refuse this model without --allow-unknown-operators: {line}"))
        .collect();
    if !missing.is_empty() {
        return missing;
    }
    let without_kernel = without_cpu_kernel(&analysis.graph, nodes_of_blocks(analysis));
    without_kernel.into_iter().map(|line| format!("this needs a GPU: {line}")).collect()
}

fn nodes_of_blocks(analysis: &Analysis) -> impl Iterator<Item = NodeId> {
    analysis.segmentation.blocks.iter().flat_map(|block| block.nodes.iter().copied())
}

/// Refuses operators that compute on the host and have no CPU kernel.
pub fn check_host(
    analysis: &Analysis,
    partitioning: &Partitioning,
    parts: &[PartitionGraph],
    allow: bool,
) -> Result<(), InputErrors> {
    if allow {
        return Ok(());
    }
    let all = partitioning.partitions.iter().zip(parts);
    let partitions = all.filter(|(partition, _)| partition.placement.computes_on_host());
    refuse_on_host(analysis, partitions.flat_map(|(_, part)| part.nodes.iter().copied()))
}

fn refuse_on_host(analysis: &Analysis, nodes: impl Iterator<Item = NodeId>) -> Result<(), InputErrors> {
    let hint = if has_paged_caches(&analysis.graph) { PAGED } else { NO_KERNEL };
    refuse(without_cpu_kernel(&analysis.graph, nodes), hint)
}

fn refuse(lines: Vec<String>, hint: &'static str) -> Result<(), InputErrors> {
    InputErrors(lines.into_iter().map(|line| InputError::new(line, hint)).collect()).into_result()
}
