//! What the machine itself can do: memory, disk, links to devices, arithmetic. What is not there is an error, never a number.

mod arithmetic;
mod contention;
mod disk;
mod link;
mod ram;

use super::{Answer, ProbeSession};
use crate::error::ExecError;
use crate::machine::OrtBackend;
use hpp_engine::BackendError;
use hpp_schema::probe::{MachineProbe, Reply};
use hpp_schema::{BandwidthCurve, BandwidthPath, BandwidthPoint, Provider};
use std::path::{Path, PathBuf};

/// Why something of the machine could not be measured.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum MeasureError {
    /// The provider of that name computes on the host.
    #[error("no device: the CPU provider computes in the host's own memory, to which there is no link")]
    NoDevice,
    #[error("no size to measure was given")]
    NoSize,
    /// More than could be had without pushing other things out.
    #[error(
        "{asked} bytes of memory cannot be had: {available} are free, and half of them is what a measurement takes"
    )]
    NoRoom { asked: u64, available: u64 },
    #[error("cannot start {threads} threads")]
    Threads { threads: usize, source: std::io::Error },
    #[error("cannot read {} past the page cache: {why}", .file.display())]
    Direct { file: PathBuf, why: String },
    #[error("cannot {doing}")]
    Backend { doing: String, source: BackendError },
}

/// Answers the request.
pub(super) fn run(
    session: &mut ProbeSession<'_>,
    probe: &MachineProbe,
    reply: &mut Answer<'_>,
) -> Result<(), ExecError> {
    let devices = session.machine.devices();
    let free = devices.memory.1.unwrap_or(u64::MAX);
    let answer = match probe {
        MachineProbe::RamRead { bytes } => {
            let points = ram::points(bytes, devices.threads, free)?;
            Reply::Bandwidth { curves: vec![BandwidthCurve { path: BandwidthPath::RamRead, points }] }
        }
        MachineProbe::DiskRead { file, bytes } => {
            let points = disk::points(file, bytes)?;
            Reply::Bandwidth { curves: vec![BandwidthCurve { path: BandwidthPath::DiskRead, points }] }
        }
        MachineProbe::Link { provider, bytes } => {
            Reply::Bandwidth { curves: link::curves(session.machine.backend(), *provider, bytes)? }
        }
        MachineProbe::Contention { provider, bytes } => {
            contention::measure(session.machine.backend(), *provider, *bytes, devices.threads, free)?
        }
        MachineProbe::Arithmetic => arithmetic::measure(session)?,
    };
    Ok(reply(answer)?)
}

/// Copies of weights to a plan's device with nothing beside them, in 1e9 bytes a second.
pub(crate) fn bare_copy(backend: &OrtBackend, provider: Provider, device: &str) -> Result<f64, MeasureError> {
    link::bare(backend, provider, device)
}

/// Direct reads of a file with nothing beside them, several at a time, in 1e9 bytes a second.
pub(crate) fn bare_reads(file: &Path) -> Result<f64, MeasureError> {
    let points = disk::points(file, &[READ])?;
    points.first().map(|point| point.gb_per_s).ok_or(MeasureError::NoSize)
}

/// Bytes of a read: as weights are read that do not fit in memory.
const READ: u64 = 2 << 20;

/// A point of a curve.
fn point(bytes: u64, gb_per_s: f64) -> BandwidthPoint {
    BandwidthPoint { bytes, gb_per_s }
}

/// Sizes in order, each once; an error if there is none.
fn sizes(bytes: &[u64]) -> Result<Vec<u64>, MeasureError> {
    let mut sizes: Vec<u64> = bytes.iter().copied().filter(|bytes| *bytes > 0).collect();
    sizes.sort_unstable();
    sizes.dedup();
    if sizes.is_empty() { Err(MeasureError::NoSize) } else { Ok(sizes) }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    super::partition::quantile(&values, 0.5)
}
