//! Allocators of device memory, and of host memory pinned for a device, shared by every session on the device.

use super::check;
use super::lock::DeviceLock;
use crate::cuda::streams::Streams;
use hpp_engine::BackendError;
use ort::AsPointer;
use ort::environment::Environment;
use ort::sys::{self, OrtAllocator, OrtEpDevice};
use std::ffi::CStr;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// A shared allocator of ONNX Runtime for one device and one kind of memory.
pub(crate) struct DeviceAllocator {
    environment: Environment,
    pub device: *const OrtEpDevice,
    kind: sys::OrtDeviceMemoryType,
    allocator: NonNull<OrtAllocator>,
    pub lock: DeviceLock,
    pub streams: Option<Arc<Streams>>,
}

impl DeviceAllocator {
    /// Creates the allocator. Its blocks wait for `streams` and take `lock` before they are freed.
    pub fn new(
        environment: &Environment,
        device: &ort::device::Device<'_>,
        kind: sys::OrtDeviceMemoryType,
        lock: DeviceLock,
        streams: Option<Arc<Streams>>,
    ) -> Result<Self, BackendError> {
        let mut allocator = ptr::null_mut();
        // SAFETY: the device comes from this environment, which lives as long as the process; `allocator` has room for one pointer.
        unsafe {
            let status = (ort::api().CreateSharedAllocator)(
                environment.ptr().cast_mut(),
                device.ptr(),
                kind,
                sys::OrtAllocatorType::OrtDeviceAllocator,
                ptr::null(),
                &mut allocator,
            );
            check(status, || "make an allocator for the device".into())
        }?;
        let allocator = NonNull::new(allocator).ok_or_else(|| BackendError::Runtime {
            doing: "make an allocator for the device".into(),
            cause: "the provider has none".into(),
        })?;
        Ok(DeviceAllocator { environment: environment.clone(), device: device.ptr(), kind, allocator, lock, streams })
    }

    pub fn as_ptr(&self) -> *mut OrtAllocator {
        self.allocator.as_ptr()
    }

    /// One statistic, if the allocator keeps any.
    pub fn stat(&self, key: &CStr) -> Option<u64> {
        // SAFETY: the allocator lives as long as `self`. Some providers leave `GetStats` null, and ONNX Runtime calls it without a check,
        // so it is checked here; the field exists from version 23 on.
        unsafe {
            let table = self.allocator.as_ptr();
            if (*table).version < 23 || (*table).GetStats.is_none() {
                return None;
            }
            let mut stats = ptr::null_mut();
            check((ort::api().AllocatorGetStats)(table, &mut stats), String::new).ok()?;
            let value = (ort::api().GetKeyValue)(stats, key.as_ptr());
            let number = (!value.is_null()).then(|| CStr::from_ptr(value).to_str().ok()?.parse().ok()).flatten();
            (ort::api().ReleaseKeyValuePairs)(stats);
            number
        }
    }
}

impl Drop for DeviceAllocator {
    fn drop(&mut self) {
        // SAFETY: `new` created it; every block of it held an `Rc` of this and is gone. A failed release leaks the allocator only.
        unsafe {
            let status = (ort::api().ReleaseSharedAllocator)(self.environment.ptr().cast_mut(), self.device, self.kind);
            let _ = check(status, String::new);
        }
    }
}
