//! Ctrl-C: the first requests a stop, the second ends the process. While there is nothing to keep, for example before a plan is
//! loaded, the first ends it too.
//!
//! Loops check [`Interrupt::is_requested`] between tokens and keep their state. A pass or a load that continues for longer than
//! [`GRACE_PERIOD`] is cancelled ([`Interrupt::cancel_on_request`]).

use hpp_engine::CancelHandle;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Exit code of a process ended by Ctrl-C.
pub const INTERRUPTED: u8 = 130;

/// Time after Ctrl-C in which a pass may end by itself and so keep the sequence's state. After it the pass is cancelled.
pub const GRACE_PERIOD: Duration = Duration::from_millis(250);

/// Interval between two checks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Whether Ctrl-C was pressed, and whether the next one ends the process.
#[derive(Clone, Debug)]
pub struct Interrupt {
    requested: Arc<AtomicBool>,
    exit_on_next: Arc<AtomicBool>,
}

impl Interrupt {
    /// Installs the signal handler. Until [`stop_gracefully`](Self::stop_gracefully) is called, Ctrl-C ends the process with exit code 130.
    pub fn install() -> io::Result<Self> {
        let this = Self { requested: Arc::default(), exit_on_next: Arc::new(AtomicBool::new(true)) };
        // Each Ctrl-C runs these in order: exit if the flag is set; record the request; exit on the next one.
        flag::register_conditional_shutdown(SIGINT, i32::from(INTERRUPTED), Arc::clone(&this.exit_on_next))?;
        flag::register(SIGINT, Arc::clone(&this.requested))?;
        flag::register(SIGINT, Arc::clone(&this.exit_on_next))?;
        Ok(this)
    }

    /// Makes SIGTERM, which service managers send, request a stop too.
    pub fn also_on_terminate(&self) -> io::Result<()> {
        flag::register(SIGTERM, Arc::clone(&self.requested)).map(drop)
    }

    /// Without a signal handler: never requested, except through [`request`](Self::request).
    pub fn never() -> Self {
        Self { requested: Arc::default(), exit_on_next: Arc::default() }
    }

    /// Makes the next Ctrl-C only request a stop, because there is something to keep now. Clears an earlier request.
    pub fn stop_gracefully(&self) {
        self.requested.store(false, Ordering::SeqCst);
        self.exit_on_next.store(false, Ordering::SeqCst);
    }

    /// Makes the next Ctrl-C end the process, because there is nothing to keep.
    pub fn immediate(&self) {
        self.exit_on_next.store(true, Ordering::SeqCst);
    }

    /// Whether Ctrl-C requested a stop.
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }

    /// Requests a stop, as Ctrl-C does.
    pub fn request(&self) {
        self.requested.store(true, Ordering::SeqCst);
    }

    /// Starts a thread that cancels what runs under `cancel` once a stop was requested [`GRACE_PERIOD`] ago.
    pub fn cancel_on_request(&self, cancel: &CancelHandle) -> InterruptWatch {
        let (end, ended) = channel::<()>();
        let (interrupt, handle) = (self.clone(), cancel.clone());
        let watch = move || {
            let mut requested: Option<Instant> = None;
            while ended.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if interrupt.is_requested() && requested.get_or_insert_with(Instant::now).elapsed() >= GRACE_PERIOD {
                    return handle.cancel();
                }
            }
        };
        let thread = std::thread::Builder::new().name("hpp-ctrl-c".into()).spawn(watch).ok();
        InterruptWatch { end: Some(end), thread, cancel: cancel.clone() }
    }
}

/// A thread that cancels on Ctrl-C. Dropping it ends the thread and resets the cancel handle.
pub struct InterruptWatch {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    cancel: CancelHandle,
}

impl Drop for InterruptWatch {
    fn drop(&mut self) {
        // Closing the channel ends the thread's loop.
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.cancel.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_beyond_the_grace_period_is_cancelled_and_the_handle_is_reset_later() {
        let (interrupt, cancel) = (Interrupt::never(), CancelHandle::new());
        let watch = interrupt.cancel_on_request(&cancel);
        let requested = Instant::now();
        interrupt.request();
        while !cancel.is_cancelled() {
            assert!(requested.elapsed() < Duration::from_secs(30), "it is never cancelled");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(requested.elapsed() >= GRACE_PERIOD, "a pass may end by itself first");
        drop(watch);
        assert!(!cancel.is_cancelled());
    }

    #[test]
    fn work_that_ends_in_the_grace_period_is_not_cancelled() {
        let (interrupt, cancel) = (Interrupt::never(), CancelHandle::new());
        let watch = interrupt.cancel_on_request(&cancel);
        interrupt.request();
        drop(watch);
        std::thread::sleep(GRACE_PERIOD + 2 * POLL_INTERVAL);
        assert!(!cancel.is_cancelled());
    }
}
