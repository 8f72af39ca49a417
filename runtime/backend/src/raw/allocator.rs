//! Allocators of device memory, and of host memory pinned for a device, shared by every session on the device.
//!
//! ONNX Runtime keeps one shared allocator for each device and kind of memory. `CreateSharedAllocator` replaces it and frees the one
//! before, even while blocks of that one are in use. So a process creates each allocator once and hands out references.

use super::check;
use super::lock::DeviceLock;
use crate::cuda::streams::Streams;
use hpp_engine::BackendError;
use ort::AsPointer;
use ort::environment::Environment;
use ort::sys::{self, OrtAllocator, OrtEpDevice};
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A shared allocator of ONNX Runtime for one device and one kind of memory. Its blocks wait for `streams` and take `lock` before they are
/// freed.
pub(crate) struct DeviceAllocator {
    shared: Arc<SharedAllocator>,
    pub lock: DeviceLock,
    pub streams: Option<Arc<Streams>>,
}

impl DeviceAllocator {
    /// The device's allocator for this kind of memory, created if nobody uses it.
    pub fn of(
        environment: &Environment,
        device: &ort::device::Device<'_>,
        kind: sys::OrtDeviceMemoryType,
        lock: DeviceLock,
        streams: Option<Arc<Streams>>,
    ) -> Result<Self, BackendError> {
        let mut in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (device.ptr() as usize, kind as i32);
        let shared = match in_use.get(&key).and_then(Weak::upgrade) {
            Some(shared) => shared,
            None => {
                let shared = Arc::new(SharedAllocator::new(environment, device, kind)?);
                in_use.insert(key, Arc::downgrade(&shared));
                shared
            }
        };
        Ok(DeviceAllocator { shared, lock, streams })
    }

    pub fn as_ptr(&self) -> *mut OrtAllocator {
        self.shared.allocator.as_ptr()
    }

    /// The device whose allocator it is.
    pub fn device(&self) -> *const OrtEpDevice {
        self.shared.device
    }

    /// One statistic, if the allocator keeps any.
    pub fn stat(&self, key: &CStr) -> Option<u64> {
        // SAFETY: the allocator lives as long as `self`. Some providers leave `GetStats` null, and ONNX Runtime calls it without a check,
        // so it is checked here; the field exists from version 23 on.
        unsafe {
            let table = self.as_ptr();
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

/// Allocators in use, by the address of the device and the kind of memory.
type InUse = BTreeMap<(usize, i32), Weak<SharedAllocator>>;
static IN_USE: Mutex<InUse> = Mutex::new(BTreeMap::new());

struct SharedAllocator {
    environment: Environment,
    device: *const OrtEpDevice,
    kind: sys::OrtDeviceMemoryType,
    allocator: NonNull<OrtAllocator>,
}

// SAFETY: ONNX Runtime's shared allocators are used by sessions on any threads, and the device lives as long as the environment.
unsafe impl Send for SharedAllocator {}
// SAFETY: as above.
unsafe impl Sync for SharedAllocator {}

impl SharedAllocator {
    fn new(
        environment: &Environment,
        device: &ort::device::Device<'_>,
        kind: sys::OrtDeviceMemoryType,
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
        Ok(SharedAllocator { environment: environment.clone(), device: device.ptr(), kind, allocator })
    }
}

impl Drop for SharedAllocator {
    fn drop(&mut self) {
        // While this is locked, nobody creates an allocator. One that was created after the last reference to this was dropped has replaced
        // this.
        let in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (self.device as usize, self.kind as i32);
        if in_use.get(&key).is_some_and(|other| other.strong_count() > 0) {
            return;
        }
        // SAFETY: `new` created it; every block of it held a reference to this and is gone. A failed release leaks the allocator only.
        unsafe {
            let status = (ort::api().ReleaseSharedAllocator)(self.environment.ptr().cast_mut(), self.device, self.kind);
            let _ = check(status, String::new);
        }
    }
}
