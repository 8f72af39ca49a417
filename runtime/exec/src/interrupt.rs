//! Ctrl-C: the first asks for a clean stop, the second ends the process at once. While there is nothing to keep, as before a plan is
//! loaded, the first ends it too.
//!
//! Loops look at [`Interrupt::asked`] between tokens and keep their state. What goes on for longer than [`GRACE`] all the same,
//! such as a long prompt in one pass or a load, is cancelled ([`Interrupt::watch`]).

use hpp_engine::CancelHandle;
use signal_hook::consts::SIGINT;
use signal_hook::flag;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What a process ended by Ctrl-C answers.
pub const INTERRUPTED: u8 = 130;

/// How long a pass may go on after Ctrl-C before it is cancelled. A pass that ends by itself keeps the sequence's state.
pub const GRACE: Duration = Duration::from_millis(250);

/// How often Ctrl-C is looked for.
const POLL: Duration = Duration::from_millis(50);

/// Whether Ctrl-C was pressed, and what the next one does.
#[derive(Clone, Debug)]
pub struct Interrupt {
    asked: Arc<AtomicBool>,
    at_once: Arc<AtomicBool>,
}

impl Interrupt {
    /// Takes Ctrl-C over. Until [`gentle`](Self::gentle) is called, it ends the process at once with code 130.
    pub fn install() -> io::Result<Self> {
        let this = Self { asked: Arc::default(), at_once: Arc::new(AtomicBool::new(true)) };
        // In this order, each on every Ctrl-C: end if that was said before; note the wish; next time, end.
        flag::register_conditional_shutdown(SIGINT, i32::from(INTERRUPTED), Arc::clone(&this.at_once))?;
        flag::register(SIGINT, Arc::clone(&this.asked))?;
        flag::register(SIGINT, Arc::clone(&this.at_once))?;
        Ok(this)
    }

    /// One that is never pressed.
    pub fn never() -> Self {
        Self { asked: Arc::default(), at_once: Arc::default() }
    }

    /// From here on there is something to keep: the next Ctrl-C only asks. Forgets one that was answered.
    pub fn gentle(&self) {
        self.asked.store(false, Ordering::SeqCst);
        self.at_once.store(false, Ordering::SeqCst);
    }

    /// From here on there is nothing to lose.
    pub fn abrupt(&self) {
        self.at_once.store(true, Ordering::SeqCst);
    }

    /// Whether a stop was asked for.
    pub fn asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// Asks as Ctrl-C does.
    pub fn ask(&self) {
        self.asked.store(true, Ordering::SeqCst);
    }

    /// Cancels what runs under `cancel` when a stop was asked for [`GRACE`] ago, until the watch is dropped.
    pub fn watch(&self, cancel: &CancelHandle) -> Watch {
        let (end, ended) = channel::<()>();
        let (interrupt, handle) = (self.clone(), cancel.clone());
        let watch = move || {
            let mut asked: Option<Instant> = None;
            while ended.recv_timeout(POLL) == Err(RecvTimeoutError::Timeout) {
                if interrupt.asked() && asked.get_or_insert_with(Instant::now).elapsed() >= GRACE {
                    return handle.cancel();
                }
            }
        };
        let thread = std::thread::Builder::new().name("hpp-ctrl-c".into()).spawn(watch).ok();
        Watch { end: Some(end), thread, cancel: cancel.clone() }
    }
}

/// A thread that cancels on Ctrl-C. Dropping it ends the thread and lets the engine run again.
pub struct Watch {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    cancel: CancelHandle,
}

impl Drop for Watch {
    fn drop(&mut self) {
        // The thread sees that nobody can send any more.
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
    fn what_goes_on_after_ctrl_c_is_cancelled_and_may_run_again_later() {
        let (interrupt, cancel) = (Interrupt::never(), CancelHandle::new());
        let watch = interrupt.watch(&cancel);
        let asked = Instant::now();
        interrupt.ask();
        while !cancel.is_cancelled() {
            assert!(asked.elapsed() < Duration::from_secs(30), "nobody cancelled");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(asked.elapsed() >= GRACE, "a pass may end by itself first");
        drop(watch);
        assert!(!cancel.is_cancelled());
    }

    #[test]
    fn what_ends_by_itself_is_not_cancelled() {
        let (interrupt, cancel) = (Interrupt::never(), CancelHandle::new());
        let watch = interrupt.watch(&cancel);
        interrupt.ask();
        drop(watch);
        std::thread::sleep(GRACE + 2 * POLL);
        assert!(!cancel.is_cancelled());
    }
}
