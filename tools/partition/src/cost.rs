//! A block as the planner sees it: the bytes it occupies and its work in each phase.

use crate::experts::Experts;
use crate::{BlockPlacement, Placement};
use hpp_schema::memory::state_tokens;

/// A planning unit: an embedding, a layer, a head, or a piece of a model without layers.
#[derive(Clone, Debug)]
pub struct BlockSpec {
    /// `embedding`, `layers.3`, `head`.
    pub label: String,
    /// Its kind.
    pub kind: BlockRole,
    /// Weights it reads, as (key, bytes). Blocks that share a weight have the same key for it; it counts once per device.
    pub weights: Vec<(u32, u64)>,
    /// Its weights if they are streamed to a GPU.
    pub streamed: Streamed,
    /// Its experts, which are among its weights, if the host reads them from disk by demand.
    pub experts: Option<Experts>,
    /// Whether the user keeps it on the host.
    pub kept_on_host: bool,
    /// Where the user places it in both phases, if anywhere: the planner leaves it there.
    pub assigned: Option<Placement>,
    /// Whether the planner keeps it off the host if a GPU can compute it: the CPU has no kernel for one of its operators, or its state must be on
    /// a GPU.
    pub needs_gpu: bool,
    /// Memory of its state at the planned context and batch, in bytes.
    pub kv_bytes: u64,
    /// Number of state tensors. Each is copied separately.
    pub kv_tensors: u64,
    /// Size of state that each pass returns in a new buffer; `None` if all of it is updated in place.
    pub kv_grows: Option<GrowingState>,
    /// Filled part of state that is updated in place, which is what is copied if the state is kept on the host; `None` if all of it is
    /// copied.
    pub kv_filled: Option<FilledState>,
    /// Activations in a prefill pass where weights are inputs of a session, bytes.
    pub workspace_bytes: u64,
    /// The part of `workspace_bytes` for values that depend on weights alone, such as the transposed embedding that a head multiplies with.
    /// If weights are constants of a session, ONNX Runtime computes these values when it creates the session (constant folding), and passes
    /// do not need this part.
    pub folded_bytes: u64,
    /// The largest 16-bit weight of the block that host kernels compute in 32 bits, bytes in 32 bits. ONNX Runtime widens it when it creates
    /// a session, and then packs it or writes it to a file: either takes its size once more.
    pub widened_bytes: u64,
    /// Bytes that a session on the host holds for the block beside packed weights, also where weights are read from disk.
    pub session_bytes: u64,
    /// Additional bytes of a prefill pass on the host, whose attention kernels write the scores of all tokens of the pass to
    /// memory.
    pub score_bytes: u64,
    /// Bytes of the tensors that enter the block, for one token.
    pub boundary_bytes: u64,
    /// Number of tensors that enter the block. Each is copied separately if the block before is on another device. Shape tensors are
    /// always on the host and do not count.
    pub boundary_tensors: u64,
    /// Work of one decoded token at the planned context.
    pub decode: Work,
    /// Work of one prefill pass of the planned prompt.
    pub prefill: Work,
}

impl BlockSpec {
    /// The activations of a block with this placement in host memory, bytes.
    pub fn host_workspace(&self, placement: BlockPlacement) -> u64 {
        match (placement.prefill, placement.decode) {
            (Placement::Cpu, _) => self.pass_workspace().saturating_add(self.score_bytes),
            (_, Placement::Cpu) => self.pass_workspace(),
            _ => 0,
        }
    }

    /// Bytes of the values that a session computes from the block's weights when it is created: half of `folded_bytes`,
    /// which counts them twice, like all activations.
    pub fn folded_once(&self) -> u64 {
        self.folded_bytes / 2
    }

    /// Activations of a pass where weights are constants, without scores, bytes.
    pub(crate) fn pass_workspace(&self) -> u64 {
        self.workspace_bytes.saturating_sub(self.folded_bytes)
    }
}

/// Size in bytes of state that grows from pass to pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrowingState {
    /// Size without tokens.
    pub fixed: u64,
    /// Additional bytes of each token.
    pub token: u64,
}

/// Size in bytes of state of which only the filled part is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilledState {
    /// Bytes that are always copied.
    pub fixed: u64,
    /// Additional bytes of each token.
    pub token: u64,
    /// Capacity in tokens.
    pub capacity: u64,
}

impl FilledState {
    /// Bytes to copy with this many tokens in the state.
    pub fn bytes(self, tokens: u64) -> u64 {
        self.fixed.saturating_add(self.token.saturating_mul(state_tokens(tokens, self.capacity)))
    }
}

/// The weights of a block that is streamed to a GPU: some are copied in every pass, others stay there as constants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Streamed {
    /// Bytes of each weight that a slot for the block holds, largest first: the copied weights of the block, or of the partition that it is
    /// always a part of.
    pieces: Vec<u64>,
    /// Sum of the block's copied weights.
    bytes: u64,
    /// Constants, as (key, bytes). Blocks with the same key share all their constants.
    constants: Option<(u32, u64)>,
}

impl Streamed {
    /// Weights of these sizes are copied; `constants` stay, and blocks with the same key share them.
    pub fn new(mut pieces: Vec<u64>, constants: Option<(u32, u64)>) -> Self {
        pieces.sort_unstable_by(|a, b| b.cmp(a));
        Streamed { bytes: pieces.iter().fold(0, |sum, piece| sum.saturating_add(*piece)), pieces, constants }
    }

    /// One copied weight of this size.
    pub fn whole(bytes: u64) -> Self {
        Streamed::new(vec![bytes], None)
    }

    /// The block is always part of a partition that takes this slot.
    pub fn set_slot(&mut self, of_partition: &Streamed) {
        self.pieces.clone_from(&of_partition.pieces);
    }

    /// Bytes of a slot for the block, at least.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.pieces.iter().fold(0, |sum, piece| sum.saturating_add(*piece))
    }

    /// Bytes copied in every pass.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Constants that stay on the GPU, in the format of [`BlockSpec::weights`].
    pub(crate) fn constants(&self) -> &[(u32, u64)] {
        self.constants.as_slice()
    }
}

/// Bytes of a slot that holds any one of these blocks: the i-th piece is as large as the largest i-th piece of any block.
pub fn slot<'a>(blocks: impl IntoIterator<Item = &'a BlockSpec>) -> u64 {
    let mut slot: Vec<u64> = Vec::new();
    for pieces in blocks.into_iter().map(|block| &block.streamed.pieces) {
        // Skips blocks equal to the slot, which most blocks are.
        if *pieces != slot {
            slot.resize(slot.len().max(pieces.len()), 0);
            slot.iter_mut().zip(pieces).for_each(|(size, piece)| *size = *piece.max(size));
        }
    }
    slot.iter().fold(0, |sum, piece| sum.saturating_add(*piece))
}

/// The kind of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockRole {
    /// Token ids to hidden states.
    Embedding,
    /// A repeated layer, by index.
    Layer(u32),
    /// Hidden states to logits.
    Head,
    /// A piece of a model without repeated layers.
    Other,
}

/// Floating-point operations and bytes read from memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Floating-point operations (a multiply-add counts as two).
    pub flops: u64,
    /// Bytes of weights and state that are read.
    pub bytes: u64,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{Budget, Contention, Cost, GpuCosts, Problem, Workload};

    /// A dense decoder: embedding, `layers` equal layers, head. Weights in units of one byte per `scale`.
    pub fn dense(layers: u32, scale: u64) -> Vec<BlockSpec> {
        let block = |label: String, kind, key: u32, weights: u64, kv: u64| BlockSpec {
            label,
            kind,
            weights: vec![(key, weights)],
            streamed: Streamed::whole(weights),
            experts: None,
            kept_on_host: false,
            assigned: None,
            needs_gpu: false,
            kv_bytes: kv,
            kv_tensors: 2,
            kv_grows: None,
            kv_filled: None,
            workspace_bytes: scale / 10,
            folded_bytes: 0,
            widened_bytes: 0,
            session_bytes: 0,
            score_bytes: 0,
            boundary_bytes: 8,
            boundary_tensors: 1,
            decode: Work { flops: 2 * weights, bytes: weights + kv },
            prefill: Work { flops: 200 * weights, bytes: weights },
        };
        let mut blocks = vec![block("embedding".into(), BlockRole::Embedding, 0, 2 * scale, 0)];
        blocks[0].decode = Work::default();
        for i in 0..layers {
            blocks.push(block(format!("layers.{i}"), BlockRole::Layer(i), i + 1, scale, scale / 4));
        }
        blocks.push(block("head".into(), BlockRole::Head, layers + 1, 2 * scale, 0));
        blocks
    }

    /// These blocks on a host with 30 GB/s and equal GPUs with 450 GB/s, one for each entry of the budget.
    pub fn problem(blocks: Vec<BlockSpec>, budget: Budget) -> Problem {
        let costs = |bytes_per_ms: f64| -> Vec<Cost> {
            let cost = |block: &BlockSpec| Cost {
                decode_ms: block.decode.bytes as f64 / bytes_per_ms,
                short_pass_ms: vec![],
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
            pass_overhead_ms: 0.0,
            disk_bytes_per_ms: None,
            disk_contention: Contention::NONE,
            decompression: None,
            load: Workload { batch: 1, sequences: 1, prompt_tokens: 1, new_tokens: 1, passes: vec![1] },
            row_batching: crate::RowBatching::Never,
            expert_hits: vec![],
            cuts: vec![],
            blocks,
            budget,
        }
    }
}
