//! Read bandwidth of a file past the page cache with several concurrent reads, as weights are streamed from disk, and the rate of
//! decompressing them.

use super::{MeasureError, median, point, sorted_sizes};
use hpp_backend::{decompression_rate, read_rate};
use hpp_schema::{BandwidthCurve, BandwidthPath, BandwidthPoint};
use std::path::Path;

/// Samples of each size; the result is their median.
const SAMPLES: usize = 3;
/// Alignment of direct reads, enough for every common disk.
const ALIGNMENT: u64 = 4096;

/// Uncompressed bytes of one piece in the measurement of decompression.
const PIECE: u64 = 2 << 20;

/// The rate at which one thread decompresses weights that were read.
pub(crate) fn decompression_curve() -> BandwidthCurve {
    let samples = (0..SAMPLES).map(|_| decompression_rate()).collect();
    BandwidthCurve { path: BandwidthPath::Decompress, points: vec![point(PIECE, median(samples))] }
}

/// Read bandwidth for reads of these sizes, in 1e9 bytes per second. Rounds sizes up to 4 KiB and leaves out those of which the file
/// has fewer than four.
pub(crate) fn read_curve(path: &Path, bytes: &[u64]) -> Result<Vec<BandwidthPoint>, MeasureError> {
    let refused = |why: String| MeasureError::Direct { file: path.to_owned(), why };
    let length = std::fs::metadata(path).map_err(|error| refused(error.to_string()))?.len();
    let sizes = sorted_sizes(bytes)?.into_iter().map(|bytes| bytes.next_multiple_of(ALIGNMENT));
    let sizes: Vec<u64> = sizes.filter(|bytes| bytes.saturating_mul(4) <= length).collect();
    if sizes.is_empty() {
        return Err(refused(format!("it has {length} bytes, too few for four reads of the smallest size")));
    }
    let sample = |bytes: u64| read_rate(path, bytes).map_err(|error| refused(error.to_string()));
    let measured = |bytes: u64| {
        let samples = (0..SAMPLES).map(|_| sample(bytes)).collect::<Result<_, MeasureError>>()?;
        Ok(point(bytes, median(samples)))
    };
    sizes.into_iter().map(measured).collect()
}
