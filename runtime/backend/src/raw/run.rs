//! Run options: what stops a run from another thread.

use super::check;
use hpp_engine::BackendError;
use hpp_engine::port::Control;
use ort::session::builder::LoadCanceler;
use ort::sys::OrtRunOptions;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

/// Stops runs and loads. Clones stop the same ones.
#[derive(Clone)]
pub struct OrtControl(Arc<Shared>);

struct Shared {
    options: NonNull<OrtRunOptions>,
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
        let mut options = ptr::null_mut();
        // SAFETY: a place for one pointer.
        unsafe { check((ort::api().CreateRunOptions)(&mut options), || "make run options".into()) }?;
        let options = NonNull::new(options).ok_or_else(|| BackendError::Runtime {
            doing: "make run options".into(),
            cause: "ONNX Runtime returned nothing".into(),
        })?;
        Ok(OrtControl(Arc::new(Shared { options, load: Mutex::new(None) })))
    }

    /// Options of a run at whose end the host's arena gives back what nothing uses.
    pub(crate) fn that_shrinks_the_arena() -> Result<Self, BackendError> {
        let control = Self::new()?;
        let (key, host) = (c"memory.enable_memory_arena_shrinkage", c"cpu:0");
        // SAFETY: the options are alive and in no run yet; ONNX Runtime copies both texts.
        unsafe {
            let status = (ort::api().AddRunConfigEntry)(control.0.options.as_ptr(), key.as_ptr(), host.as_ptr());
            check(status, || "ask for a smaller arena".into())
        }?;
        Ok(control)
    }

    pub(crate) fn options(&self) -> *const OrtRunOptions {
        self.0.options.as_ptr()
    }

    /// Names the load that [`stop`](Control::stop) should end, or that there is none any more.
    pub(crate) fn loading(&self, load: Option<LoadCanceler>) {
        *self.0.load.lock().unwrap_or_else(PoisonError::into_inner) = load;
    }
}

impl Control for OrtControl {
    fn stop(&self) {
        // SAFETY: the options live as long as `self`. The call can only fail for want of memory, and then there is no more to do.
        let _ = unsafe { check((ort::api().RunOptionsSetTerminate)(self.0.options.as_ptr()), String::new) };
        if let Some(load) = self.0.load.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            let _ = load.cancel();
        }
    }

    fn resume(&self) {
        // SAFETY: as for `stop`.
        let _ = unsafe { check((ort::api().RunOptionsUnsetTerminate)(self.0.options.as_ptr()), String::new) };
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the last clone is gone, and with it whoever could run with these options.
        unsafe { (ort::api().ReleaseRunOptions)(self.options.as_ptr()) };
    }
}
