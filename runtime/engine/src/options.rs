//! Options for loading and running a plan: everything that the plan leaves to the user.

use crate::cancel::CancelHandle;
use crate::port::Fallback;
use std::path::PathBuf;

/// How to load a plan.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// What to do when a provider is unavailable.
    pub fallback: Fallback,
    /// Another context than the plan's, in tokens, up to the model's.
    pub context: Option<u64>,
    /// How closely files are verified.
    pub verify: Verify,
    /// Sequences whose states get memory; the plan's `batch` if `None`. Their bytes of a memory budget are not available for weights.
    pub sequences: Option<u64>,
    /// Bytes of the host memory limit that are reserved for the caller, such as for a cache of KV pages.
    pub reserved: u64,
    /// Further bytes reserved for the caller for each sequence that fits, such as for its state in a draft model.
    pub reserved_per_sequence: u64,
    /// Bytes of host memory that other engines of this process take. The plan's limit does not count them.
    pub others: u64,
    /// The directory for states that the plan keeps on disk; the plan's if `None`.
    pub state_dir: Option<PathBuf>,
    /// Whether the next tokens of several sequences are computed as rows of one run.
    pub row_batching: RowBatching,
    /// When weights that do not stay in memory are read.
    pub weights: WeightReads,
    /// Whether the weights that the plan keeps in host memory are locked there, because the memory limit of another engine counts them.
    pub lock_weights: bool,
    /// Most host memory to pin for copies to devices, bytes; as much as they can use if `None`.
    pub pinned: Option<u64>,
    /// For tests: uses slots on the host where a device is unavailable, instead of running the host's file.
    pub slots_on_host: bool,
    /// For tests: fills each slot with ones, which are NaN in floating point, before weights are copied there.
    pub poison_slots: bool,
    /// A handle that also cancels loading. Without one the engine makes its own.
    pub cancel: Option<CancelHandle>,
}

/// Whether the next tokens of several sequences are computed as rows of one run, which multiplies each matrix once for all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowBatching {
    /// Never.
    Off,
    /// Where that does not change a bit of the logits. Checked for each number of rows when it first occurs, and again for each doubling
    /// of the tokens; in several passes if values are rounded to 16 bits, which hides differences.
    #[default]
    Exact,
    /// Also where sums round differently: a sequence's tokens may then depend on the number of other sequences.
    On,
}

/// When weights that do not stay in memory are read. All but the first exist for comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightReads {
    /// Ahead of the partition that needs them, while others compute.
    #[default]
    Prefetch,
    /// When their partition is the next to run.
    OnDemand,
    /// By page faults while the partition runs; the operating system decides which pages stay in memory.
    Mapped,
}

/// How closely files are verified against what the plan recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// The full hash where that takes a fraction of a second, or where a file has changed since it was last verified; else length
    /// and a hash of samples, which takes milliseconds.
    #[default]
    Default,
    /// The full hash of every file whose full hash the plan has, and samples of the others.
    Full,
}
