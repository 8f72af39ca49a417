//! What the two ways to stream weights have in common: direct reads ([`super::direct`]) and pages of a mapping ([`super::paged`]).

use hpp_engine::BackendError;
use hpp_engine::port::{ChunkSize, Interval};
use std::io;
use std::ops::Range;
use std::time::Duration;

/// Weights of a session, some locked in memory and the rest in chunks that are read before each run. Must be dropped before the session.
pub(crate) trait ReadBeforeRuns {
    /// The size of each chunk: those that every run needs, then those of experts.
    fn bytes(&self) -> &[ChunkSize];

    /// The chunks of each expert; empty if every run needs all chunks.
    fn experts(&self) -> &[Range<usize>];

    /// Which experts the next run uses.
    fn select_experts(&mut self, experts: &[u32]);

    /// Starts to read a chunk.
    fn prefetch(&mut self, chunk: usize) -> Result<(), BackendError>;

    /// Waits for a chunk; returns how long ago its read began and ended.
    fn wait(&mut self, chunk: usize) -> Result<(Duration, Duration), BackendError>;

    /// Evicts all chunks but those of experts.
    fn release(&mut self);

    /// Evicts a chunk of an expert.
    fn evict(&mut self, chunk: usize);

    /// Refuses a run that would compute without weights that it needs.
    fn check(&self) -> Result<(), BackendError>;

    /// Locks at most `locked` bytes from now on, and evicts all chunks. Weights with experts stay as they are.
    fn relock(&mut self, locked: u64) -> io::Result<()>;
}

/// Weights of a session whose pages this crate manages in place of ONNX Runtime's mappings.
pub(super) struct ManagedWeights {
    pub weights: Box<dyn ReadBeforeRuns>,
    /// Why the system refused to lock weights in memory, if it did: the system may then swap or evict them.
    pub lock_error: Option<io::Error>,
}

/// When a chunk was read, by the clock `now`.
pub(super) fn interval((began, ended): (Duration, Duration), now: impl Fn() -> Duration) -> Interval {
    let now = now();
    Interval { start: now.saturating_sub(began), end: now.saturating_sub(ended) }
}
