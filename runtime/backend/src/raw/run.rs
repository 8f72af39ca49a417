//! Run options, through which another thread can stop a run.

use super::check;
use hpp_engine::BackendError;
use hpp_engine::port::Control;
use ort::session::builder::LoadCanceler;
use ort::sys::OrtRunOptions;
use std::ffi::CStr;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Stops runs and loads. Clones control the same runs.
#[derive(Clone)]
pub struct OrtControl(Arc<ControlState>);

struct ControlState {
    options: NonNull<OrtRunOptions>,
    /// The options of runs that return before the device has finished.
    unsynchronized: NonNull<OrtRunOptions>,
    /// The options of runs after which the host's arena frees unused memory.
    shrinking: NonNull<OrtRunOptions>,
    /// Whether a stop was requested. A run that fails while this is set was stopped, whatever ONNX Runtime's message says.
    stopped: AtomicBool,
    /// The load in progress, if any.
    load: Mutex<Option<LoadCanceler>>,
}

// SAFETY: during a run ONNX Runtime reads one flag of the options, and documents that other threads set and unset it to end a run.
// Nothing else of the options is changed after construction.
unsafe impl Send for ControlState {}
// SAFETY: as above.
unsafe impl Sync for ControlState {}

impl OrtControl {
    pub(crate) fn new() -> Result<Self, BackendError> {
        let stopped = AtomicBool::new(false);
        let (options, unsynchronized, shrinking) = (new_options()?, new_options()?, new_options()?);
        let state = ControlState { options, unsynchronized, shrinking, stopped, load: Mutex::new(None) };
        // SAFETY: fresh options that no run uses yet.
        unsafe {
            configure(state.unsynchronized, c"disable_synchronize_execution_providers", c"1")?;
            configure(state.shrinking, c"memory.enable_memory_arena_shrinkage", c"cpu:0")?;
        }
        Ok(OrtControl(Arc::new(state)))
    }

    pub(crate) fn options(&self) -> *const OrtRunOptions {
        self.0.options.as_ptr()
    }

    /// The options of runs that return before the device has finished.
    pub(crate) fn unsynchronized(&self) -> *const OrtRunOptions {
        self.0.unsynchronized.as_ptr()
    }

    /// The options of runs after which the host's arena frees unused memory.
    pub(crate) fn shrinking(&self) -> *const OrtRunOptions {
        self.0.shrinking.as_ptr()
    }

    /// Whether a stop was requested.
    pub(crate) fn stopped(&self) -> bool {
        self.0.stopped.load(Ordering::SeqCst)
    }

    /// Sets the load that [`stop`](Control::stop) cancels; `None` when it has ended.
    pub(crate) fn loading(&self, load: Option<LoadCanceler>) {
        let mut slot = self.0.load.lock().unwrap_or_else(PoisonError::into_inner);
        // Checked with the lock held: a later stop waits for the lock and finds the load.
        if let Some(load) = load.as_ref().filter(|_| self.stopped()) {
            let _ = load.cancel();
        }
        *slot = load;
    }
}

impl Control for OrtControl {
    fn stop(&self) {
        // Set first, so that a run that the flags below end finds it set.
        self.0.stopped.store(true, Ordering::SeqCst);
        for options in self.0.all() {
            // SAFETY: the options live as long as `self`. The call fails only if memory runs out, and nothing else could stop the run.
            let _ = unsafe { check((ort::api().RunOptionsSetTerminate)(options.as_ptr()), String::new) };
        }
        if let Some(load) = self.0.load.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            let _ = load.cancel();
        }
    }

    fn resume(&self) {
        for options in self.0.all() {
            // SAFETY: as in `stop`.
            let _ = unsafe { check((ort::api().RunOptionsUnsetTerminate)(options.as_ptr()), String::new) };
        }
        self.0.stopped.store(false, Ordering::SeqCst);
    }
}

impl ControlState {
    fn all(&self) -> [NonNull<OrtRunOptions>; 3] {
        [self.options, self.unsynchronized, self.shrinking]
    }
}

impl Drop for ControlState {
    fn drop(&mut self) {
        for options in self.all() {
            // SAFETY: the last clone is gone, so no run can use these options.
            unsafe { (ort::api().ReleaseRunOptions)(options.as_ptr()) };
        }
    }
}

fn new_options() -> Result<NonNull<OrtRunOptions>, BackendError> {
    let (mut options, doing) = (ptr::null_mut(), || "make run options".to_owned());
    // SAFETY: `options` has room for one pointer.
    unsafe { check((ort::api().CreateRunOptions)(&mut options), doing) }?;
    let nothing = || BackendError::Runtime { doing: doing(), cause: "ONNX Runtime returned nothing".into() };
    NonNull::new(options).ok_or_else(nothing)
}

/// Adds an entry to run options.
///
/// # Safety
/// The options must be alive, and no run may use them.
unsafe fn configure(options: NonNull<OrtRunOptions>, key: &CStr, value: &CStr) -> Result<(), BackendError> {
    // SAFETY: the caller's promise; ONNX Runtime copies both strings.
    unsafe {
        let status = (ort::api().AddRunConfigEntry)(options.as_ptr(), key.as_ptr(), value.as_ptr());
        check(status, || format!("set {key:?} for runs"))
    }
}
