//! Memory that tensors lie in: pages of the host, or a block of a device.

use super::device::DeviceMemory;
use crate::os::Pages;
use hpp_engine::BackendError;
use std::ffi::c_void;
use std::rc::Rc;

/// A piece of memory, kept alive by every buffer, tensor and binding that uses it.
///
/// Not `Send`: reads and writes from Rust happen on the thread that also runs the sessions bound to it, and a run is over when
/// it returns, so neither can overlap the other.
#[derive(Clone)]
pub(crate) enum Memory {
    /// The host's.
    Host(Rc<HostMemory>),
    /// A device's.
    Device(Rc<DeviceMemory>),
}

impl Memory {
    /// Where it begins, in the addresses of whoever has it.
    pub fn address(&self) -> *mut c_void {
        match self {
            Memory::Host(host) => host.address().cast(),
            Memory::Device(device) => device.address(),
        }
    }

    /// Its bytes.
    pub fn len(&self) -> u64 {
        match self {
            Memory::Host(host) => host.len() as u64,
            Memory::Device(device) => device.len(),
        }
    }
}

/// Pages of the host, zero until written.
pub(crate) struct HostMemory(Pages);

impl HostMemory {
    pub fn reserve(bytes: u64) -> Result<Self, BackendError> {
        let out = |cause: String| BackendError::OutOfMemory { bytes, place: "host memory".into(), cause };
        let bytes = usize::try_from(bytes).map_err(|_| out("more than an address can name".into()))?;
        Ok(HostMemory(Pages::reserve(bytes).map_err(|error| out(error.to_string()))?))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Where the bytes are, for ONNX Runtime to read and write while it runs.
    pub fn address(&self) -> *mut u8 {
        self.0.address()
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        let offset = self.within(offset, bytes.len(), "written")?;
        // SAFETY: `within` checked that the range lies in the pages; `bytes` is a live slice and cannot overlap them, because
        // nothing hands out references to them; no run is using them (see `Memory`).
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address().add(offset), bytes.len()) };
        Ok(())
    }

    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        let offset = self.within(offset, bytes.len(), "read")?;
        // SAFETY: as for `write`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(self.address().add(offset), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies the first bytes to other pages.
    pub fn copy(&self, to: &HostMemory, bytes: u64) -> Result<(), BackendError> {
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let (from, into) = (self.within(0, length, "read")?, to.within(0, length, "written")?);
        // SAFETY: `within` checked both ranges; pages of different owners do not overlap, and `copy` allows for one owner; no
        // run is using them (see `Memory`).
        unsafe { std::ptr::copy(self.address().add(from), to.address().add(into), length) };
        Ok(())
    }

    fn within(&self, offset: u64, length: usize, doing: &str) -> Result<usize, BackendError> {
        let start = usize::try_from(offset).ok();
        let end = start.and_then(|start| start.checked_add(length));
        match (start, end) {
            (Some(start), Some(end)) if end <= self.len() => Ok(start),
            _ => Err(BackendError::Misfit {
                what: format!("{length} bytes at {offset}"),
                why: format!("they cannot be {doing}: the buffer has {}", self.len()),
            }),
        }
    }
}
