//! Stops an engine from another thread, such as that of a signal handler.

use crate::port::Control;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Stops the engine it was given to or came from: cheap to clone, usable from any thread.
#[derive(Clone, Default)]
pub struct CancelHandle(Arc<Shared>);

#[derive(Default)]
struct Shared {
    cancelled: AtomicBool,
    /// Controls of the engines that use this handle, loaded or still loading. A dropped engine removes its own.
    controls: Mutex<Vec<Weak<dyn Stop>>>,
}

/// Keeps a control attached to a handle for as long as it lives.
pub(crate) struct Attached(#[expect(dead_code, reason = "it is kept, not read")] Arc<dyn Stop>);

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

    /// Lets this handle stop runs under `control` until the returned guard is dropped.
    pub(crate) fn attach(&self, control: impl Control) -> Attached {
        let control: Arc<dyn Stop> = Arc::new(control);
        let mut controls = self.0.controls.lock().unwrap_or_else(PoisonError::into_inner);
        // Checked under the lock: a later cancel waits for the lock and then finds the control in the list.
        if self.is_cancelled() {
            control.stop();
        }
        controls.retain(|other| other.strong_count() > 0);
        controls.push(Arc::downgrade(&control));
        Attached(control)
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
        let controls = self.0.controls.lock().unwrap_or_else(PoisonError::into_inner);
        controls.iter().filter_map(Weak::upgrade).for_each(|control| act(control.as_ref()));
    }
}

impl std::fmt::Debug for CancelHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CancelHandle").field("cancelled", &self.is_cancelled()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Counting(Arc<AtomicBool>);

    impl Control for Counting {
        fn stop(&self) {
            self.0.store(true, Ordering::SeqCst);
        }
        fn resume(&self) {
            self.0.store(false, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_handle_forgets_the_control_of_an_engine_that_is_gone() {
        let (handle, gone, there) = (CancelHandle::new(), Counting::default(), Counting::default());
        drop(handle.attach(gone.clone()));
        let attached = handle.attach(there.clone());
        handle.cancel();
        assert!(there.0.load(Ordering::SeqCst) && !gone.0.load(Ordering::SeqCst));
        assert_eq!(Arc::strong_count(&gone.0), 1, "nobody holds the control of the first");
        assert_eq!(handle.0.controls.lock().unwrap().len(), 1);
        drop(attached);
    }
}
