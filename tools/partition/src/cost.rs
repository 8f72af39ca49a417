//! What a block is to a planner: bytes it occupies and work it does per phase. Knows shapes as numbers only.

/// A planning unit: an embedding, a layer, a head, or a piece of a model without layers.
#[derive(Clone, Debug)]
pub struct Block {
    /// `embedding`, `layers.3`, `head`.
    pub label: String,
    /// What it is.
    pub kind: BlockKind,
    /// Weights it reads: a key that is equal for a shared weight, and bytes. Shared weights count once per device.
    pub weights: Vec<(u32, u64)>,
    /// State at the planned context and batch, in bytes.
    pub kv_bytes: u64,
    /// Tensors that state consists of: each is copied by itself where state moves.
    pub kv_tensors: u64,
    /// Largest set of activations alive at once in a prefill pass, in bytes.
    pub workspace_bytes: u64,
    /// Bytes of the tensors that enter the block, for one token.
    pub boundary_bytes: u64,
    /// Tensors that enter the block: each is copied by itself where the block before computes elsewhere. Tensors of sizes lie
    /// on the host on either side and do not count.
    pub boundary_tensors: u64,
    /// Work for one decoded token at the planned context.
    pub decode: Work,
    /// Work for one prefill pass of the planned prompt.
    pub prefill: Work,
}

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// Tokens to hidden states.
    Embedding,
    /// A repeated layer, by index.
    Layer(u32),
    /// Hidden states to logits.
    Head,
    /// A piece of a model that has no layers in this sense.
    Other,
}

/// Floating-point operations and bytes read from memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Floating-point operations (a multiply-add counts two).
    pub flops: u64,
    /// Bytes of weights and state read.
    pub bytes: u64,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{Budget, Cost, GpuCosts, Problem, Workload};

    /// A dense decoder: embedding, `layers` equal layers, head. Weights in units of one byte per `scale`.
    pub fn dense(layers: u32, scale: u64) -> Vec<Block> {
        let block = |label: String, kind, key: u32, weights: u64, kv: u64| Block {
            label,
            kind,
            weights: vec![(key, weights)],
            kv_bytes: kv,
            kv_tensors: 2,
            workspace_bytes: scale / 10,
            boundary_bytes: 8,
            boundary_tensors: 1,
            decode: Work { flops: 2 * weights, bytes: weights + kv },
            prefill: Work { flops: 200 * weights, bytes: weights },
        };
        let mut blocks = vec![block("embedding".into(), BlockKind::Embedding, 0, 2 * scale, 0)];
        blocks[0].decode = Work::default();
        for i in 0..layers {
            blocks.push(block(format!("layers.{i}"), BlockKind::Layer(i), i + 1, scale, scale / 4));
        }
        blocks.push(block("head".into(), BlockKind::Head, layers + 1, 2 * scale, 0));
        blocks
    }

    /// The same blocks on a host with 30 GB/s and equal GPUs with 450 GB/s, one for each entry of the budget.
    pub fn problem(blocks: Vec<Block>, budget: Budget) -> Problem {
        let costs = |bytes_per_ms: f64| -> Vec<Cost> {
            let cost = |block: &Block| Cost {
                decode_ms: block.decode.bytes as f64 / bytes_per_ms,
                prefill_ms: vec![block.prefill.bytes as f64 / bytes_per_ms],
            };
            blocks.iter().map(cost).collect()
        };
        let gpu = GpuCosts {
            blocks: costs(450e6),
            launch_ms: 0.06,
            to_device: 20e6,
            from_device: 20e6,
            latency_ms: 0.06,
            compute_contention: 1.0,
            link_contention: 1.0,
        };
        Problem {
            cpu: costs(30e6),
            gpus: vec![gpu; budget.vram.len()],
            cpu_launch_ms: 0.06,
            pass_ms: 0.0,
            disk_bytes_per_ms: None,
            load: Workload { batch: 1, prompt_tokens: 1, new_tokens: 1, passes: vec![1] },
            cuts: vec![],
            blocks,
            budget,
        }
    }
}
