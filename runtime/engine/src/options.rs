//! How to load and run a plan, where the plan leaves it to the person.

use crate::cancel::CancelHandle;
use crate::port::Fallback;

/// How to load a plan.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// What to do when a provider is not to be had.
    pub fallback: Fallback,
    /// Another context than the plan's, in tokens. Only what the model was built for is possible.
    pub context: Option<u64>,
    /// How closely files are compared with the plan.
    pub verify: Verify,
    /// When weights that are not kept in memory are read.
    pub weights: WeightReads,
    /// Host memory that may be pinned for copies to devices, bytes; as much as they can use where nothing is said.
    pub pinned: Option<u64>,
    /// For tests: streams to the host where a device is not to be had, instead of running its file for the host.
    pub slots_on_host: bool,
    /// For tests: overwrites each slot with all ones, which in floating point is no number, before weights are copied there.
    pub poison_slots: bool,
    /// A handle made before loading, so that loading can be stopped too. Without one the engine makes its own.
    pub cancel: Option<CancelHandle>,
}

/// When weights that are not kept in memory are read. All but the first are there to compare with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightReads {
    /// Ahead of the partition that needs them, while others compute.
    #[default]
    Ahead,
    /// When their partition is about to run.
    OnTime,
    /// Page by page while it runs, the system deciding what stays in memory.
    ByTheSystem,
}

/// How closely files are compared with what the plan recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Every byte where that takes a fraction of a second, or where a file is not known to be as it was when every byte was
    /// compared last; else length and a hash of samples, which takes milliseconds.
    #[default]
    Default,
    /// Every byte of every file whose whole hash the plan has, and samples of the others.
    Full,
}
