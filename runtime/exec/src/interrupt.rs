//! Ctrl-C: the first requests a stop, the second ends the process. While there is nothing to keep, for example before a plan is
//! loaded, the first ends it too. SIGTERM, which service managers send, and SIGHUP, which a closed terminal sends, request a stop as the
//! first Ctrl-C does, however often they come.
//!
//! Loops check [`Interrupt::is_requested`] between tokens and keep their state. A pass or a load that continues for longer than
//! [`GRACE_PERIOD`] is cancelled ([`Interrupt::cancel_on_request`]).

use hpp_engine::CancelHandle;
#[cfg(unix)]
use signal_hook::consts::SIGHUP;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Exit code of a process ended by Ctrl-C.
pub const INTERRUPTED: u8 = 130;

/// Time after Ctrl-C in which a pass may end by itself and so keep the sequence's state. After it the pass is cancelled.
pub const GRACE_PERIOD: Duration = Duration::from_millis(250);

/// Interval between two checks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The state of Ctrl-C and other signals: whether a stop was requested, and whether the next signal ends the process.
#[derive(Clone, Debug)]
pub struct Interrupt {
    requested: Arc<AtomicBool>,
    exit_on_sigint: Arc<AtomicBool>,
    /// The last signal other than Ctrl-C; 0 if none has come.
    terminating: Arc<AtomicUsize>,
    exit_on_sigterm: Arc<AtomicBool>,
}

impl Interrupt {
    /// Installs the signal handlers. Until [`request_stop_on_signal`](Self::request_stop_on_signal) is called, a signal ends the process, with exit code
    /// 130 after Ctrl-C.
    pub fn install() -> io::Result<Self> {
        let this = Self::never();
        this.exit_on_signal();
        // For each Ctrl-C these handlers run in order: exit if `exit_on_sigint` is set; set `requested`; set `exit_on_sigint`.
        flag::register_conditional_shutdown(SIGINT, i32::from(INTERRUPTED), Arc::clone(&this.exit_on_sigint))?;
        flag::register(SIGINT, Arc::clone(&this.requested))?;
        flag::register(SIGINT, Arc::clone(&this.exit_on_sigint))?;
        for signal in terminating() {
            flag::register_conditional_shutdown(signal, i32::from(code_of(signal)), Arc::clone(&this.exit_on_sigterm))?;
            // Before `requested`: whoever sees the request sees the signal.
            flag::register_usize(signal, Arc::clone(&this.terminating), signal.unsigned_abs() as usize)?;
            flag::register(signal, Arc::clone(&this.requested))?;
        }
        Ok(this)
    }

    /// An interrupt without signal handlers. Only [`request`](Self::request) requests a stop.
    pub fn never() -> Self {
        Self {
            requested: Arc::default(),
            exit_on_sigint: Arc::default(),
            terminating: Arc::default(),
            exit_on_sigterm: Arc::default(),
        }
    }

    /// An interrupt that a signal other than Ctrl-C has reached.
    #[cfg(test)]
    pub fn with_signal(signal: usize) -> Self {
        let this = Self::never();
        this.terminating.store(signal, Ordering::SeqCst);
        this
    }

    /// Makes the next signal request a stop instead of ending the process, because there is something to keep. Forgets an earlier Ctrl-C, but not
    /// SIGTERM.
    pub fn request_stop_on_signal(&self) {
        self.exit_on_sigterm.store(false, Ordering::SeqCst);
        self.exit_on_sigint.store(false, Ordering::SeqCst);
        self.requested.store(self.is_terminated(), Ordering::SeqCst);
    }

    /// Makes the next signal end the process, because there is nothing to keep.
    pub fn exit_on_signal(&self) {
        self.exit_on_sigint.store(true, Ordering::SeqCst);
        self.exit_on_sigterm.store(true, Ordering::SeqCst);
    }

    /// Whether a stop was requested, by Ctrl-C, another signal or [`request`](Self::request).
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }

    /// Whether the whole process is to end, not only the current answer: SIGTERM or SIGHUP has come.
    pub fn is_terminated(&self) -> bool {
        self.terminating.load(Ordering::SeqCst) != 0
    }

    /// The exit code of a process that a stop request ends although nothing was computed: 130 after Ctrl-C, otherwise that of the signal.
    pub fn exit_code(&self) -> u8 {
        match i32::try_from(self.terminating.load(Ordering::SeqCst)) {
            Ok(signal) if signal != 0 => code_of(signal),
            _ => INTERRUPTED,
        }
    }

    /// Requests a stop, as Ctrl-C does.
    pub fn request(&self) {
        self.requested.store(true, Ordering::SeqCst);
    }

    /// Waits until a stop is requested or the other end of `ended` is dropped. Returns whether it is the request.
    pub fn wait(&self, ended: &Receiver<()>) -> bool {
        while ended.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            if self.is_requested() {
                return true;
            }
        }
        false
    }

    /// Starts a thread that cancels what runs under `cancel` when [`GRACE_PERIOD`] has passed since a stop was requested.
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

/// The exit code that a shell reports for a process ended by this signal.
fn code_of(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(INTERRUPTED)
}

/// The signals other than Ctrl-C that end the process. SIGHUP is left out if the process ignores it, as under `nohup`, or if the system does not tell
/// whether it does.
fn terminating() -> Vec<i32> {
    #[cfg(unix)]
    if handles_sighup(&std::fs::read_to_string("/proc/self/status").unwrap_or_default()) {
        return vec![SIGTERM, SIGHUP];
    }
    vec![SIGTERM]
}

/// Whether a process does not ignore SIGHUP, according to its `/proc/PID/status`.
#[cfg(unix)]
fn handles_sighup(status: &str) -> bool {
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 1 << (SIGHUP - 1) == 0)
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
    #[cfg(unix)]
    fn a_closed_terminal_counts_unless_it_is_ignored() {
        let status = |mask: &str| format!("Name:\thpp-exec\nSigIgn:\t{mask}\nSigCgt:\t0000000000000001\n");
        assert!(handles_sighup(&status("0000000000001000")));
        assert!(!handles_sighup(&status("0000000000001001")), "nohup");
        assert!(!handles_sighup(""), "the system does not tell");
    }

    #[test]
    fn the_exit_code_says_which_signal_came() {
        let came = |interrupt: Interrupt| (interrupt.exit_code(), interrupt.is_terminated());
        assert_eq!(came(Interrupt::never()), (130, false));
        assert_eq!(came(Interrupt::with_signal(15)), (143, true));
    }

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
