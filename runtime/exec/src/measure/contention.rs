//! How much computing on the host and copying to a device slow each other down: both use the host's memory bandwidth.

use super::link::{FIRST_DEVICE, LinkBuffers, LinkDevice};
use super::ram::Readers;
use super::{MeasureError, median};
use crate::runtime::OrtBackend;
use hpp_schema::Provider;

/// Bytes that all threads read together: more than caches hold.
const READ: u64 = 512 << 20;
/// Copies timed; the result is their median.
const COPIES: usize = 15;

/// Time of each while the other runs, over its time alone; at least 1.
pub(crate) struct ContentionFactors {
    pub compute: f64,
    pub link: f64,
}

/// Measures both. Copies from pinned memory if the backend has it, because that is fastest.
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
    let link = LinkBuffers::new_fastest(backend, LinkDevice { provider, name: FIRST_DEVICE }, bytes)?;
    let copies = || (0..COPIES).map(|_| link.copies(bytes, 1, true)).collect::<Result<Vec<_>, _>>();
    link.copies(bytes, 2, true)?;
    let copy_alone = median(copies()?);
    let readers = Readers::start(READ.min(free / 2), threads, free)?;
    let read_alone = readers.bandwidth();
    let mut together = Ok(Vec::new());
    let read_together = readers.during(|| together = copies());
    Ok(ContentionFactors {
        compute: slowdown(read_alone, read_together),
        link: slowdown(median(together?), copy_alone),
    })
}

/// The ratio of two numbers. Nothing runs faster beside other load, so a ratio below 1 is noise and becomes 1.
fn slowdown(more: f64, less: f64) -> f64 {
    if less > 0.0 && more.is_finite() { (more / less).max(1.0) } else { 1.0 }
}
