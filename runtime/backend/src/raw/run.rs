//! Run options: what stops a run from another thread.

use super::check;
use hpp_engine::BackendError;
use hpp_engine::port::Control;
use ort::session::builder::LoadCanceler;
use ort::sys::OrtRunOptions;
use std::ffi::CStr;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Stops runs and loads. Clones stop the same ones.
#[derive(Clone)]
pub struct OrtControl(Arc<Shared>);

struct Shared {
    options: NonNull<OrtRunOptions>,
    /// The same, for runs that are not waited for.
    unwaited: NonNull<OrtRunOptions>,
    /// Whether runs are to end: what fails then was stopped, in whatever words ONNX Runtime says so.
    stopped: AtomicBool,
    /// The load in progress, if any.
    load: Mutex<Option<LoadCanceler>>,
}

// SAFETY: ONNX Runtime reads the options' one flag while it runs and documents setting and unsetting it from other threads
// as the way to end a run; nothing else of them is ever changed.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl OrtControl {
    pub(crate) fn new() -> Result<Self, BackendError> {
        let stopped = AtomicBool::new(false);
        let shared = Shared { options: make()?, unwaited: make()?, stopped, load: Mutex::new(None) };
        // SAFETY: fresh options, in no run yet.
        unsafe { configure(shared.unwaited, c"disable_synchronize_execution_providers", c"1") }?;
        Ok(OrtControl(Arc::new(shared)))
    }

    /// Options of a run at whose end the host's arena gives back what nothing uses.
    pub(crate) fn that_shrinks_the_arena() -> Result<Self, BackendError> {
        let control = Self::new()?;
        // SAFETY: fresh options, in no run yet.
        unsafe { configure(control.0.options, c"memory.enable_memory_arena_shrinkage", c"cpu:0") }?;
        Ok(control)
    }

    pub(crate) fn options(&self) -> *const OrtRunOptions {
        self.0.options.as_ptr()
    }

    /// Options of runs at whose end the device still computes.
    pub(crate) fn unwaited(&self) -> *const OrtRunOptions {
        self.0.unwaited.as_ptr()
    }

    /// Whether runs under it were told to end.
    pub(crate) fn stopped(&self) -> bool {
        self.0.stopped.load(Ordering::SeqCst)
    }

    /// Names the load that [`stop`](Control::stop) should end, or that there is none any more.
    pub(crate) fn loading(&self, load: Option<LoadCanceler>) {
        let mut slot = self.0.load.lock().unwrap_or_else(PoisonError::into_inner);
        // Asked under the lock: a stop that comes later waits for it and finds the load.
        if let Some(load) = load.as_ref().filter(|_| self.stopped()) {
            let _ = load.cancel();
        }
        *slot = load;
    }
}

impl Control for OrtControl {
    fn stop(&self) {
        // First, so that a run that ends because of the flags below finds it set.
        self.0.stopped.store(true, Ordering::SeqCst);
        for options in [self.0.options, self.0.unwaited] {
            // SAFETY: the options live as long as `self`. The call can only fail for want of memory, and then there is no more to do.
            let _ = unsafe { check((ort::api().RunOptionsSetTerminate)(options.as_ptr()), String::new) };
        }
        if let Some(load) = self.0.load.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            let _ = load.cancel();
        }
    }

    fn resume(&self) {
        for options in [self.0.options, self.0.unwaited] {
            // SAFETY: as for `stop`.
            let _ = unsafe { check((ort::api().RunOptionsUnsetTerminate)(options.as_ptr()), String::new) };
        }
        self.0.stopped.store(false, Ordering::SeqCst);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        for options in [self.options, self.unwaited] {
            // SAFETY: the last clone is gone, and with it whoever could run with these options.
            unsafe { (ort::api().ReleaseRunOptions)(options.as_ptr()) };
        }
    }
}

fn make() -> Result<NonNull<OrtRunOptions>, BackendError> {
    let (mut options, doing) = (ptr::null_mut(), || "make run options".to_owned());
    // SAFETY: a place for one pointer.
    unsafe { check((ort::api().CreateRunOptions)(&mut options), doing) }?;
    let nothing = || BackendError::Runtime { doing: doing(), cause: "ONNX Runtime returned nothing".into() };
    NonNull::new(options).ok_or_else(nothing)
}

/// Adds an entry to options.
///
/// # Safety
/// They must be alive and in no run.
unsafe fn configure(options: NonNull<OrtRunOptions>, key: &CStr, value: &CStr) -> Result<(), BackendError> {
    // SAFETY: the caller's promise; ONNX Runtime copies both texts.
    unsafe {
        let status = (ort::api().AddRunConfigEntry)(options.as_ptr(), key.as_ptr(), value.as_ptr());
        check(status, || format!("set {key:?} for runs"))
    }
}
