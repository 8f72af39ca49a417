//! Ctrl-C: while plans are measured, and while a plan is written.

use crate::output::Leftovers;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Exit status of an interrupted process.
const INTERRUPTED: i32 = 130;
/// Interval at which the flag is read.
pub const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// From now on, an interruption ends the process with a line that names what stays.
pub fn name_leftovers(leftovers: Leftovers) {
    let Ok(interrupt) = Interrupt::install() else { return };
    thread::spawn(move || {
        while !interrupt.is_requested() {
            thread::sleep(POLL_INTERVAL);
        }
        if let Some(message) = leftovers.message() {
            hpp_io::line_to_stderr(&message);
        }
        std::process::exit(INTERRUPTED);
    });
}

/// Set by the first SIGINT or SIGTERM, so that a measurement ends and its files are removed. The second one ends the
/// process, and so does any after a [`Release`] is dropped.
#[derive(Clone, Debug)]
pub struct Interrupt {
    requested: Arc<AtomicBool>,
    ends_process: Arc<AtomicBool>,
}

impl Interrupt {
    /// From now on watches for signals. All values of a process are one.
    pub fn install() -> io::Result<Self> {
        static INSTALLED: Mutex<Option<Interrupt>> = Mutex::new(None);
        let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        let this = match &*installed {
            Some(this) => this.clone(),
            None => installed.insert(Interrupt::register()?).clone(),
        };
        this.ends_process.store(this.is_requested(), Ordering::SeqCst);
        Ok(this)
    }

    fn register() -> io::Result<Self> {
        let [requested, ends_process]: [Arc<AtomicBool>; 2] = Default::default();
        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_shutdown(signal, INTERRUPTED, Arc::clone(&ends_process))?;
            flag::register(signal, Arc::clone(&requested))?;
            flag::register(signal, Arc::clone(&ends_process))?;
        }
        Ok(Interrupt { requested, ends_process })
    }

    /// Whether a signal has come.
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }

    /// Makes the next signal end the process when the returned value is dropped: then there is nothing more to remove.
    pub fn release_on_drop(&self) -> Release {
        Release(self.clone())
    }
}

/// See [`Interrupt::release_on_drop`].
pub struct Release(Interrupt);

impl Drop for Release {
    fn drop(&mut self) {
        self.0.ends_process.store(true, Ordering::SeqCst);
    }
}
