//! Memory of tensors: host pages, or a block of device memory.

use super::allocator::DeviceAllocator;
use super::check;
use crate::os::Pages;
use hpp_engine::BackendError;
use ort::sys::{self, OrtValue};
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::rc::Rc;

/// Parts of device memory start at multiples of this: kernels read words of 16 bytes.
const SLICE_ALIGNMENT: u64 = 16;

/// A block of memory, kept alive by every buffer, tensor and binding that uses it.
///
/// Not `Send`: the thread that runs the sessions bound to it also does all reads and writes from Rust, and a run on host memory has
/// finished when the call returns, so the two never overlap.
#[derive(Clone)]
pub(crate) enum Memory {
    /// On the host.
    Host(Rc<HostPages>),
    /// On a device, or pinned for one.
    Device(Rc<DeviceAllocation>),
}

impl Memory {
    /// Its address in the address space of its device.
    pub fn address(&self) -> *mut c_void {
        match self {
            Memory::Host(host) => host.address().cast(),
            Memory::Device(device) => device.address(),
        }
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        match self {
            Memory::Host(host) => host.len() as u64,
            Memory::Device(device) => device.len(),
        }
    }
}

/// Host pages, zero until written, or part of them.
pub(crate) struct HostPages {
    pages: Rc<Pages>,
    /// Where it starts in the pages. Invariant: `start + length` is at most their length.
    start: usize,
    length: usize,
}

impl HostPages {
    pub fn reserve(bytes: u64) -> Result<Self, BackendError> {
        let out = |cause: String| BackendError::OutOfMemory { bytes, place: "host memory".into(), cause };
        let bytes = usize::try_from(bytes).map_err(|_| out("it does not fit the address space".into()))?;
        let pages = Pages::reserve(bytes).map_err(|error| out(error.to_string()))?;
        Ok(HostPages::from(pages))
    }

    /// A part of these pages, which keeps them alive. `None` if the range does not lie within them.
    pub fn slice(&self, offset: u64, bytes: u64) -> Option<Self> {
        let length = usize::try_from(bytes).ok()?;
        let offset = self.within(offset, length, "shared").ok()?;
        Some(HostPages { pages: Rc::clone(&self.pages), start: self.start + offset, length })
    }

    /// The pages that it is part of.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Asks the system to read a part of it ahead, if it lies on disk.
    pub fn prefetch(&self, offset: u64, bytes: u64) {
        let [offset, bytes] = [offset, bytes].map(|number| usize::try_from(number).unwrap_or(usize::MAX));
        if offset < self.length {
            self.pages.prefetch(self.start + offset, bytes.min(self.length - offset));
        }
    }

    pub fn len(&self) -> usize {
        self.length
    }

    /// The address, which ONNX Runtime reads and writes during runs.
    pub fn address(&self) -> *mut u8 {
        // SAFETY: the start lies in the pages, or at their end, by the invariant of `start`.
        unsafe { self.pages.address().add(self.start) }
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
        // SAFETY: as in `write`, in the other direction.
        unsafe { std::ptr::copy_nonoverlapping(self.address().add(offset), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies its first `bytes` to other pages.
    pub fn copy(&self, to: &HostPages, bytes: u64) -> Result<(), BackendError> {
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let (from, into) = (self.within(0, length, "read")?, to.within(0, length, "written")?);
        // SAFETY: `within` checked both ranges; `copy` permits that both are the same pages; no run is using them (see `Memory`).
        unsafe { std::ptr::copy(self.address().add(from), to.address().add(into), length) };
        Ok(())
    }

    /// The offset as `usize`, if the range lies in the pages.
    fn within(&self, offset: u64, length: usize, doing: &str) -> Result<usize, BackendError> {
        let start = usize::try_from(offset).ok();
        let end = start.and_then(|start| start.checked_add(length));
        match (start, end) {
            (Some(start), Some(end)) if end <= self.len() => Ok(start),
            _ => Err(BackendError::Misfit {
                what: format!("{length} bytes at {offset}"),
                why: format!("they cannot be {doing}: the buffer has {} bytes", self.len()),
            }),
        }
    }
}

impl From<Pages> for HostPages {
    fn from(pages: Pages) -> Self {
        HostPages { start: 0, length: pages.len(), pages: Rc::new(pages) }
    }
}

/// A block that a device's allocator made, or part of one.
pub(crate) struct DeviceAllocation {
    block: Rc<DeviceBlock>,
    /// Where it starts in the block. Invariant: `start + bytes` is at most the block's length, and `start` is 0 where addresses are handles
    /// of buffers.
    start: u64,
    bytes: u64,
}

/// A block that a device's allocator made.
struct DeviceBlock {
    /// Owns the block: a tensor of bytes.
    tensor: NonNull<OrtValue>,
    address: *mut c_void,
    allocator: Rc<DeviceAllocator>,
}

impl DeviceAllocation {
    /// Allocates a block; its contents are undefined.
    pub fn reserve(allocator: Option<&Rc<DeviceAllocator>>, bytes: u64) -> Result<Self, BackendError> {
        let out = |cause: String| BackendError::OutOfMemory {
            bytes,
            place: "memory of a device, or host memory pinned for it".into(),
            cause,
        };
        let allocator = allocator.cloned().ok_or_else(|| out("there is no device".into()))?;
        // Devices copy whole words: WebGPU four bytes at a time.
        let bytes = bytes.max(1).checked_next_multiple_of(16).ok_or_else(|| out("too large".into()))?;
        let shape = [i64::try_from(bytes).map_err(|_| out("more than a tensor can hold".into()))?];
        let (mut block, mut address) = (ptr::null_mut(), ptr::null_mut());
        let lock = allocator.lock.clone();
        let _lock = lock.acquire();
        // SAFETY: the allocator is alive; the shape has one size; each output has room for one pointer.
        unsafe {
            let kind = sys::ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
            let made = (ort::api().CreateTensorAsOrtValue)(allocator.as_ptr(), shape.as_ptr(), 1, kind, &mut block);
            ort::Error::result_from_status(made).map_err(|error| out(error.message().to_owned()))?;
        }
        let owned = NonNull::new(block).ok_or_else(|| out("ONNX Runtime returned nothing".into()))?;
        let mut made = DeviceBlock { tensor: owned, address, allocator };
        // SAFETY: the block is a live tensor of numbers.
        unsafe {
            check((ort::api().GetTensorMutableData)(block, &mut address), || {
                "get the address of a device allocation".into()
            })?;
        }
        made.address = address;
        Ok(DeviceAllocation { block: Rc::new(made), start: 0, bytes })
    }

    /// A part of this allocation, which keeps the block alive. `None` if the range does not lie within it, if kernels cannot read whole
    /// words at the start of the range, or on devices without streams, whose addresses are handles of buffers.
    pub fn slice(&self, offset: u64, bytes: u64) -> Option<Self> {
        self.block.allocator.streams.as_ref()?;
        let fits = offset.checked_add(bytes)? <= self.bytes && offset.is_multiple_of(SLICE_ALIGNMENT);
        fits.then(|| DeviceAllocation { block: Rc::clone(&self.block), start: self.start + offset, bytes })
    }

    pub fn address(&self) -> *mut c_void {
        // SAFETY: by the invariant of `start` the result lies in the block or at its end, or is the block's own address.
        unsafe { self.block.address.byte_add(self.start as usize) }
    }

    pub fn len(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        // Runs and copies in progress may use it. If waiting fails, the device has failed, and nothing runs there.
        let _ = self.allocator.streams.as_ref().map(|streams| streams.wait());
        let _lock = self.allocator.lock.acquire();
        // SAFETY: this is the only owner; views of it held an `Rc` of this and are gone. The allocator outlives it.
        unsafe { (ort::api().ReleaseValue)(self.tensor.as_ptr()) };
    }
}
