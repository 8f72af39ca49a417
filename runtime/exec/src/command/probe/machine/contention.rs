//! What computing on the host and copying to a device do to each other: both need the host's memory.

use super::link::{FIRST, Link};
use super::ram::Readers;
use super::{MeasureError, median};
use crate::machine::OrtBackend;
use hpp_schema::Provider;
use hpp_schema::probe::Reply;

/// Bytes read by all threads together: more than caches hold.
const READ: u64 = 512 << 20;
/// Copies timed; their median counts.
const COPIES: usize = 15;

/// Times of each while the other goes on, over its time alone. Copies are made as they are made fastest: from pinned memory
/// where that is possible.
pub(super) fn measure(
    backend: &OrtBackend,
    provider: Provider,
    bytes: u64,
    threads: usize,
    free: u64,
) -> Result<Reply, MeasureError> {
    if bytes == 0 {
        return Err(MeasureError::NoSize);
    }
    let link = match Link::new(backend, (provider, FIRST), bytes, true)? {
        Some(link) => link,
        None => Link::new(backend, (provider, FIRST), bytes, false)?.ok_or(MeasureError::NoDevice)?,
    };
    let copies = || (0..COPIES).map(|_| link.copies(bytes, 1, true)).collect::<Result<Vec<_>, _>>();
    link.copies(bytes, 2, true)?;
    let copy_alone = median(copies()?);
    let readers = Readers::start(READ.min(free / 2), threads, free)?;
    let read_alone = readers.bandwidth();
    let mut together = Ok(Vec::new());
    let read_together = readers.during(|| together = copies());
    Ok(Reply::Contention { compute: factor(read_alone, read_together), link: factor(median(together?), copy_alone) })
}

/// How much more one is than the other; nothing gains from company, so what is below 1 is noise.
fn factor(more: f64, less: f64) -> f64 {
    if less > 0.0 && more.is_finite() { (more / less).max(1.0) } else { 1.0 }
}
