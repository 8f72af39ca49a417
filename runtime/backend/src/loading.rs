//! The load lock: one thread of this process loads sessions at a time.
//!
//! ONNX Runtime does not say where it maps the weights of a session. They are found as the file mappings that appear while the
//! session is made ([`Loading::mapping`]), and the pages behind them are replaced later. So no other thread may create or
//! release a session meanwhile: its mappings would be taken for those of this one, or leave their addresses to them.
//!
//! It covers every session that this crate makes. A program that itself maps files of a plan's weights directory privately and
//! writable, say through sessions of its own, must not do so while a plan loads.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held while a thread loads a session, from before it is made until it is known what it has mapped.
static LOADING: Mutex<()> = Mutex::new(());

/// Held for the shorter time in which mappings are compared. Whoever releases a session waits for this one only: a load may
/// write gigabytes of prepared weights first.
static MAPPING: Mutex<()> = Mutex::new(());

/// Proof that this thread holds the load lock.
pub(crate) struct Loading(#[expect(dead_code, reason = "held until it is dropped")] MutexGuard<'static, ()>);

impl Loading {
    /// Waits until no other thread loads.
    pub fn begin() -> Self {
        Loading(lock(&LOADING))
    }

    /// Runs `make` while no other thread makes or releases a session.
    #[cfg(target_os = "linux")]
    pub fn mapping<T>(&self, make: impl FnOnce() -> T) -> T {
        let _mapping = lock(&MAPPING);
        make()
    }
}

fn lock(mutex: &'static Mutex<()>) -> MutexGuard<'static, ()> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A session, released while no other thread looks for the mappings of its own.
pub(crate) struct Released(ManuallyDrop<ort::session::Session>);

impl Released {
    pub fn new(session: ort::session::Session) -> Self {
        Released(ManuallyDrop::new(session))
    }
}

impl Deref for Released {
    type Target = ort::session::Session;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Released {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl Drop for Released {
    fn drop(&mut self) {
        let _mapping = lock(&MAPPING);
        // SAFETY: dropped here and nowhere else, and not used after.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}
