//! Answers requests to measure the machine.

use super::{ProbeSession, Replies};
use crate::error::ExecError;
use crate::measure::{
    ContentionFactors, decompression_curve, disk_read_curve, link_curves, matrix_product_tflops, measure_contention,
    measure_disk_contention, ram_read_curve,
};
use hpp_schema::probe::{MachineProbe, Reply};
use hpp_schema::{BandwidthCurve, BandwidthPath};

/// Answers the request.
pub(super) fn run(
    session: &mut ProbeSession<'_>,
    probe: &MachineProbe,
    replies: &mut Replies<'_>,
) -> Result<(), ExecError> {
    let devices = session.runtime.devices();
    let backend = session.runtime.backend();
    let free = devices.memory.1.unwrap_or(u64::MAX);
    let reply = match probe {
        MachineProbe::RamRead { bytes } => {
            let points = ram_read_curve(bytes, devices.threads, free)?;
            Reply::Bandwidth { curves: vec![BandwidthCurve { path: BandwidthPath::RamRead, points }] }
        }
        MachineProbe::DiskRead { file, bytes } => {
            let points = disk_read_curve(file, bytes)?;
            Reply::Bandwidth { curves: vec![BandwidthCurve { path: BandwidthPath::DiskRead, points }] }
        }
        MachineProbe::DiskContention { file } => {
            let ContentionFactors { compute, link } = measure_disk_contention(file, devices.threads, free)?;
            Reply::Contention { compute, link }
        }
        MachineProbe::Decompress => Reply::Bandwidth { curves: vec![decompression_curve()] },
        MachineProbe::Link { provider, bytes } => Reply::Bandwidth { curves: link_curves(backend, *provider, bytes)? },
        MachineProbe::Contention { provider, bytes } => {
            let ContentionFactors { compute, link } =
                measure_contention(backend, *provider, *bytes, devices.threads, free)?;
            Reply::Contention { compute, link }
        }
        MachineProbe::Arithmetic => Reply::Arithmetic { tflops: matrix_product_tflops(backend, session.console)? },
    };
    Ok(replies(reply)?)
}
