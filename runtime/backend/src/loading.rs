//! The load lock: one thread of this process loads sessions at a time.
//!
//! ONNX Runtime does not report where it maps the weights of a session. They are the file mappings that appear while the session is
//! created ([`Loading::mapping`]), and their pages are replaced later. So no other thread may create or release a session meanwhile: its
//! mappings would be taken for this session's, or this session's mappings would reuse their addresses.
//!
//! The lock covers every session of this crate. A program that maps files of a plan's weights directory privately and writable by
//! itself, for example through sessions of its own, must not do so while a plan loads.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held while a thread loads a session, until its mappings are known.
static LOADING: Mutex<()> = Mutex::new(());

/// Held for the shorter time in which mappings are compared. Releasing a session waits for this lock only, because a load may write
/// gigabytes of prepared weights first.
static MAPPING: Mutex<()> = Mutex::new(());

/// Proof that this thread holds the load lock.
pub(crate) struct Loading(#[expect(dead_code, reason = "held until it is dropped")] MutexGuard<'static, ()>);

impl Loading {
    /// Waits for the load lock.
    pub fn begin() -> Self {
        Loading(lock(&LOADING))
    }

    /// Runs `make` while no other thread creates or releases a session.
    pub fn mapping<T>(&self, make: impl FnOnce() -> T) -> T {
        let _mapping = lock(&MAPPING);
        make()
    }
}

fn lock(mutex: &'static Mutex<()>) -> MutexGuard<'static, ()> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A session that is released with the mapping lock held.
pub(crate) struct SessionHandle(ManuallyDrop<ort::session::Session>);

impl SessionHandle {
    pub fn new(session: ort::session::Session) -> Self {
        SessionHandle(ManuallyDrop::new(session))
    }
}

impl Deref for SessionHandle {
    type Target = ort::session::Session;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for SessionHandle {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        let _mapping = lock(&MAPPING);
        // SAFETY: the session is dropped only here, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}
