//! One arena of host memory for all sessions, so that a partition reuses memory that another has freed.

use super::{check, failed};
use hpp_engine::BackendError;
use ort::AsPointer;
use ort::environment::Environment;
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use std::ptr;

/// Arena settings by ONNX Runtime's names.
const SETTINGS: [(&std::ffi::CStr, usize); 1] = [
    // Grow by the requested size: doubling would double the peak of a long prompt.
    (c"arena_extend_strategy", 1),
];

/// Creates the arena. Sessions created with `session.use_env_allocators=1` use it.
pub(crate) fn share(environment: &Environment) -> Result<(), BackendError> {
    let doing = || "make the shared arena".to_owned();
    let info = MemoryInfo::new(AllocationDevice::CPU, 0, AllocatorType::Arena, MemoryType::Default)
        .map_err(failed(doing()))?;
    let (keys, values) = (SETTINGS.map(|(key, _)| key.as_ptr()), SETTINGS.map(|(_, value)| value));
    let mut settings = ptr::null_mut();
    // SAFETY: keys and values both have the given length; ONNX Runtime copies the settings and the memory description; the environment
    // is alive.
    unsafe {
        let api = ort::api();
        check((api.CreateArenaCfgV2)(keys.as_ptr(), values.as_ptr(), keys.len(), &mut settings), doing)?;
        let made = (api.CreateAndRegisterAllocator)(environment.ptr().cast_mut(), info.ptr(), settings);
        (api.ReleaseArenaCfg)(settings);
        check(made, doing)
    }
}
