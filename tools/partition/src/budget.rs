//! Memory budgets: the limits, the demand of blocks, and the error if the demand exceeds a limit.

use crate::{BlockSpec, DeviceId};
use hpp_schema::ByteSize;
use std::collections::BTreeSet;

/// The memory limits of a placement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Device memory of each GPU, bytes.
    pub vram: Vec<u64>,
    /// Host memory, bytes; `None` if unlimited.
    pub ram: Option<u64>,
    /// The part of `ram` that the process uses apart from weights, state and workspace, bytes.
    pub process: u64,
    /// Device memory left unused on each GPU, bytes.
    pub margin: u64,
    /// Whether the runtime may start to stream blocks that are resident on a GPU: then a slot of that GPU's ring has room
    /// for each of them too.
    pub movable: bool,
    /// Where the state of GPU blocks is kept between passes.
    pub kv: KvHome,
    /// Whether state on the host lies on disk, and in memory only around the runs that use it.
    pub host_kv_on_disk: bool,
    /// Host memory for read-ahead buffers if weights are read from disk, bytes.
    pub read_ahead: u64,
    /// Host memory that the runtime leaves free beside locked weights if other weights are read from disk, bytes. A placement that fits only
    /// without it still fits: then fewer weights are locked.
    pub reserve: u64,
    /// Sizes of weights in host memory after packing, and on disk.
    pub packing: Packing,
}

/// Ratios between the size of weights in the model, in host memory after packing for the kernels, and in the compressed file on
/// disk. The compressed file omits numbers that can be computed (block sums), and stores some in 16 instead of 32 bits. The default is
/// no packing and no compression.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// Additional bytes of packed weights for each 1000 bytes in the model.
    pub growth_permille: u64,
    /// Bytes that are decompressed, of each 1000 packed bytes.
    pub decompressed_permille: u64,
    /// Bytes read from disk for each 1000 decompressed bytes.
    pub read_permille: u64,
}

/// The cost of decompressing weights that were read from disk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decompression {
    /// Uncompressed bytes per millisecond of all decompressing threads together.
    pub bytes_per_ms: f64,
    /// The share of the host's compute that these threads take while they decompress, 0 to 1.
    pub host_share: f64,
}

impl Packing {
    /// The packed size of this many bytes of the model, rounded up.
    pub fn packed(self, bytes: u64) -> u64 {
        let growth = (u128::from(bytes) * u128::from(self.growth_permille)).div_ceil(1000);
        bytes.saturating_add(u64::try_from(growth).unwrap_or(u64::MAX))
    }

    /// The bytes of the model whose packed size is `packed`, rounded up.
    pub fn unpacked(self, packed: u64) -> u64 {
        let bytes = (u128::from(packed) * 1000).div_ceil(u128::from(1000 + self.growth_permille));
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// Packed bytes per byte of the model.
    pub(crate) fn growth_factor(self) -> f64 {
        1.0 + self.growth_permille as f64 / 1000.0
    }

    /// The share of packed weights that is decompressed, 0 to 1.
    pub(crate) fn decompressed_share(self) -> f64 {
        self.decompressed_permille.min(1000) as f64 / 1000.0
    }

    /// The share of decompressed bytes that is not read from disk, 0 to 1.
    pub(crate) fn unread_share(self) -> f64 {
        1.0 - self.read_permille.min(1000) as f64 / 1000.0
    }
}

impl Budget {
    /// Host memory available to blocks, bytes; `None` if unlimited.
    pub fn host(&self) -> Option<u64> {
        self.ram.map(|ram| ram.saturating_sub(self.process))
    }
}

/// Where the state of a GPU's blocks is kept between passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvHome {
    /// On the GPU that computes the block.
    #[default]
    Device,
    /// On the host. The GPU holds the state of the block that it computes and, copied ahead, the state of the next block.
    Host,
}

/// The memory that a set of blocks needs on one device, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Weights; a shared weight counts once.
    pub weights: u64,
    /// State (KV caches).
    pub kv: u64,
    /// Activations of the largest block, because blocks run one after another.
    pub workspace: u64,
    /// Slot ring of streamed weights.
    pub ring: u64,
}

impl Demand {
    /// The demand of these blocks.
    pub fn of<'a>(blocks: impl IntoIterator<Item = &'a BlockSpec>) -> Demand {
        let mut seen = BTreeSet::new();
        let mut demand = Demand::default();
        for block in blocks {
            demand.weights += block.weights.iter().filter(|(key, _)| seen.insert(*key)).map(|(_, b)| b).sum::<u64>();
            demand.kv += block.kv_bytes;
            demand.workspace = demand.workspace.max(block.workspace_bytes);
        }
        demand
    }

    /// The part of the demand that a shorter context reduces: state, and activations, because masks and scores depend on the context, and a
    /// pass is no longer than the context.
    pub fn of_context(self) -> u64 {
        self.kv.saturating_add(self.workspace)
    }

    /// The sum.
    pub fn total(self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.workspace).saturating_add(self.ring)
    }
}

/// A placement exceeds a memory budget.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{device} needs {} but may use {}: weights {}, state {}, workspace {}, {}{}{} {}",
    ByteSize(demand.total().saturating_add(*margin)).human_rounded_up(), ByteSize(*budget).human_rounded_down(),
    ByteSize(demand.weights).human(),
    ByteSize(demand.kv).human(), ByteSize(demand.workspace).human(), part("slot ring", demand.ring), part("draft", *draft),
    reserve_label(*device), ByteSize(margin.saturating_sub(*draft)).human()
)]
pub struct OverBudget {
    /// The device that is too small.
    pub device: DeviceId,
    /// The demand of the blocks on it.
    pub demand: Demand,
    /// Its budget, bytes.
    pub budget: u64,
    /// The part of the budget that blocks may not use, bytes: a GPU's margin, or the host memory that the process needs apart
    /// from blocks.
    pub margin: u64,
    /// The part of `margin` that a draft model takes, bytes.
    pub draft: u64,
}

/// The name of what [`OverBudget::margin`] counts on this device, without a draft model.
fn reserve_label(device: DeviceId) -> &'static str {
    match device {
        DeviceId::Cpu => "process",
        DeviceId::Gpu(_) => "margin",
    }
}

/// A part of the message; empty for no bytes.
fn part(name: &str, bytes: u64) -> String {
    if bytes == 0 { String::new() } else { format!("{name} {}, ", ByteSize(bytes).human()) }
}

impl OverBudget {
    /// Fails if the demand and the margin exceed the budget.
    pub(crate) fn check(device: DeviceId, demand: Demand, budget: u64, margin: u64) -> Result<(), OverBudget> {
        match demand.total().saturating_add(margin) > budget {
            true => Err(OverBudget { device, demand, budget, margin, draft: 0 }),
            false => Ok(()),
        }
    }

    /// What the budget lacks, bytes.
    pub fn missing(&self) -> u64 {
        self.required_budget().saturating_sub(self.budget)
    }

    /// The smallest budget of this device within which the placement fits, bytes.
    pub fn required_budget(&self) -> u64 {
        self.demand.total().saturating_add(self.margin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::tests::dense;

    #[test]
    fn packed_bytes_round_up() {
        let packing = Packing { growth_permille: 125, ..Packing::default() };
        assert_eq!([0, 1, 8, 1000].map(|bytes| packing.packed(bytes)), [0, 2, 9, 1125]);
        assert_eq!([1, u64::MAX].map(|bytes| Packing::default().packed(bytes)), [1, u64::MAX]);
        assert_eq!(packing.packed(u64::MAX), u64::MAX);
    }

    #[test]
    fn a_draft_has_its_own_part_of_the_message() {
        let demand = Demand { weights: 5 << 20, ..Demand::default() };
        let error = OverBudget { device: DeviceId::Cpu, demand, budget: 66 << 20, margin: 71 << 20, draft: 7 << 20 };
        let says =
            "cpu needs 76 MiB but may use 66 MiB: weights 5 MiB, state 0 B, workspace 0 B, draft 7 MiB, process 64 MiB";
        assert_eq!(error.to_string(), says);
        let alone = OverBudget { margin: 64 << 20, draft: 0, ..error };
        assert!(alone.to_string().ends_with("workspace 0 B, process 64 MiB"), "{alone}");
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
