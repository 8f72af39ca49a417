//! Memory spaces: the host's memory and that of each device, with the allocator and the lock of each.

use super::allocator::DeviceAllocator;
use super::check;
use super::lock::DeviceLock;
use super::memory::{DeviceAllocation, HostPages, Memory};
use crate::cuda::streams::Streams;
use hpp_engine::BackendError;
use hpp_engine::port::MemoryId;
use ort::AsPointer;
use ort::environment::Environment;
use ort::memory::MemoryInfo;
use ort::sys::{self, OrtMemoryInfo};
use std::ffi::CStr;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

/// Bytes of a fence read.
pub(super) const FENCE_BYTES: u64 = 16;

/// One memory space: its id in the engine, and how ONNX Runtime describes it.
pub(crate) struct MemorySpace {
    pub id: MemoryId,
    pub lock: DeviceLock,
    description: Description,
    /// `None` for the host.
    allocator: Option<Rc<DeviceAllocator>>,
    /// For devices whose runs return early and report no timing: [`FENCE_BYTES`] on the device and on the host. Copying them waits for
    /// those runs.
    pub(super) fence: Option<(Rc<DeviceAllocation>, Memory)>,
    /// The streams of a device that computes while the host goes on.
    pub streams: Option<Arc<Streams>>,
}

/// ONNX Runtime's description of a memory.
enum Description {
    Host(MemoryInfo<'static>),
    /// Belongs to the device, which lives as long as the environment, which the allocator keeps. It cannot be copied: ONNX Runtime copies
    /// descriptions by name and does not know the names that plug-ins give their memory.
    Device(NonNull<OrtMemoryInfo>),
}

impl Description {
    /// The description of a device's memory; `None` if it has no memory of that kind.
    fn of(device: &ort::device::Device<'_>, kind: sys::OrtDeviceMemoryType) -> Option<Self> {
        // SAFETY: the device is alive.
        let info = unsafe { (ort::api().EpDevice_MemoryInfo)(device.ptr(), kind) };
        NonNull::new(info.cast_mut()).map(Description::Device)
    }
}

impl MemorySpace {
    /// The host's memory.
    pub fn host() -> Self {
        MemorySpace {
            id: MemoryId::HOST,
            lock: DeviceLock::default(),
            description: Description::Host(MemoryInfo::default()),
            allocator: None,
            fence: None,
            streams: None,
        }
    }

    /// The memory of a device.
    pub fn device(
        id: MemoryId,
        environment: &Environment,
        device: &ort::device::Device<'_>,
        lock: DeviceLock,
        streams: Option<Arc<Streams>>,
    ) -> Result<Self, BackendError> {
        let kind = sys::OrtDeviceMemoryType::OrtDeviceMemoryType_DEFAULT;
        let description = Description::of(device, kind).ok_or_else(|| BackendError::Runtime {
            doing: "use a device's memory".into(),
            cause: "its provider describes none".into(),
        })?;
        let allocator = DeviceAllocator::of(environment, device, kind, lock.clone(), streams.clone())?;
        let mut space =
            MemorySpace { id, lock, description, allocator: Some(Rc::new(allocator)), fence: None, streams };
        if space.streams.is_none() {
            let host = Memory::Host(Rc::new(HostPages::reserve(FENCE_BYTES)?));
            space.fence = Some((Rc::new(space.reserve(FENCE_BYTES)?), host));
        }
        Ok(space)
    }

    /// Host memory pinned for copies to and from this device; `None` if its provider has none.
    pub fn pinned(&self, environment: &Environment) -> Result<Option<Self>, BackendError> {
        let Some(own) = &self.allocator else { return Ok(None) };
        let Some(device) = environment.devices().find(|device| ptr::eq(device.ptr(), own.device())) else {
            return Ok(None);
        };
        let kind = sys::OrtDeviceMemoryType::OrtDeviceMemoryType_HOST_ACCESSIBLE;
        let Some(description) = Description::of(&device, kind) else { return Ok(None) };
        let allocator = DeviceAllocator::of(environment, &device, kind, self.lock.clone(), self.streams.clone())?;
        let (lock, allocator) = (self.lock.clone(), Some(Rc::new(allocator)));
        Ok(Some(MemorySpace { id: MemoryId::HOST, lock, description, allocator, fence: None, streams: None }))
    }

    /// Allocates a block with this space's allocator; its contents are undefined.
    pub fn reserve(&self, bytes: u64) -> Result<DeviceAllocation, BackendError> {
        DeviceAllocation::reserve(self.allocator.as_ref(), bytes)
    }

    pub fn info(&self) -> *const OrtMemoryInfo {
        match &self.description {
            Description::Host(info) => info.ptr(),
            Description::Device(info) => info.as_ptr(),
        }
    }

    /// Whether this is the memory of a device.
    pub fn belongs_to(&self, device: &ort::device::Device<'_>) -> bool {
        self.allocator.as_ref().is_some_and(|allocator| ptr::eq(allocator.device(), device.ptr()))
    }

    /// The bytes in use and in total; `None` for the host.
    pub fn memory_use(&self) -> Option<hpp_engine::port::DeviceMemoryInfo> {
        let allocator = self.allocator.as_ref()?;
        Some(hpp_engine::port::DeviceMemoryInfo {
            name: self.name(),
            used: allocator.stat(c"InUse"),
            total: allocator.stat(c"Limit"),
        })
    }

    /// ONNX Runtime's name of this memory, and the number of its device.
    fn name(&self) -> String {
        let (mut name, mut number) = (ptr::null(), 0);
        // SAFETY: the description is alive, and its name, a string, lives as long. Neither call fails: both read a field.
        unsafe {
            let _ = check((ort::api().MemoryInfoGetName)(self.info(), &mut name), String::new);
            let _ = check((ort::api().MemoryInfoGetId)(self.info(), &mut number), String::new);
            let name = if name.is_null() { "".into() } else { CStr::from_ptr(name).to_string_lossy() };
            format!("{name}:{number}")
        }
    }
}
