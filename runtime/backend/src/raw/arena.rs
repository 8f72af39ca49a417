//! One arena of host memory for all sessions, so that a second partition reuses what the first has let go.

use super::{check, failed};
use hpp_engine::BackendError;
use ort::AsPointer;
use ort::environment::Environment;
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use std::ptr;

/// Settings by the names ONNX Runtime has for them.
const SETTINGS: [(&std::ffi::CStr, usize); 1] = [
    // Grow by what is asked for: doubling would double the peak of a long prompt.
    (c"arena_extend_strategy", 1),
];

/// Makes the arena. Sessions use it when they are made with `session.use_env_allocators=1`.
pub(crate) fn share(environment: &Environment) -> Result<(), BackendError> {
    let doing = || "make the shared arena".to_owned();
    let info = MemoryInfo::new(AllocationDevice::CPU, 0, AllocatorType::Arena, MemoryType::Default)
        .map_err(failed(doing()))?;
    let (keys, values) = (SETTINGS.map(|(key, _)| key.as_ptr()), SETTINGS.map(|(_, value)| value));
    let mut settings = ptr::null_mut();
    // SAFETY: keys and values have the length given; ONNX Runtime copies the settings and the memory description; the
    // environment is alive.
    unsafe {
        let api = ort::api();
        check((api.CreateArenaCfgV2)(keys.as_ptr(), values.as_ptr(), keys.len(), &mut settings), doing)?;
        let made = (api.CreateAndRegisterAllocator)(environment.ptr().cast_mut(), info.ptr(), settings);
        (api.ReleaseArenaCfg)(settings);
        check(made, doing)
    }
}
