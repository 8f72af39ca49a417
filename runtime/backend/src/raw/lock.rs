//! The lock of a provider whose devices take one user at a time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The lock that users of a provider's devices take, or none. WebGPU records commands in one list and expects one thread there; other
/// providers need no lock. Clones share the lock.
#[derive(Clone, Default)]
pub(crate) struct DeviceLock(Option<Arc<Mutex<()>>>);

impl DeviceLock {
    /// A lock that admits one user at a time. The default admits all.
    pub fn exclusive() -> Self {
        DeviceLock(Some(Arc::default()))
    }

    /// Waits for the lock; the guard releases it.
    pub fn acquire(&self) -> Option<MutexGuard<'_, ()>> {
        self.0.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// This lock if it is exclusive, else the other.
    pub fn or<'a>(&'a self, other: &'a DeviceLock) -> &'a DeviceLock {
        if self.0.is_some() { self } else { other }
    }
}
