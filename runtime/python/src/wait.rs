//! Waits for another thread with Python's lock released, and ends the wait at Ctrl-C.

use crate::failure::Failure;
use pyo3::prelude::*;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Interval between two checks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The next message. Other threads of Python run meanwhile. Where a signal handler raises, as that of Ctrl-C does, `on_interrupt` is called
/// and its exception returned.
pub fn receive<T: Send>(py: Python<'_>, messages: &Mutex<Receiver<T>>, on_interrupt: impl Fn()) -> PyResult<T> {
    loop {
        let received =
            py.detach(|| messages.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(POLL_INTERVAL));
        match received {
            Ok(message) => return Ok(message),
            Err(RecvTimeoutError::Timeout) => py.check_signals().inspect_err(|_| on_interrupt())?,
            Err(RecvTimeoutError::Disconnected) => return Err(Failure::engine_gone().into()),
        }
    }
}
