//! Reading a file past the page cache, several reads at a time, as weights are read that do not fit in memory.

use super::{MeasureError, median, point, sizes};
use hpp_backend::read_rate;
use hpp_schema::BandwidthPoint;
use std::path::Path;

/// Samples of each size; their median counts.
const SAMPLES: usize = 3;
/// What direct reads must be aligned to, on every disk in use.
const ALIGNMENT: u64 = 4096;

/// Read bandwidth for single reads of these sizes, in 1e9 bytes per second. Sizes are rounded up to whole 4 KiB; those the
/// file has not four of are left out.
pub(super) fn points(path: &Path, bytes: &[u64]) -> Result<Vec<BandwidthPoint>, MeasureError> {
    let refused = |why: String| MeasureError::Direct { file: path.to_owned(), why };
    let length = std::fs::metadata(path).map_err(|error| refused(error.to_string()))?.len();
    let sizes = sizes(bytes)?.into_iter().map(|bytes| bytes.next_multiple_of(ALIGNMENT));
    let sizes: Vec<u64> = sizes.filter(|bytes| bytes.saturating_mul(4) <= length).collect();
    if sizes.is_empty() {
        return Err(refused(format!("it has {length} bytes, too few for the smallest read asked for")));
    }
    let sample = |bytes: u64| read_rate(path, bytes).map_err(|error| refused(error.to_string()));
    let measured = |bytes: u64| {
        let samples = (0..SAMPLES).map(|_| sample(bytes)).collect::<Result<_, MeasureError>>()?;
        Ok(point(bytes, median(samples)))
    };
    sizes.into_iter().map(measured).collect()
}
