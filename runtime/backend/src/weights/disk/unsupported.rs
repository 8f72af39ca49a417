//! The fallback for systems other than Linux: weights stay mapped from their file, and the system decides which pages are resident.

use crate::loading::Loading;
use hpp_engine::port::{ChunkSize, Interval, Prepared, WeightResidency};
use hpp_engine::{BackendError, Reporter};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Whether weights can be streamed from disk on this system.
pub(crate) const POSSIBLE: bool = false;
/// The graph of a prepared partition.
pub(crate) const MODEL: &str = "model.onnx";
/// Its weights.
pub(crate) const WEIGHTS: &str = "model.onnx.data";
/// Its weights as ONNX Runtime writes them.
pub(crate) const UNALIGNED: &str = "model.onnx.data";

/// The reader of direct files, which do not exist here.
#[derive(Default)]
pub(crate) struct DirectReads;

/// A file opened for direct reads, which does not exist here.
pub(crate) enum DirectFile {}

impl DirectFile {
    /// Always `None`.
    pub fn open(_: &Path, _: &std::sync::Arc<DirectReads>) -> std::io::Result<Option<Self>> {
        Ok(None)
    }

    /// Always false.
    pub fn is_aligned(_: u64, _: *const u8) -> bool {
        false
    }

    /// Cannot be called.
    pub fn read(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        match *self {}
    }
}

/// Always an error.
pub fn read_rate(_: &Path, _: u64) -> std::io::Result<f64> {
    Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "that is only possible on Linux so far"))
}

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

/// Where the weights of a session are.
#[derive(Default)]
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
    /// Leaves the weights where they are, and warns if the plan streams them.
    ///
    /// # Safety
    /// No requirements; unsafe only to match the Linux version.
    pub unsafe fn take_over(
        &self,
        weights: SessionMappings,
        partition: &str,
        reporter: &dyn Reporter,
    ) -> Result<SessionWeights, BackendError> {
        if weights.residency == WeightResidency::ReadFromDisk {
            let what = "weights are streamed from disk on Linux only; the system decides which of them stay in memory";
            reporter.warning(&format!("{partition}: {what}"));
        }
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
