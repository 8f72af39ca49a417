//! Safe wrappers of the C API of ONNX Runtime: one owner type per object, every status checked. All `unsafe` calls of ONNX Runtime are
//! here.
//!
//! `ort` provides the environment, the session builder and logging. Values, bindings and copies are implemented here, because those of
//! `ort` deadlock on borrowed tensors and allocate for each output of each run. Types with pointers are not `Send`, except the addresses of
//! copies ([`copier`]), run options ([`run`]) and shared allocators ([`allocator`]).

mod allocator;
pub(crate) mod arena;
pub(crate) mod assignment;
pub(crate) mod binding;
pub(crate) mod copier;
pub(crate) mod copy;
mod copy_values;
pub(crate) mod dtype;
pub(crate) mod library;
pub(crate) mod lock;
pub(crate) mod memory;
pub(crate) mod run;
pub(crate) mod session_memory;
pub(crate) mod space;
pub(crate) mod value;

use hpp_engine::BackendError;
use ort::sys::OrtStatusPtr;
use std::sync::Arc;

/// Reads a weight from its file into a staging buffer. The error is a message.
pub(crate) type ReadWeight = Arc<dyn Fn(&mut [u8]) -> Result<(), String> + Send + Sync>;

/// Converts a status to a result. `doing` names the operation for the error.
///
/// # Safety
/// `status` must come from an ONNX Runtime call and must not have been released.
pub(crate) unsafe fn check(status: OrtStatusPtr, doing: impl FnOnce() -> String) -> Result<(), BackendError> {
    // SAFETY: the caller hands over a fresh status; `ort` reads and releases it.
    unsafe { ort::Error::result_from_status(status) }
        .map_err(|error| BackendError::Runtime { doing: doing(), cause: error.message().to_owned() })
}

/// Converts an error of `ort`. `doing` names the operation.
pub(crate) fn failed<R>(doing: impl Into<String>) -> impl FnOnce(ort::Error<R>) -> BackendError {
    let doing = doing.into();
    move |error| BackendError::Runtime { doing, cause: error.message().to_owned() }
}
