//! The fallback for systems other than Linux: weights stay where ONNX Runtime put them, in memory or mapped from their file, and the system
//! decides which pages are resident. Replacing the pages of a mapping, which streaming needs, is Linux only. Reads that feed devices bypass the
//! file cache here too ([`direct`]).

#[path = "direct_elsewhere.rs"]
mod direct;

pub use direct::read_rate;
pub(super) use direct::{DirectFile, DirectReads};

use crate::loading::Loading;
use hpp_engine::port::{ChunkSize, ExpertWeights, Interval, Prepared, WeightResidency};
use hpp_engine::{BackendError, Reporter};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why weights cannot be streamed from disk on this system.
pub(crate) fn refusal() -> Option<String> {
    Some("weights are streamed from disk on Linux only, and the system decides which of them stay in memory".to_owned())
}
/// The graph of a prepared partition.
pub(crate) const MODEL: &str = "model.onnx";
/// Its weights.
pub(crate) const WEIGHTS: &str = "model.onnx.data";
/// Its weights as ONNX Runtime writes them.
pub(crate) const UNALIGNED: &str = "model.onnx.data";

/// Infinite: nothing is decompressed.
pub fn decompression_rate() -> f64 {
    f64::INFINITY
}

/// A mapping of weights; none is ever listed.
pub(crate) struct Mapping;

/// Does nothing.
pub(crate) fn forget(_: &[Mapping]) {}

/// The readers of all sessions; there are none.
#[derive(Clone, Default)]
pub(crate) struct DiskReaders;

/// Weights where ONNX Runtime put them.
pub(crate) struct SessionWeights;

/// Always empty.
pub(crate) fn mapped_under(_: &Path) -> std::io::Result<Vec<Mapping>> {
    Ok(Vec::new())
}

/// Creates a session and lists no mappings.
pub(crate) fn claim<T>(
    _: &Loading,
    _: &Path,
    make: impl FnOnce() -> Result<T, BackendError>,
) -> Result<(T, Vec<Mapping>), BackendError> {
    make().map(|made| (made, Vec::new()))
}

/// Creates a session and locks nothing.
pub(crate) fn claim_locked<T>(
    _: &Loading,
    _: &Path,
    make: impl FnOnce() -> Result<T, BackendError>,
) -> Result<T, BackendError> {
    make()
}

// It drops no pages either.
pub(crate) use self::claim_locked as claim_unread;

/// Where the weights of a session are.
#[derive(Default)]
#[expect(dead_code, reason = "streaming needs the mappings, their directory and the experts, and there is none")]
pub(crate) struct SessionMappings {
    /// Where the plan wants them between runs.
    pub residency: WeightResidency,
    /// Always empty.
    pub mappings: Vec<Mapping>,
    /// The directory of their files.
    pub dir: PathBuf,
    /// Whether the files have the layout that kernels want.
    pub prepared: bool,
    /// Not used.
    pub compressed: Option<PathBuf>,
    /// The weights of experts.
    pub experts: ExpertTensors,
}

/// Weights that hold one slice for each expert. They are not read by demand here.
#[derive(Default)]
pub(crate) struct ExpertTensors;

impl ExpertTensors {
    /// Finds nothing.
    pub fn find(_: &Path, _: &Path, _: ExpertWeights<'_>) -> std::io::Result<Self> {
        Ok(ExpertTensors)
    }
}

/// Prepares a partition. Not called on systems that do not stream.
pub(crate) fn find_or_make(
    prepared: &Prepared<'_>,
    partition: &str,
    _: &str,
    _: u64,
    make: impl FnOnce(&Path) -> Result<(), BackendError>,
) -> Result<PathBuf, BackendError> {
    let dir = prepared.dir.join(partition);
    make(&dir).map(|()| dir)
}

/// Copies nothing. Not called on systems that do not stream.
pub(crate) fn find_or_copy(
    prepared: &Prepared<'_>,
    partition: &str,
    _: [&Path; 2],
    _: u64,
    _: impl FnOnce(),
) -> Result<PathBuf, BackendError> {
    Ok(prepared.dir.join(partition))
}

impl DiskReaders {
    /// Leaves the weights where they are.
    ///
    /// # Safety
    /// No requirements; unsafe only to match the Linux version.
    pub unsafe fn take_over(
        &self,
        _: SessionMappings,
        _: &str,
        _: &dyn Reporter,
    ) -> Result<SessionWeights, BackendError> {
        Ok(SessionWeights)
    }
}

impl SessionWeights {
    /// Always true.
    pub fn is_unmanaged(&self) -> bool {
        true
    }

    /// Always false.
    pub fn wants_warm_up(&self) -> bool {
        false
    }

    /// Does nothing.
    pub fn sample_resident(&mut self) {}

    /// Does nothing.
    pub fn lock_and_stream(&mut self, _: u64) -> Result<Option<String>, BackendError> {
        Ok(None)
    }

    /// Always empty.
    pub fn chunks(&mut self) -> Vec<ChunkSize> {
        Vec::new()
    }

    /// Always empty.
    pub fn experts(&mut self) -> Vec<Range<usize>> {
        Vec::new()
    }

    /// Does nothing.
    pub fn select_experts(&mut self, _: &[u32]) {}

    /// Does nothing.
    pub fn evict(&mut self, _: usize) {}

    /// Does nothing.
    pub fn prefetch(&mut self, _: usize) -> Result<(), BackendError> {
        Ok(())
    }

    /// Does nothing.
    pub fn wait(&mut self, _: usize, _: impl Fn() -> Duration) -> Result<Interval, BackendError> {
        Ok(Interval::default())
    }

    /// Does nothing.
    pub fn release(&mut self) {}

    /// All weights are in memory.
    pub fn check(&self) -> Result<(), BackendError> {
        Ok(())
    }
}
