//! The raw layer: one small owner for each ONNX Runtime object, each call checked. All `unsafe` of HPP that speaks to ONNX Runtime is here.
//!
//! `ort` provides the environment, the session builder and logging; values, bindings and copies are ours, because the safe ones
//! deadlock on borrowed tensors and allocate for each output of each run. Objects here belong to one thread: none is `Send`
//! ([`copier`] says what crosses to its thread all the same).

pub(crate) mod arena;
pub(crate) mod assignment;
pub(crate) mod binding;
pub(crate) mod copier;
pub(crate) mod device;
pub(crate) mod dtype;
pub(crate) mod library;
pub(crate) mod memory;
pub(crate) mod run;
pub(crate) mod value;

use hpp_engine::BackendError;
use ort::sys::OrtStatusPtr;
use std::sync::Arc;

/// Fills host memory so that the bytes of a weight are in it, where whoever made this knows.
pub(crate) type Fill = Arc<dyn Fn(&mut [u8]) -> Result<(), String> + Send + Sync>;

/// Turns a status into a result that says what was being done.
///
/// # Safety
/// `status` must come from an ONNX Runtime call and must not have been released.
pub(crate) unsafe fn check(status: OrtStatusPtr, doing: impl FnOnce() -> String) -> Result<(), BackendError> {
    // SAFETY: the caller hands over a fresh status; `ort` reads and releases it.
    unsafe { ort::Error::result_from_status(status) }
        .map_err(|error| BackendError::Runtime { doing: doing(), cause: error.message().to_owned() })
}

/// An error of `ort` itself, with what was being done.
pub(crate) fn failed<R>(doing: impl Into<String>) -> impl FnOnce(ort::Error<R>) -> BackendError {
    let doing = doing.into();
    move |error| BackendError::Runtime { doing, cause: error.message().to_owned() }
}
