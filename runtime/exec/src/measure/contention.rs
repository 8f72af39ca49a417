//! Contention: how much computing on the host slows down copies to a device or reads from disk, and the reverse. All of them use the host's memory
//! bandwidth, and reads use its processors too.

use super::disk::read_curve;
use super::link::{FIRST_DEVICE, LinkBuffers, LinkDevice};
use super::ram::Readers;
use super::{MeasureError, STREAMED_READ, median};
use crate::runtime::OrtBackend;
use hpp_schema::Provider;
use std::path::Path;
use std::time::Instant;

/// Bytes of the arrays that the reading threads sum, and bytes of the buffers that copies use in turn: more than processor caches hold.
const READ: u64 = 1 << 30;
const COPIED: u64 = 512 << 20;
/// Sizes of direct reads are multiples of this.
const SECTOR: u64 = 4096;
/// Minimum duration of the timed copies, seconds: many times the time that the readers take to pass over their arrays.
const SECONDS: f64 = 0.3;

/// For each side, its time while the other side runs, divided by its time alone; at least 1.
pub(crate) struct ContentionFactors {
    pub compute: f64,
    /// The factor of copies or reads.
    pub link: f64,
}

/// Measures the factors of computing and of copies to a device. Copies from pinned memory if the backend has it, because that is fastest.
pub(crate) fn measure_contention(
    backend: &OrtBackend,
    provider: Provider,
    bytes: u64,
    threads: usize,
    free: u64,
) -> Result<ContentionFactors, MeasureError> {
    if bytes == 0 {
        return Err(MeasureError::NoSize);
    }
    let buffers = (COPIED.min(free / 4) / bytes).max(1);
    let link = LinkBuffers::rotating(backend, LinkDevice { provider, name: FIRST_DEVICE }, bytes, buffers)?;
    // One round copies all buffers and then waits: a device may hold each copy's source until it has copied it.
    let copies = || {
        let (started, mut rounds) = (Instant::now(), Vec::new());
        while started.elapsed().as_secs_f64() < SECONDS {
            rounds.push(link.copies(bytes, buffers, true)?);
        }
        Ok::<f64, MeasureError>(median(rounds))
    };
    link.copies(bytes, buffers, true)?;
    let copy_alone = copies()?;
    let readers = Readers::start(READ.min(free / 4), threads, free)?;
    let read_alone = readers.bandwidth();
    let mut copy_together = Ok(0.0);
    let read_together = readers.during(|| copy_together = copies());
    Ok(ContentionFactors { compute: slowdown(read_alone, read_together), link: slowdown(copy_together?, copy_alone) })
}

/// Measures the factors of computing and of direct reads of a file. Reads are as large as those that stream weights, or smaller if the file is short.
pub(crate) fn measure_disk_contention(
    file: &Path,
    threads: usize,
    free: u64,
) -> Result<ContentionFactors, MeasureError> {
    let length = std::fs::metadata(file).map_or(0, |data| data.len());
    let bytes = STREAMED_READ.min(length / 4 / SECTOR * SECTOR).max(SECTOR);
    let rate = || read_curve(file, &[bytes]).map(|points| points[0].gb_per_s);
    let rate_alone = rate()?;
    let readers = Readers::start(READ.min(free / 2), threads, free)?;
    let read_alone = readers.bandwidth();
    let mut rate_together = Ok(0.0);
    let read_together = readers.during(|| rate_together = rate());
    Ok(ContentionFactors { compute: slowdown(read_alone, read_together), link: slowdown(rate_alone, rate_together?) })
}

/// The ratio of two numbers, at least 1: nothing runs faster beside other load, so a smaller ratio is noise.
fn slowdown(more: f64, less: f64) -> f64 {
    if less > 0.0 && more.is_finite() { (more / less).max(1.0) } else { 1.0 }
}
