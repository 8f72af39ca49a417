//! Reading a file past the page cache, several reads at a time, as weights are read that do not fit in memory.

use super::{MeasureError, median, point, sizes};
use hpp_schema::BandwidthPoint;
use std::path::Path;

/// Reads in flight at once.
const IN_FLIGHT: usize = 8;
/// Bytes read in one sample at least.
const SAMPLE: u64 = 64 << 20;
/// Samples of each size; their median counts.
const SAMPLES: usize = 5;
/// What direct reads must be aligned to, on every disk in use.
const ALIGNMENT: usize = 4096;

/// Read bandwidth for single reads of these sizes, in 1e9 bytes per second. Sizes are rounded up to whole 4 KiB; those the
/// file has not four of are left out.
pub(super) fn points(path: &Path, bytes: &[u64]) -> Result<Vec<BandwidthPoint>, MeasureError> {
    let refused = |why: String| MeasureError::Direct { file: path.to_owned(), why };
    let file = direct::open(path).map_err(&refused)?;
    let length = file.metadata().map_err(|error| refused(error.to_string()))?.len();
    let sizes = sizes(bytes)?.into_iter().map(|bytes| bytes.next_multiple_of(ALIGNMENT as u64));
    let sizes: Vec<u64> = sizes.filter(|bytes| bytes.saturating_mul(4) <= length).collect();
    if sizes.is_empty() {
        return Err(refused(format!("it has {length} bytes, too few for the smallest read asked for")));
    }
    let measured = |bytes: u64| {
        let sample = || direct::sample(&file, length, bytes, SAMPLE.max(bytes * IN_FLIGHT as u64));
        let samples = (0..SAMPLES).map(|_| sample()).collect::<Result<_, String>>().map_err(&refused)?;
        Ok(point(bytes, median(samples)))
    };
    sizes.into_iter().map(measured).collect()
}

#[cfg(target_os = "linux")]
mod direct {
    use super::{ALIGNMENT, IN_FLIGHT};
    use rustix::fs::{Mode, OFlags};
    use rustix::io::{Errno, pread};
    use std::fs::File;
    use std::path::Path;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    /// Opens a file whose reads skip the page cache.
    pub(super) fn open(path: &Path) -> Result<File, String> {
        let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).map(File::from).map_err(explain)
    }

    fn explain(error: Errno) -> String {
        match error {
            Errno::INVAL => "its file system has no direct reads".to_owned(),
            other => std::io::Error::from(other).to_string(),
        }
    }

    /// Reads at least `total` bytes in reads of `bytes`, front to back and round again; 1e9 bytes per second.
    pub(super) fn sample(file: &File, length: u64, bytes: u64, total: u64) -> Result<f64, String> {
        let (blocks, reads) = (length / bytes, total.div_ceil(bytes));
        let next = AtomicU64::new(0);
        let started = Instant::now();
        let work = || {
            let mut room = vec![0u8; bytes as usize + ALIGNMENT];
            let start = room.as_ptr().align_offset(ALIGNMENT);
            let block = &mut room[start..start + bytes as usize];
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= reads {
                    return Ok(());
                }
                let read = pread(file, &mut *block, number % blocks * bytes).map_err(explain)?;
                if read != block.len() {
                    return Err(format!("a read of {bytes} bytes ended after {read}"));
                }
            }
        };
        std::thread::scope(|scope| {
            let mut readers = Vec::new();
            for _ in 0..IN_FLIGHT.min(reads as usize) {
                let reader = std::thread::Builder::new().name("disk reader".into());
                readers.push(reader.spawn_scoped(scope, work).map_err(|error| error.to_string())?);
            }
            readers.into_iter().try_for_each(|reader| reader.join().unwrap_or_else(|_| Err("a reader ended".into())))
        })?;
        Ok((reads * bytes) as f64 / started.elapsed().as_secs_f64() / 1e9)
    }
}

#[cfg(not(target_os = "linux"))]
mod direct {
    use std::fs::File;
    use std::path::Path;

    pub(super) fn open(_: &Path) -> Result<File, String> {
        Err("that is only possible on Linux so far".into())
    }

    pub(super) fn sample(_: &File, _: u64, _: u64, _: u64) -> Result<f64, String> {
        Err("that is only possible on Linux so far".into())
    }
}
