//! How a loaded plan runs.

use clap::ValueEnum;

/// What may change while a plan runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum AdaptArg {
    /// Nothing.
    Off,
    /// What changes no token.
    #[default]
    Exact,
    /// Also where tokens are computed.
    Devices,
}

/// `--weights`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum WeightReadsArg {
    /// While other partitions compute.
    #[default]
    #[value(alias = "ahead")]
    Prefetch,
    /// When their partition is about to run.
    #[value(alias = "on-time")]
    OnDemand,
    /// Page by page from memory-mapped files; the operating system decides which pages stay in memory.
    Mapped,
}
