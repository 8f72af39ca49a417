//! Where the system is not Linux, weights stay where ONNX Runtime put them: mapped from their file, so that the system may drop
//! and read them again as it sees fit.

use crate::loading::Loading;
use hpp_engine::port::{ChunkSize, Interval, Prepared, WeightResidency};
use hpp_engine::{BackendError, Reporter};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Whether weights can be read while a process runs, on this system.
pub(crate) const POSSIBLE: bool = false;
/// The graph of a prepared partition.
pub(crate) const MODEL: &str = "model.onnx";
/// Its weights.
pub(crate) const WEIGHTS: &str = "model.onnx.data";
/// The same as ONNX Runtime writes them.
pub(crate) const UNALIGNED: &str = "model.onnx.data";

/// Nothing that reads directly.
#[derive(Default)]
pub(crate) struct DirectReads;

/// There is none.
pub(crate) enum DirectFile {}

impl DirectFile {
    /// There are no direct reads here.
    pub fn open(_: &Path, _: &std::sync::Arc<DirectReads>) -> std::io::Result<Option<Self>> {
        Ok(None)
    }

    /// Never.
    pub fn reads_to(_: u64, _: *const u8) -> bool {
        false
    }

    /// Nobody has one.
    pub fn read(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        match *self {}
    }
}

/// Not known here.
pub fn read_rate(_: &Path, _: u64) -> std::io::Result<f64> {
    Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "that is only possible on Linux so far"))
}

/// A mapping nobody looks for.
pub(crate) struct Mapping;

/// Nothing is known of them.
pub(crate) fn forget(_: &[Mapping]) {}

/// Nothing that reads.
#[derive(Clone, Default)]
pub(crate) struct DiskReaders;

/// Weights where ONNX Runtime put them.
pub(crate) struct SessionWeights;

/// Nothing is looked for.
pub(crate) fn mapped_under(_: &Path) -> std::io::Result<Vec<Mapping>> {
    Ok(Vec::new())
}

/// Makes a session; nobody looks for what it maps.
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
    /// How they are to be kept.
    pub residency: WeightResidency,
    /// None.
    pub mappings: Vec<Mapping>,
    /// Where their files are.
    pub dir: PathBuf,
    /// Whether they lie there as kernels want them.
    pub prepared: bool,
}

/// Never asked for where nothing is read.
pub(crate) fn find_or_make(
    prepared: &Prepared<'_>,
    partition: &str,
    _: &str,
    make: impl FnOnce(&Path) -> Result<(), BackendError>,
) -> Result<PathBuf, BackendError> {
    let place = prepared.dir.join(partition);
    make(&place).map(|()| place)
}

impl DiskReaders {
    /// Leaves the weights where they are, and says so.
    ///
    /// # Safety
    /// None is needed; it is unsafe because it is on Linux.
    pub unsafe fn keep(
        &self,
        placed: SessionMappings,
        partition: &str,
        reporter: &dyn Reporter,
    ) -> Result<SessionWeights, BackendError> {
        if placed.residency == WeightResidency::Streamed {
            let what =
                "weights are read as they are needed on Linux only; the system decides which of them stay in memory";
            reporter.warning(&format!("{partition}: {what}"));
        }
        Ok(SessionWeights)
    }
}

impl SessionWeights {
    /// Always.
    pub fn is_resident(&self) -> bool {
        true
    }

    /// Never.
    pub fn wants_warm_up(&self) -> bool {
        false
    }

    /// Does nothing.
    pub fn sample_resident(&mut self) {}

    /// Does nothing.
    pub fn pin_and_stream(&mut self, _: u64) -> Result<Option<String>, BackendError> {
        Ok(None)
    }

    /// None.
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
