//! What a block gains from a device for each byte it takes there.

use crate::{Hotness, Phase, Problem};

/// How much each block gains from this GPU in this phase, in the order of blocks. Prefill counts all passes of the prompt.
pub fn block_hotness(problem: &Problem, gpu: usize, phase: Phase) -> Vec<Hotness> {
    let ms = |costs: &[crate::Cost], i: usize| match phase {
        Phase::Decode => costs[i].decode_ms,
        Phase::Prefill => costs[i].prefill_ms.iter().sum(),
    };
    let of = |(i, block): (usize, &crate::Block)| Hotness {
        cpu_ms: ms(&problem.cpu, i),
        gpu_ms: ms(&problem.gpus[gpu].blocks, i),
        weight_bytes: block.weights.iter().map(|(_, bytes)| bytes).sum(),
        kv_bytes: block.kv_bytes,
    };
    problem.blocks.iter().enumerate().map(of).collect()
}
