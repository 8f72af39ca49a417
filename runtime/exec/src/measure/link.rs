//! Copies between host and device memory, both ways, with pageable host memory and, if the backend has it, with pinned memory.

use super::{MeasureError, median, point, sorted_sizes};
use crate::runtime::OrtBackend;
use hpp_backend::{OrtBuffer, OrtTensor};
use hpp_engine::BackendError;
use hpp_engine::port::{Backend, MemoryId};
use hpp_schema::{BandwidthCurve, BandwidthPath, BandwidthPoint, DType, Provider};
use std::time::Instant;

/// The name of a provider's first device in plans.
pub(super) const FIRST_DEVICE: &str = "gpu0";
/// Samples of each size; the result is their median.
const SAMPLES: usize = 7;
/// Bytes that one sample copies, so that the clock's resolution and the wait at the end matter little.
const SAMPLE_BYTES: u64 = 32 << 20;
/// Most copies in one sample.
const MAX_COPIES: u64 = 64;
/// Bytes read from a device to wait until it has finished.
const FENCE_BYTES: u64 = 16;

/// A device of a provider, by its name in plans.
#[derive(Clone, Copy)]
pub(super) struct LinkDevice<'a> {
    pub provider: Provider,
    pub name: &'a str,
}

/// The bandwidth curves of a provider's first device: both directions, for each kind of host memory.
pub(crate) fn link_curves(
    backend: &OrtBackend,
    provider: Provider,
    bytes: &[u64],
) -> Result<Vec<BandwidthCurve>, MeasureError> {
    let sizes = sorted_sizes(bytes)?;
    let largest = sizes.last().copied().unwrap_or(0);
    let mut curves = Vec::new();
    for pinned in [false, true] {
        let Some(link) = LinkBuffers::new(backend, LinkDevice { provider, name: FIRST_DEVICE }, largest, pinned)?
        else {
            continue;
        };
        for to_device in [true, false] {
            let measured = |bytes: &u64| Ok(point(*bytes, link.bandwidth(*bytes, to_device)?));
            let points = sizes.iter().map(measured).collect::<Result<Vec<BandwidthPoint>, MeasureError>>()?;
            curves.push(BandwidthCurve { path: BandwidthPath::Link { provider, to_device, pinned }, points });
        }
    }
    Ok(curves)
}

/// Large copies to a device without other load, in 1e9 bytes a second.
pub(crate) fn copy_bandwidth(backend: &OrtBackend, provider: Provider, device: &str) -> Result<f64, MeasureError> {
    let device = LinkDevice { provider, name: device };
    LinkBuffers::new_fastest(backend, device, SAMPLE_BYTES)?.bandwidth(SAMPLE_BYTES, true)
}

/// Buffers in host memory that copies use in turn, and one buffer on a device.
pub(super) struct LinkBuffers<'a> {
    backend: &'a OrtBackend,
    hosts: Vec<OrtBuffer>,
    device: OrtBuffer,
}

fn failed(action: &'static str) -> impl FnOnce(BackendError) -> MeasureError {
    move |source| MeasureError::Backend { action, source }
}

impl<'a> LinkBuffers<'a> {
    /// Reserves both buffers, with pinned host memory if the backend has it.
    pub fn new_fastest(backend: &'a OrtBackend, device: LinkDevice<'_>, bytes: u64) -> Result<Self, MeasureError> {
        if let Some(pinned) = Self::new(backend, device, bytes, true)? {
            return Ok(pinned);
        }
        Self::new(backend, device, bytes, false)?.ok_or(MeasureError::NoDevice)
    }

    /// Reserves both buffers; `None` if host memory cannot be pinned.
    pub fn new(
        backend: &'a OrtBackend,
        device: LinkDevice<'_>,
        bytes: u64,
        pinned: bool,
    ) -> Result<Option<Self>, MeasureError> {
        if device.provider == Provider::CPU {
            return Err(MeasureError::NoDevice);
        }
        let memory = backend.device_memory(device.provider, device.name).map_err(failed("find a device"))?;
        let bytes = bytes.max(FENCE_BYTES);
        let Some(host) = reserve_host(backend, memory, bytes, pinned)? else { return Ok(None) };
        let device = backend.reserve(memory, bytes).map_err(failed("reserve device memory"))?;
        Ok(Some(LinkBuffers { backend, hosts: vec![host], device }))
    }

    /// Like [`new_fastest`](Self::new_fastest), but with up to `count` host buffers, so that copies read memory instead of the processor's caches.
    pub fn rotating(
        backend: &'a OrtBackend,
        device: LinkDevice<'_>,
        bytes: u64,
        count: u64,
    ) -> Result<Self, MeasureError> {
        let (mut link, is_pinned) = match Self::new(backend, device, bytes, true)? {
            Some(pinned) => (pinned, true),
            None => (Self::new(backend, device, bytes, false)?.ok_or(MeasureError::NoDevice)?, false),
        };
        let memory = backend.device_memory(device.provider, device.name).map_err(failed("find a device"))?;
        // Stops at the first buffer that cannot be reserved.
        let more = (1..count).map_while(|_| reserve_host(backend, memory, bytes.max(FENCE_BYTES), is_pinned).ok()?);
        link.hosts.extend(more);
        Ok(link)
    }

    /// Bandwidth of copies of `bytes` each, in 1e9 bytes per second.
    pub fn bandwidth(&self, bytes: u64, to_device: bool) -> Result<f64, MeasureError> {
        self.copies(bytes, 2, to_device)?;
        let count = (SAMPLE_BYTES / bytes).clamp(1, MAX_COPIES);
        let samples = (0..SAMPLES).map(|_| self.copies(bytes, count, to_device));
        let seconds: Vec<f64> = samples.collect::<Result<_, _>>()?;
        Ok(bytes as f64 / median(seconds) / 1e9)
    }

    /// Seconds per copy if `count` copies run one after another, measured until the last has finished.
    pub fn copies(&self, bytes: u64, count: u64, to_device: bool) -> Result<f64, MeasureError> {
        let action = if to_device { "copy to the device" } else { "copy from the device" };
        let copy = || {
            let view = |buffer| self.backend.view(buffer, DType::Uint8, &[bytes]);
            let hosts = self.hosts.iter().map(view).collect::<Result<Vec<_>, _>>()?;
            let device = view(&self.device)?;
            let fence = self.backend.view(&self.device, DType::Uint8, &[FENCE_BYTES])?;
            self.wait_idle(&fence)?;
            let fence_time = self.wait_idle(&fence)?;
            let started = Instant::now();
            for host in hosts.iter().cycle().take(usize::try_from(count).unwrap_or(usize::MAX)) {
                let (from, to) = if to_device { (host, &device) } else { (&device, host) };
                self.backend.copy(from, to)?;
            }
            let returned = started.elapsed().as_secs_f64();
            // A copy to a device may continue after the call returns; a copy to the host has finished.
            if !to_device {
                return Ok(returned);
            }
            self.wait_idle(&fence)?;
            Ok((started.elapsed().as_secs_f64() - fence_time).max(returned))
        };
        copy().map(|seconds: f64| seconds / count as f64).map_err(failed(action))
    }

    /// Reads a few bytes back, which waits for all earlier copies. Returns the seconds it took.
    fn wait_idle(&self, fence: &OrtTensor) -> Result<f64, BackendError> {
        let started = Instant::now();
        self.backend.read(fence, 0, &mut [0; FENCE_BYTES as usize])?;
        Ok(started.elapsed().as_secs_f64())
    }
}

/// Host memory, pinned or not; `None` if it cannot be pinned.
fn reserve_host(
    backend: &OrtBackend,
    memory: MemoryId,
    bytes: u64,
    pinned: bool,
) -> Result<Option<OrtBuffer>, MeasureError> {
    match pinned {
        false => reserve_touched(backend, bytes).map(Some),
        true => backend.reserve_pinned(memory, bytes).map_err(failed("pin host memory")),
    }
}

/// Reserves host memory and writes to it, so that its pages exist.
fn reserve_touched(backend: &OrtBackend, bytes: u64) -> Result<OrtBuffer, MeasureError> {
    let action = "reserve host memory";
    let buffer = backend.reserve(MemoryId::HOST, bytes).map_err(failed(action))?;
    let ones = vec![1u8; bytes.min(1 << 20) as usize];
    for offset in (0..bytes).step_by(1 << 20) {
        let now = (bytes - offset).min(1 << 20) as usize;
        backend.write(&buffer, offset, &ones[..now]).map_err(failed(action))?;
    }
    Ok(buffer)
}
