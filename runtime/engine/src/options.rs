//! How to load and run a plan, where the plan leaves it to the user.

use crate::cancel::CancelHandle;
use crate::port::Fallback;

/// How to load a plan.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// What to do when a provider is unavailable.
    pub fallback: Fallback,
    /// Another context than the plan's, in tokens, up to the model's.
    pub context: Option<u64>,
    /// How closely files are verified.
    pub verify: Verify,
    /// Sequences to keep room for; the plan's `batch` if `None`. What their states take of a memory budget is not there for weights.
    pub sequences: Option<u64>,
    /// Bytes of a host memory limit to leave for the caller: what a cache of KV pages takes is not there for weights and states.
    pub reserved: u64,
    /// Whether the next tokens of several sequences are computed as rows of one run.
    pub row_batching: RowBatching,
    /// When weights that do not stay in memory are read.
    pub weights: WeightReads,
    /// Most host memory to pin for copies to devices, bytes; as much as they can use if `None`.
    pub pinned: Option<u64>,
    /// For tests: uses slots on the host where a device is unavailable, instead of running the host's file.
    pub slots_on_host: bool,
    /// For tests: fills each slot with ones, which are NaN in floating point, before weights are copied there.
    pub poison_slots: bool,
    /// A handle made before loading, so that loading can be cancelled too. Without one the engine makes its own.
    pub cancel: Option<CancelHandle>,
}

/// Whether the next tokens of several sequences are computed as rows of one run, which multiplies each matrix once for all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowBatching {
    /// Never.
    Off,
    /// Where that does not change a bit of the logits. Checked the first time with so many rows, for each doubling of the tokens.
    #[default]
    Exact,
    /// Also where sums round differently. Then what a sequence's tokens are may depend on how many others run.
    On,
}

/// When weights that do not stay in memory are read. All but the first exist for comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightReads {
    /// Ahead of the partition that needs them, while others compute.
    #[default]
    Prefetch,
    /// When their partition runs next.
    OnDemand,
    /// By page faults while it runs; the system decides what stays in memory.
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
