//! Memory budgets: the limits, the demand of blocks, and the error if the demand exceeds a limit.

use crate::{Block, Place};
use hpp_schema::ByteSize;
use std::collections::BTreeSet;

/// The memory limits of a placement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Device memory of each GPU, bytes.
    pub vram: Vec<u64>,
    /// Host memory, bytes; `None` if unlimited.
    pub ram: Option<u64>,
    /// The part of `ram` that the process itself uses, bytes.
    pub process: u64,
    /// Device memory left unused on each GPU, bytes.
    pub margin: u64,
    /// Where the state of GPU blocks is kept.
    pub kv: KvHome,
    /// Host memory for read-ahead buffers if weights are read from disk, bytes.
    pub reading: u64,
    /// The size of weights in host memory after packing, and on disk.
    pub packing: Packing,
}

/// Ratios between the size of weights in the model, in host memory after packing for the kernels, and in the compressed file on
/// disk. The compressed file omits numbers that can be computed (block sums) and stores some in 16 instead of 32 bits. The default is
/// no packing and no compression.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// Additional bytes of packed weights for each 1000 bytes in the model.
    pub more: u64,
    /// Bytes that are decompressed, of each 1000 packed bytes.
    pub made: u64,
    /// Bytes read from disk for each 1000 decompressed bytes.
    pub stored: u64,
}

impl Packing {
    /// The packed size of this many bytes of the model, rounded up.
    pub fn packed(self, bytes: u64) -> u64 {
        let more = (u128::from(bytes) * u128::from(self.more)).div_ceil(1000);
        bytes.saturating_add(u64::try_from(more).unwrap_or(u64::MAX))
    }

    /// Packed bytes per byte of the model.
    pub(crate) fn growth(self) -> f64 {
        1.0 + self.more as f64 / 1000.0
    }

    /// The part of packed weights that is decompressed.
    pub(crate) fn made_share(self) -> f64 {
        self.made.min(1000) as f64 / 1000.0
    }

    /// The part of decompressed bytes that is not read from disk.
    pub(crate) fn unread_share(self) -> f64 {
        1.0 - self.stored.min(1000) as f64 / 1000.0
    }
}

impl Budget {
    /// Host memory available to blocks, bytes; `None` if unlimited.
    pub fn host(&self) -> Option<u64> {
        self.ram.map(|ram| ram.saturating_sub(self.process))
    }
}

/// Where the state of a GPU's blocks is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvHome {
    /// On the device that computes.
    #[default]
    Device,
    /// On the host; the device holds the state of one block at a time.
    Host,
}

/// The memory that a set of blocks needs on one device, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Weights; a shared weight counts once.
    pub weights: u64,
    /// State.
    pub kv: u64,
    /// Activations of the largest block, because blocks run one after another.
    pub workspace: u64,
    /// Ring buffer for streamed weights.
    pub ring: u64,
}

impl Demand {
    /// The demand of these blocks.
    pub fn of<'a>(blocks: impl IntoIterator<Item = &'a Block>) -> Demand {
        let mut seen = BTreeSet::new();
        let mut demand = Demand::default();
        for block in blocks {
            demand.weights += block.weights.iter().filter(|(key, _)| seen.insert(*key)).map(|(_, b)| b).sum::<u64>();
            demand.kv += block.kv_bytes;
            demand.workspace = demand.workspace.max(block.workspace_bytes);
        }
        demand
    }

    /// The sum.
    pub fn total(self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.workspace).saturating_add(self.ring)
    }
}

/// A placement exceeds a memory budget.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{place} needs {} but may use {}: weights {}, KV {}, workspace {}, {}{} {}",
    ByteSize(demand.total().saturating_add(*margin)).human(), ByteSize(*budget).human(), ByteSize(demand.weights).human(),
    ByteSize(demand.kv).human(), ByteSize(demand.workspace).human(), ring(demand), unused(*place), ByteSize(*margin).human()
)]
pub struct NoFit {
    /// The device that is too small.
    pub place: Place,
    /// The demand of the blocks on it.
    pub demand: Demand,
    /// Its budget, bytes.
    pub budget: u64,
    /// The part of the budget that blocks may not use: a GPU's margin, or the process itself on the host.
    pub margin: u64,
}

fn unused(place: Place) -> &'static str {
    match place {
        Place::Cpu => "the process itself",
        Place::Gpu(_) => "margin",
    }
}

/// The ring buffer's part of the message; empty without one.
fn ring(demand: &Demand) -> String {
    if demand.ring == 0 { String::new() } else { format!("slots {}, ", ByteSize(demand.ring).human()) }
}

impl NoFit {
    /// Fails if the demand and the margin exceed the budget.
    pub(crate) fn unless(place: Place, demand: Demand, budget: u64, margin: u64) -> Result<(), NoFit> {
        match demand.total().saturating_add(margin) > budget {
            true => Err(NoFit { place, demand, budget, margin }),
            false => Ok(()),
        }
    }

    /// The smallest budget of this device with which the placement fits, bytes.
    pub fn smallest(&self) -> u64 {
        self.demand.total().saturating_add(self.margin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::tests::dense;

    #[test]
    fn packed_bytes_round_up() {
        let packing = Packing { more: 125, ..Packing::default() };
        assert_eq!([0, 1, 8, 1000].map(|bytes| packing.packed(bytes)), [0, 2, 9, 1125]);
        assert_eq!([1, u64::MAX].map(|bytes| Packing::default().packed(bytes)), [1, u64::MAX]);
        assert_eq!(packing.packed(u64::MAX), u64::MAX);
    }

    #[test]
    fn shared_weights_count_once_per_device() {
        let mut blocks = dense(2, 1000);
        let last = blocks.len() - 1;
        blocks[last].weights = vec![(0, 2000)];
        assert_eq!(Demand::of(&blocks).weights, 2000 + 2 * 1000);
        assert_eq!(Demand::of(&blocks[1..]).weights, 2000 + 2 * 1000);
    }
}
