//! What a block costs: bytes it occupies, work it does per phase, and milliseconds under assumed rates.
//!
//! Knows shapes as numbers only. Rates are assumptions until a profile replaces them, and are labelled so in a plan.

use crate::Place;

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

/// How fast a machine is assumed to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Host memory bandwidth, bytes per second.
    pub cpu_bandwidth: f64,
    /// Host arithmetic, operations per second.
    pub cpu_flops: f64,
    /// Device memory bandwidth, bytes per second.
    pub gpu_bandwidth: f64,
    /// Device arithmetic, operations per second.
    pub gpu_flops: f64,
    /// Link between host and device, bytes per second.
    pub link_bandwidth: f64,
    /// Cost of starting a partition or a copy, milliseconds.
    pub launch_ms: f64,
}

impl Rates {
    /// A desktop with two-channel memory and a mid-range card on PCIe 4.0: round numbers that order placements
    /// correctly, not a promise.
    pub const ASSUMED: Rates = Rates {
        cpu_bandwidth: 30e9,
        cpu_flops: 200e9,
        gpu_bandwidth: 450e9,
        gpu_flops: 30e12,
        link_bandwidth: 20e9,
        launch_ms: 0.06,
    };

    /// Milliseconds for `work` at `place`: the longer of moving the bytes and doing the arithmetic (the roofline).
    pub fn ms(&self, work: Work, place: Place) -> f64 {
        let (bandwidth, flops) = match place {
            Place::Cpu => (self.cpu_bandwidth, self.cpu_flops),
            Place::Gpu(_) => (self.gpu_bandwidth, self.gpu_flops),
        };
        1e3 * (work.bytes as f64 / bandwidth).max(work.flops as f64 / flops)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

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

    #[test]
    fn the_longer_of_bytes_and_flops_decides() {
        let rates = Rates { cpu_bandwidth: 1e9, cpu_flops: 1e9, ..Rates::ASSUMED };
        assert_eq!(rates.ms(Work { flops: 1_000_000, bytes: 2_000_000 }, Place::Cpu), 2.0);
        assert_eq!(rates.ms(Work { flops: 3_000_000, bytes: 2_000_000 }, Place::Cpu), 3.0);
    }
}
