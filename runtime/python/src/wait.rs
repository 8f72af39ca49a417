//! Waits for another thread with Python's interpreter lock released. Ctrl-C ends the wait.

use crate::failure::Failure;
use pyo3::prelude::*;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Longest interval between two checks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Receives the next message. Other Python threads run meanwhile. If a signal handler raises, as that of Ctrl-C does, calls `on_interrupt` and
/// returns the exception. Checks before each wait too, because messages may come faster than the interval.
pub fn receive<T: Send>(py: Python<'_>, messages: &Mutex<Receiver<T>>, on_interrupt: impl Fn()) -> PyResult<T> {
    loop {
        py.check_signals().inspect_err(|_| on_interrupt())?;
        let received =
            py.detach(|| messages.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(POLL_INTERVAL));
        match received {
            Ok(message) => return Ok(message),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(Failure::engine_gone().into()),
        }
    }
}
