//! Layers that are divided by rows: each shard has a GPU, and the parts of a layer compute at the same time.

use super::{CostSource, DeviceCosts};
use crate::{Analysis, rows};
use hpp_partition::{BlockSpec, Cost, Placement};
use hpp_schema::{Finding, GpuRates};

/// Leaves each shard on its GPU.
pub(super) fn assign(analysis: &Analysis, blocks: &mut [BlockSpec]) {
    for (block, shard) in rows::parts(&analysis.segmentation).into_iter().flatten() {
        blocks[block].assigned = Some(Placement::Resident(shard.index));
    }
}

/// Gives the first shard's block of each part the longest of the shards' times, and the blocks of other shards no time: shards compute at the
/// same time, so that everything that adds up the times of blocks stays right.
pub(super) fn overlap(analysis: &Analysis, costs: &mut DeviceCosts) {
    let parts = rows::parts(&analysis.segmentation);
    for gpu in &mut costs.gpus {
        for part in &parts {
            let mut longest = Cost::default();
            for (block, _) in part {
                longest = longer(&longest, &gpu.blocks[*block]);
                gpu.blocks[*block] = none(&gpu.blocks[*block]);
            }
            gpu.blocks[part[0].0] = longest;
        }
    }
}

fn longer(a: &Cost, b: &Cost) -> Cost {
    let each = |a: &[f64], b: &[f64]| match a {
        [] => b.to_vec(),
        _ => a.iter().zip(b).map(|(a, b)| a.max(*b)).collect(),
    };
    Cost {
        decode_ms: a.decode_ms.max(b.decode_ms),
        short_pass_ms: each(&a.short_pass_ms, &b.short_pass_ms),
        prefill_ms: each(&a.prefill_ms, &b.prefill_ms),
    }
}

/// No time, with as many passes as `cost` has.
fn none(cost: &Cost) -> Cost {
    Cost {
        decode_ms: 0.0,
        short_pass_ms: vec![0.0; cost.short_pass_ms.len()],
        prefill_ms: vec![0.0; cost.prefill_ms.len()],
    }
}

/// The finding on GPUs that differ: rows are divided equally, so the slowest GPU would determine the time.
pub(super) fn findings(analysis: &Analysis, source: &CostSource) -> Vec<Finding> {
    let Some(rows) = &analysis.rows else { return Vec::new() };
    let gpus: Vec<&GpuRates> = source.rates().iter().flat_map(|machine| &machine.gpus).take(rows.shards).collect();
    let rates = |gpu: &GpuRates| (gpu.memory_gb_per_s, gpu.tflops, gpu.provider);
    let differs = gpus.windows(2).find(|pair| rates(pair[0]) != rates(pair[1]));
    let finding = |pair: &[&GpuRates]| {
        let what = format!(
            "--split-mode row divides layers equally among GPUs of one kind, and {} and {} are not",
            pair[0].name, pair[1].name
        );
        Finding::error("machine.gpus", what)
    };
    differs.map(finding).into_iter().collect()
}
