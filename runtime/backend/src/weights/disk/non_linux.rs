//! Direct reads on Windows (`FILE_FLAG_NO_BUFFERING`, overlapped) and macOS (`F_NOCACHE`, a few threads): several in flight, bypassing the
//! system's file cache. Other systems have none.

use super::ExpertTensors;
use super::mapping::Mapping;
use super::streamed::ManagedWeights;
use crate::os::Pages;
use crate::weights::file::{SECTOR, WeightFile};
use hpp_engine::BackendError;
use hpp_engine::port::Prepared;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg_attr(windows, path = "non_linux/overlapped.rs")]
#[cfg_attr(target_os = "macos", path = "non_linux/no_cache.rs")]
#[cfg_attr(not(any(windows, target_os = "macos")), path = "non_linux/none.rs")]
mod system;

/// Largest read given to the system at once.
const MAX_READ: usize = 2 << 20;
/// Bytes of the buffer of a measurement.
const STAGE: u64 = 16 << 20;
/// Least bytes of a measurement.
const MIN_BYTES: u64 = 256 << 20;
/// Least time of a measurement.
const MIN_TIME: Duration = Duration::from_millis(500);

/// The files of compressed regions beside prepared weights: none.
pub(super) const REGION_FILES: &[&str] = &[];

/// Why weights of sessions on the host are not read directly.
pub(super) fn refusal() -> Option<String> {
    Some("memory of HPP's own takes the place of ONNX Runtime's mappings on Linux only".to_owned())
}

/// Infinite: nothing is decompressed.
pub fn decompression_rate() -> f64 {
    f64::INFINITY
}

/// Compresses nothing.
pub(super) fn compress(_: &Path, _: &str, _: u64, _: Vec<(u64, u64)>) -> io::Result<()> {
    Ok(())
}

/// Copies nothing. Not called, because nothing is read compressed.
pub(crate) fn find_or_copy(
    prepared: &Prepared<'_>,
    partition: &str,
    _: [&Path; 2],
    _: u64,
    _: impl FnOnce(),
) -> Result<PathBuf, BackendError> {
    Ok(prepared.dir.join(partition))
}

/// Readers of sessions' weights; none exist.
#[derive(Clone, Default)]
pub(super) struct Readers;

/// Weights that would be read directly; there are none.
pub(super) enum PendingDirect {}

impl Readers {
    /// Always refuses.
    pub fn prepare(&self, _: Option<PathBuf>, _: &Path) -> io::Result<PendingDirect> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl PendingDirect {
    /// Not called.
    ///
    /// # Safety
    /// No requirements; unsafe only to match the Linux version.
    pub unsafe fn take_over(self, _: Vec<Mapping>, _: &ExpertTensors, _: u64) -> io::Result<ManagedWeights> {
        match self {}
    }
}

/// What direct files share: nothing here, since each read brings its own events or threads.
#[derive(Default)]
pub(crate) struct DirectReads;

/// A weight file that is read directly.
pub(crate) struct DirectFile {
    /// Open for buffered reads: tells whether the file has changed.
    file: WeightFile,
    direct: File,
}

impl DirectFile {
    /// Opens a file; `None` if its file system or this system has no direct reads.
    pub fn open(path: &Path, _: &Arc<DirectReads>) -> io::Result<Option<Self>> {
        let file = WeightFile::open_buffered(path)?;
        Ok(system::open(path)?.map(|direct| DirectFile { file, direct }))
    }

    /// Whether an offset and an address are aligned for direct reads.
    pub fn is_aligned(offset: u64, address: *const u8) -> bool {
        offset.is_multiple_of(SECTOR) && (address as u64).is_multiple_of(SECTOR)
    }

    /// Fills `bytes`, whole sectors, from an offset to the end of the file at most. An error if the file has changed.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_in_pieces(offset, bytes, MAX_READ)
    }

    fn read_in_pieces(&self, offset: u64, bytes: &mut [u8], piece: usize) -> io::Result<()> {
        let expected = self.file.expected(offset, bytes.len());
        self.file.check()?;
        let read = system::read(&self.direct, offset, bytes, piece);
        // Checked first, so that a truncated file is reported as changed, not as too short.
        self.file.check()?;
        if read? < expected { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}

/// The rate in 1e9 bytes per second of reads of `bytes` each (rounded up to whole sectors), sequential through a file and cyclic, into
/// memory that is allocated already. An error if there are no direct reads, or if the file is shorter than one read.
pub fn read_rate(path: &Path, bytes: u64) -> io::Result<f64> {
    let file = DirectFile::open(path, &Arc::default())?
        .ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "its file system has no direct reads"))?;
    let bytes = bytes.next_multiple_of(SECTOR);
    let each = (STAGE / bytes).max(1);
    let stages = file.file.expected(0, usize::MAX) as u64 / bytes / each;
    let (each, stages) =
        if stages == 0 { (file.file.expected(0, usize::MAX) as u64 / bytes, 1) } else { (each, stages) };
    if each == 0 {
        return Err(io::Error::other(format!("it is shorter than a read of {bytes} bytes")));
    }
    let piece = usize::try_from(bytes).map_err(io::Error::other)?;
    let mut buffer = Buffer(Pages::reserve(piece * each as usize)?);
    let memory = buffer.bytes();
    memory.fill(0);
    let (started, mut done) = (Instant::now(), 0);
    for stage in (0..stages).cycle() {
        file.read_in_pieces(stage * each * bytes, memory, piece)?;
        done += each * bytes;
        if done >= MIN_BYTES && started.elapsed() >= MIN_TIME {
            break;
        }
    }
    Ok(done as f64 / started.elapsed().as_secs_f64() / 1e9)
}

/// Memory for reads.
struct Buffer(Pages);

impl Buffer {
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the pages live as long as this value, which is borrowed, and nothing else uses them.
        unsafe { std::slice::from_raw_parts_mut(self.0.address(), self.0.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_reads_return_the_contents_and_detect_a_change() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("weights");
        // More pieces than are in flight at once, and the last one cut short.
        let contents: Vec<u8> = (0..21_000_003_u32).map(|at| (at % 249) as u8).collect();
        std::fs::write(&path, &contents).unwrap();
        let Some(file) = DirectFile::open(&path, &Arc::default()).unwrap() else {
            return eprintln!("SKIPPED: this system or its file system has no direct reads");
        };
        let mut buffer = Buffer(Pages::reserve(contents.len().next_multiple_of(SECTOR as usize)).unwrap());
        assert!(DirectFile::is_aligned(SECTOR, buffer.0.address()));
        let whole = buffer.bytes().len();
        let bytes = &mut buffer.bytes()[..whole - SECTOR as usize];
        file.read(SECTOR, bytes).unwrap();
        assert!(bytes[..contents.len() - SECTOR as usize] == contents[SECTOR as usize..]);
        file.read(contents.len() as u64 / SECTOR * SECTOR, &mut bytes[..SECTOR as usize]).unwrap();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(9000).unwrap();
        let error = file.read(0, bytes).unwrap_err().to_string();
        assert!(error.contains("was changed while it was in use"), "{error}");
    }

    #[test]
    fn a_rate_is_positive_and_short_files_are_refused() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("weights");
        std::fs::write(&path, vec![7; 5 << 20]).unwrap();
        match read_rate(&path, 1 << 20) {
            Ok(rate) => assert!(rate > 0.0 && rate < 1e4, "{rate}"),
            Err(error) => assert!(error.to_string().contains("no direct reads"), "{error}"),
        }
        let error = read_rate(&path, 8 << 20).unwrap_err().to_string();
        assert!(error.contains("shorter than a read") || error.contains("no direct reads"), "{error}");
        assert!(read_rate(&dir.path().join("absent"), 4096).is_err());
    }
}
