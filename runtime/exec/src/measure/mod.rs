//! Measures the machine: memory, disk, links to devices, arithmetic. A measurement that is impossible is an error, never a number.

mod arithmetic;
mod contention;
mod disk;
mod link;
mod product;
mod ram;

pub(crate) use arithmetic::matrix_product_tflops;
pub(crate) use contention::{ContentionFactors, measure_contention, measure_disk_contention};
pub(crate) use disk::{decompression_curve, read_curve as disk_read_curve};
pub(crate) use link::{copy_bandwidth, link_curves};
pub(crate) use product::ProductFile;
pub(crate) use ram::read_curve as ram_read_curve;

use hpp_engine::{BackendError, EngineError};
use hpp_schema::{BandwidthPoint, ByteSize};
use std::io;
use std::path::{Path, PathBuf};

/// Why something cannot be measured.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum MeasureError {
    #[error("no device: the CPU provider computes in host memory, to which there is no link")]
    NoDevice,
    #[error("no size to measure was given")]
    NoSize,
    #[error(
        "{} of memory are too much: {} are free, and a measurement takes at most half of them",
        ByteSize(*asked).human(), ByteSize(*available).human()
    )]
    NoRoom { asked: u64, available: u64 },
    #[error("cannot start {threads} threads")]
    Threads { threads: usize, source: io::Error },
    #[error("cannot read {} past the page cache: {why}", .file.display())]
    Direct { file: PathBuf, why: String },
    #[error("cannot {action}")]
    Backend { action: &'static str, source: BackendError },
    #[error("cannot write a temporary file")]
    TemporaryFile(#[source] io::Error),
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Size of a read when weights are streamed from disk.
const STREAMED_READ: u64 = 2 << 20;

/// Direct reads of a file, several at a time and without other load, in 1e9 bytes a second.
pub(crate) fn direct_read_bandwidth(file: &Path) -> Result<f64, MeasureError> {
    let points = disk_read_curve(file, &[STREAMED_READ])?;
    points.first().map(|point| point.gb_per_s).ok_or(MeasureError::NoSize)
}

/// The quantile `q` of sorted numbers, interpolated linearly; 0 of none.
pub(crate) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let position = q * last as f64;
    let (below, fraction) = (position.floor() as usize, position.fract());
    sorted[below] + fraction * (sorted[(below + 1).min(last)] - sorted[below])
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    quantile(&values, 0.5)
}

/// A point of a curve.
fn point(bytes: u64, gb_per_s: f64) -> BandwidthPoint {
    BandwidthPoint { bytes, gb_per_s }
}

/// The sizes in rising order, each once; an error if there is none above zero.
fn sorted_sizes(bytes: &[u64]) -> Result<Vec<u64>, MeasureError> {
    let mut sizes: Vec<u64> = bytes.iter().copied().filter(|bytes| *bytes > 0).collect();
    sizes.sort_unstable();
    sizes.dedup();
    if sizes.is_empty() { Err(MeasureError::NoSize) } else { Ok(sizes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_interpolated() {
        assert_eq!(quantile(&[], 0.5), 0.0);
        assert_eq!(quantile(&[3.0], 0.9), 3.0);
        assert_eq!(quantile(&[1.0, 2.0, 4.0, 8.0], 0.5), 3.0);
        assert_eq!(quantile(&[0.0, 10.0], 0.1), 1.0);
    }
}
