//! Ports for weights that are not constants in the memory of their session: streamed from disk, or copied to a device.

use super::{Interval, Timing, TimingToken};
use crate::error::BackendError;
use std::ops::Range;
use std::path::PathBuf;

/// Where a session's constants are on the host while it does not run; for a GPU's session, where they would be if it fell back to the host. Weights
/// in slots are not constants: the device tier manages them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum WeightResidency {
    /// Where ONNX Runtime puts them.
    #[default]
    InMemory,
    /// Some locked in memory ([`WeightPager::lock_and_stream`]), the rest on disk and read before each run.
    ReadFromDisk,
    /// Mapped from their file; the system loads the pages that a run touches.
    Mapped {
        /// Whether a run touches a few rows only (an embedding table), so that their pages are dropped after the run.
        sparse_rows: bool,
    },
}

/// Bytes of weights that are fetched as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkSize {
    /// Bytes in memory.
    pub resident: u64,
    /// Bytes on disk; fewer than `resident` where they are stored compressed.
    pub stored: u64,
}

/// Weights of a session that hold the experts of a mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertWeights<'a> {
    /// Their names in the session's file. Either each weight holds one slice for each expert, or each expert has the same number of weights of its
    /// own (`are_apart`): those of the first expert come first, then those of the second.
    pub names: &'a [String],
    /// How many experts there are; the slices of a weight follow each other and have the same size.
    pub count: usize,
    /// Whether each expert has weights of its own.
    pub are_apart: bool,
}

/// The weights of one session that lie on disk between its runs.
///
/// Every session has one; for weights that stay in memory all methods do nothing. It may outlive the session's other handles.
pub trait WeightPager {
    /// Whether the weights need no management: no run needs a fetch or a release.
    fn is_unmanaged(&self) -> bool;
    /// Whether warm-up runs before [`lock_and_stream`](Self::lock_and_stream) would show which weights runs read at all.
    fn wants_warm_up(&self) -> bool {
        false
    }
    /// After a run: if the weights are still mapped from their files, as during warm-up, records which pages it touched, and drops them.
    fn record_touched_pages(&mut self) {}
    /// For streamed weights: reads and locks up to `locked` bytes of them and drops the others. Until then the system loads pages
    /// as runs touch them. Returns a warning for the user, if there is one. It may be called again between two runs while no chunk is in memory:
    /// then it locks `locked` bytes instead of the earlier number, and the chunks change. Weights with experts stay as they are.
    fn lock_and_stream(&mut self, _locked: u64) -> Result<Option<String>, BackendError> {
        Ok(None)
    }
    /// The chunks that must be fetched before each run, followed by those of [`experts`](Self::experts); none where all weights stay in
    /// memory.
    fn chunks(&self) -> &[ChunkSize] {
        &[]
    }
    /// For each expert the chunks that hold it, and no other expert; empty if runs need all chunks. A run needs the chunks of
    /// selected experts only.
    fn experts(&self) -> &[Range<usize>] {
        &[]
    }
    /// Sets which experts the next run uses. The run is refused unless they are in memory.
    fn select_experts(&mut self, _experts: &[u32]) {}
    /// Evicts a chunk of an expert, even while it is still being read.
    fn evict(&mut self, _chunk: usize) {}
    /// Starts to read a chunk and returns at once. The chunk takes its memory from this call on.
    fn prefetch(&mut self, _chunk: usize) -> Result<(), BackendError> {
        Ok(())
    }
    /// Waits until a chunk is in memory; returns the interval of its read.
    fn wait(&mut self, _chunk: usize) -> Result<Interval, BackendError> {
        Ok(Interval::default())
    }
    /// Evicts all chunks except those of experts, also while they are still being read, and the pages of mapped weights that a run touched.
    fn release(&mut self) {}
}

/// A weight that is an input of a session: where its bytes are on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightLocation {
    /// The file.
    pub file: PathBuf,
    /// Offset of its first byte.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// How the host keeps weights that are copied to a device: some in pinned memory, the rest in their files, cached by the system unless
/// `bypass_page_cache`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostCopy {
    /// Most bytes in pinned memory.
    pub pinned: u64,
    /// Whether reads bypass the page cache.
    pub bypass_page_cache: bool,
}

/// The result of an upload that later runs can rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uploaded {
    /// When they were copied.
    pub copy: Timing,
    /// How long the device waited for the copy, where the caller did not wait.
    pub stall: Option<TimingToken>,
}
