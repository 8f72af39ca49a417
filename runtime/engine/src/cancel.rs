//! Stopping an engine from another thread or a signal handler's thread.

use crate::port::Control;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Stops the engine it was given to or came from: cheap to clone, usable from any thread.
#[derive(Clone, Default)]
pub struct CancelHandle(Arc<Shared>);

#[derive(Default)]
struct Shared {
    cancelled: AtomicBool,
    controls: Mutex<Vec<Box<dyn Stop>>>,
}

/// [`Control`] without its `Clone`, so that several backends' fit in one list.
trait Stop: Send + Sync {
    fn stop(&self);
    fn resume(&self);
}

impl<C: Control> Stop for C {
    fn stop(&self) {
        Control::stop(self);
    }
    fn resume(&self) {
        Control::resume(self);
    }
}

impl CancelHandle {
    /// A handle for [`EngineOptions::cancel`](crate::EngineOptions::cancel).
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets this handle stop runs under `control`.
    pub(crate) fn attach(&self, control: impl Control) {
        let mut controls = self.0.controls.lock().unwrap_or_else(PoisonError::into_inner);
        // Asked under the lock: a cancel that comes later waits for it and finds the control in the list.
        if self.is_cancelled() {
            control.stop();
        }
        controls.push(Box::new(control));
    }

    /// Ends a load or run in progress; the engine then answers [`Cancelled`](crate::EngineError::Cancelled) until
    /// [`reset`](Self::reset).
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::SeqCst);
        self.each(|control| control.stop());
    }

    /// Lets the engine run again.
    pub fn reset(&self) {
        self.0.cancelled.store(false, Ordering::SeqCst);
        self.each(|control| control.resume());
    }

    /// Whether [`cancel`](Self::cancel) was called since the last [`reset`](Self::reset).
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::SeqCst)
    }

    fn each(&self, act: impl Fn(&dyn Stop)) {
        self.0.controls.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(|control| act(control.as_ref()));
    }
}

impl std::fmt::Debug for CancelHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CancelHandle").field("cancelled", &self.is_cancelled()).finish()
    }
}
