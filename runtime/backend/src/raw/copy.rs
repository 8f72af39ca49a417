//! Blocking copies between memory spaces.

use super::check;
use super::copier::{Copier, PendingCopies, WeightCopy};
use super::copy_values::copy_values;
use super::memory::Memory;
use super::space::{FENCE_BYTES, MemorySpace};
use super::value::Value;
use hpp_engine::BackendError;
use hpp_schema::DType;
use ort::environment::Environment;
use std::rc::Rc;

/// Copies a tensor into another of the same type and shape, in any memory spaces, and waits for the copy.
pub(crate) fn copy(environment: &Environment, from: &Value, to: &Value) -> Result<(), BackendError> {
    if from.dtype != to.dtype || from.dims != to.dims {
        return Err(BackendError::Misfit {
            what: format!("a copy of {} {:?}", from.dtype, from.dims.as_slice()),
            why: format!("its target is {} {:?}", to.dtype, to.dims.as_slice()),
        });
    }
    let _lock = from.lock.or(&to.lock).acquire();
    // SAFETY: both are live values of equal size.
    unsafe { check(copy_values(environment, from.as_ptr(), to.as_ptr()), || "copy a tensor between memories".into()) }
}

/// Waits for runs that returned early, on a device that reports no timing, by reading a few bytes back.
pub(crate) fn wait_for_untimed_runs(environment: &Environment, space: &MemorySpace) -> Result<(), BackendError> {
    let Some((from, to)) = fence(space)? else { return Ok(()) };
    copy(environment, &from, &to)
}

/// A tensor on a device and one on the host. Copying the first to the second waits for runs that returned early. `None` if the device
/// reports timing.
fn fence(space: &MemorySpace) -> Result<Option<(Value, Value)>, BackendError> {
    let Some((on_device, on_host)) = &space.fence else { return Ok(None) };
    let from = Value::view(&Memory::Device(Rc::clone(on_device)), space, DType::Uint8, &[FENCE_BYTES])?;
    let to = Value::view(on_host, &MemorySpace::host(), DType::Uint8, &[FENCE_BYTES])?;
    Ok(Some((from, to)))
}

/// Starts to wait, on the device's copy thread, for runs that returned early. `None` if the device reports timing.
pub(crate) fn watch_untimed_runs(
    copier: &Rc<Copier>,
    space: &MemorySpace,
) -> Result<Option<PendingCopies>, BackendError> {
    let watched = |(from, to)| copier.begin(vec![WeightCopy { from, to, read: None }], space.lock.clone());
    Ok(fence(space)?.map(watched))
}
