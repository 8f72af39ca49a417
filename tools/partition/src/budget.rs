//! Memory budgets: the limits, what blocks need, and what to say when they do not fit.

use crate::{Block, Place};
use hpp_schema::ByteSize;
use std::collections::BTreeSet;

/// The limits a placement keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Device memory of each GPU, bytes; empty when there is none.
    pub vram: Vec<u64>,
    /// Host memory, bytes, where a limit was asked for.
    pub ram: Option<u64>,
    /// Part of it that the process takes for itself, bytes.
    pub process: u64,
    /// Device memory left unused on each GPU, bytes.
    pub margin: u64,
    /// Where state lies.
    pub kv: KvHome,
    /// Host memory that reading ahead takes where weights are read from disk, bytes.
    pub reading: u64,
    /// What weights take on the host once its kernels have packed them, and how much of that is read from disk.
    pub packing: Packing,
}

/// How weights lie in host memory as its kernels want them, and on disk, where they may lie more densely: some
/// numbers are made when the others arrive (sums from scales), some are widened (16-bit numbers that memory wants in
/// 32). Nothing of it by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// What weights take beyond their bytes in the model: so many bytes for each 1000.
    pub more: u64,
    /// Of 1000 bytes as packed, those made when weights arrive from disk.
    pub made: u64,
    /// Read from disk for each 1000 bytes that are made.
    pub stored: u64,
}

impl Packing {
    /// What these bytes of the model take when packed. Rounded up, so that sums of bytes fit as packed where they fit
    /// in numbers without rounding.
    pub fn packed(self, bytes: u64) -> u64 {
        let more = (u128::from(bytes) * u128::from(self.more)).div_ceil(1000);
        bytes.saturating_add(u64::try_from(more).unwrap_or(u64::MAX))
    }

    /// Packed bytes for each byte of the model.
    pub(crate) fn growth(self) -> f64 {
        1.0 + self.more as f64 / 1000.0
    }

    /// The part of packed weights that is made.
    pub(crate) fn made_share(self) -> f64 {
        self.made.min(1000) as f64 / 1000.0
    }

    /// The part of what is made that is not read.
    pub(crate) fn unread_share(self) -> f64 {
        1.0 - self.stored.min(1000) as f64 / 1000.0
    }
}

impl Budget {
    /// Host memory for blocks, bytes, where there is a limit.
    pub fn host(&self) -> Option<u64> {
        self.ram.map(|ram| ram.saturating_sub(self.process))
    }
}

/// Where the state of a GPU's blocks lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvHome {
    /// On the device that computes.
    #[default]
    Device,
    /// On the host; the device holds one block's at a time.
    Host,
}

/// What a set of blocks needs on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Weights, each counted once.
    pub weights: u64,
    /// State.
    pub kv: u64,
    /// Activations: the largest block's, because blocks run one after another.
    pub workspace: u64,
    /// Slots for streamed weights.
    pub ring: u64,
}

impl Demand {
    /// What these blocks need together.
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

    /// All of it.
    pub fn total(self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.workspace).saturating_add(self.ring)
    }
}

/// A placement does not fit, with the numbers a person needs to mend it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{place} needs {} but may use {}: weights {}, KV {}, workspace {}, {}{} {}",
    ByteSize(demand.total().saturating_add(*margin)).human(), ByteSize(*budget).human(), ByteSize(demand.weights).human(),
    ByteSize(demand.kv).human(), ByteSize(demand.workspace).human(), ring(demand), unused(*place), ByteSize(*margin).human()
)]
pub struct NoFit {
    /// The device that is too small.
    pub place: Place,
    /// What the blocks placed there need.
    pub demand: Demand,
    /// What may be used.
    pub budget: u64,
    /// Part of the budget that blocks may not use: the margin of a GPU, the process itself on the host.
    pub margin: u64,
}

fn unused(place: Place) -> &'static str {
    match place {
        Place::Cpu => "the process itself",
        Place::Gpu(_) => "margin",
    }
}

/// The slots of a ring, where there is one.
fn ring(demand: &Demand) -> String {
    if demand.ring == 0 { String::new() } else { format!("slots {}, ", ByteSize(demand.ring).human()) }
}

impl NoFit {
    /// Refuses a demand beyond what may be used.
    pub(crate) fn unless(place: Place, demand: Demand, budget: u64, margin: u64) -> Result<(), NoFit> {
        match demand.total().saturating_add(margin) > budget {
            true => Err(NoFit { place, demand, budget, margin }),
            false => Ok(()),
        }
    }

    /// The smallest budget of this device under which this placement fits, bytes.
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
