//! Copies between host and device memory, both ways, from ordinary host memory and, where it can be had, from pinned.

use super::{MeasureError, median, point, sizes};
use crate::machine::OrtBackend;
use hpp_backend::{OrtBuffer, OrtTensor};
use hpp_engine::BackendError;
use hpp_engine::port::{Backend, MemoryId};
use hpp_schema::{BandwidthCurve, BandwidthPath, BandwidthPoint, DType, Provider};
use std::time::Instant;

/// What plans call a provider's first device.
pub(super) const FIRST: &str = "gpu0";
/// Samples of each size; their median counts.
const SAMPLES: usize = 7;
/// Bytes in the copies of one sample, so that a clock's tick and the wait at their end count little.
const SAMPLE: u64 = 32 << 20;
/// Most copies in one sample.
const COPIES: u64 = 64;
/// Bytes read from a device to learn that it has finished.
const GLANCE: u64 = 16;

/// The curves of a provider's first device: each way, for each kind of host memory there is.
pub(super) fn curves(
    backend: &OrtBackend,
    provider: Provider,
    bytes: &[u64],
) -> Result<Vec<BandwidthCurve>, MeasureError> {
    let sizes = sizes(bytes)?;
    let most = sizes.last().copied().unwrap_or(0);
    let mut curves = Vec::new();
    for pinned in [false, true] {
        let Some(link) = Link::new(backend, (provider, FIRST), most, pinned)? else { continue };
        for to_device in [true, false] {
            let measured = |bytes: &u64| Ok(point(*bytes, link.bandwidth(*bytes, to_device)?));
            let points = sizes.iter().map(measured).collect::<Result<Vec<BandwidthPoint>, MeasureError>>()?;
            curves.push(BandwidthCurve { path: BandwidthPath::Link { provider, to_device, pinned }, points });
        }
    }
    Ok(curves)
}

/// Large copies to a device, from pinned memory where that can be had.
pub(super) fn bare(backend: &OrtBackend, provider: Provider, device: &str) -> Result<f64, MeasureError> {
    let link = match Link::new(backend, (provider, device), SAMPLE, true)? {
        Some(pinned) => pinned,
        None => Link::new(backend, (provider, device), SAMPLE, false)?.ok_or(MeasureError::NoDevice)?,
    };
    link.bandwidth(SAMPLE, true)
}

/// A buffer on each side.
pub(super) struct Link<'a> {
    backend: &'a OrtBackend,
    host: OrtBuffer,
    device: OrtBuffer,
}

fn failed(doing: &str) -> impl FnOnce(BackendError) -> MeasureError + '_ {
    move |source| MeasureError::Backend { doing: doing.to_owned(), source }
}

impl<'a> Link<'a> {
    /// Reserves both sides; `None` where the host's cannot be pinned.
    pub fn new(
        backend: &'a OrtBackend,
        (provider, device): (Provider, &str),
        bytes: u64,
        pinned: bool,
    ) -> Result<Option<Self>, MeasureError> {
        if provider == Provider::Cpu {
            return Err(MeasureError::NoDevice);
        }
        let memory = backend.device_memory(provider, device).map_err(failed("find a device"))?;
        let bytes = bytes.max(GLANCE);
        let host = match pinned {
            false => touched(backend, bytes)?,
            true => match backend.reserve_pinned(memory, bytes).map_err(failed("pin host memory"))? {
                Some(host) => host,
                None => return Ok(None),
            },
        };
        let device = backend.reserve(memory, bytes).map_err(failed("reserve device memory"))?;
        Ok(Some(Link { backend, host, device }))
    }

    /// 1e9 bytes per second in single copies of so many bytes.
    pub fn bandwidth(&self, bytes: u64, to_device: bool) -> Result<f64, MeasureError> {
        self.copies(bytes, 2, to_device)?;
        let count = (SAMPLE / bytes).clamp(1, COPIES);
        let samples = (0..SAMPLES).map(|_| self.copies(bytes, count, to_device));
        let seconds: Vec<f64> = samples.collect::<Result<_, _>>()?;
        Ok(bytes as f64 / median(seconds) / 1e9)
    }

    /// Seconds of one of `count` copies, one after the other, to the end of the last.
    pub fn copies(&self, bytes: u64, count: u64, to_device: bool) -> Result<f64, MeasureError> {
        let doing = if to_device { "copy to the device" } else { "copy from the device" };
        let act = || {
            let view = |buffer| self.backend.view(buffer, DType::Uint8, &[bytes]);
            let (host, device) = (view(&self.host)?, view(&self.device)?);
            let (from, to) = if to_device { (&host, &device) } else { (&device, &host) };
            let look = self.backend.view(&self.device, DType::Uint8, &[GLANCE])?;
            self.look(&look)?;
            let idle = self.look(&look)?;
            let started = Instant::now();
            for _ in 0..count {
                self.backend.copy(from, to)?;
            }
            let returned = started.elapsed().as_secs_f64();
            // A copy to a device may still be on its way when the call returns; a copy to the host is there.
            if !to_device {
                return Ok(returned);
            }
            self.look(&look)?;
            Ok((started.elapsed().as_secs_f64() - idle).max(returned))
        };
        act().map(|seconds: f64| seconds / count as f64).map_err(failed(doing))
    }

    /// Seconds to read a few bytes back, which waits for all that was begun before.
    fn look(&self, look: &OrtTensor) -> Result<f64, BackendError> {
        let started = Instant::now();
        self.backend.read(look, 0, &mut [0; GLANCE as usize])?;
        Ok(started.elapsed().as_secs_f64())
    }
}

/// Host memory whose pages exist.
fn touched(backend: &OrtBackend, bytes: u64) -> Result<OrtBuffer, MeasureError> {
    let doing = "reserve host memory";
    let buffer = backend.reserve(MemoryId::HOST, bytes).map_err(failed(doing))?;
    let piece = vec![1u8; bytes.min(1 << 20) as usize];
    for offset in (0..bytes).step_by(1 << 20) {
        let now = (bytes - offset).min(1 << 20) as usize;
        backend.write(&buffer, offset, &piece[..now]).map_err(failed(doing))?;
    }
    Ok(buffer)
}
