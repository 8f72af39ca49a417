//! One call of ONNX Runtime's copy between memory spaces.

use ort::AsPointer;
use ort::environment::Environment;
use ort::sys::{self, OrtValue};
use std::ptr;

/// Copies one value into another.
///
/// # Safety
/// Both must be alive and of one type and shape.
pub(super) unsafe fn copy_values(
    environment: &Environment,
    from: *mut OrtValue,
    to: *mut OrtValue,
) -> sys::OrtStatusPtr {
    let (source, mut target) = ([from.cast_const()], [to.cast_const()]);
    // SAFETY: the caller's promise; the count of 1 matches both arrays. Without a stream the copy is complete when the call returns, or
    // ordered before whatever the device does next.
    unsafe {
        let environment = environment.ptr().cast_mut();
        (ort::api().CopyTensors)(environment, source.as_ptr(), target.as_mut_ptr(), ptr::null_mut(), 1)
    }
}
