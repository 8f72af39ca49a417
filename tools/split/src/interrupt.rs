//! Ctrl-C: while plans are measured, and while a plan is written.

use crate::output::Leftovers;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Exit status of an interrupted process.
const INTERRUPTED: i32 = 130;
/// Interval at which the flag is read.
pub const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// From now on, an interruption ends the process with a line that names what stays.
pub fn name_leftovers(leftovers: Leftovers) {
    let requested = Arc::new(AtomicBool::new(false));
    let is_installed =
        [SIGINT, SIGTERM].into_iter().all(|signal| flag::register(signal, Arc::clone(&requested)).is_ok());
    if !is_installed {
        return;
    }
    thread::spawn(move || {
        while !requested.load(Ordering::SeqCst) {
            thread::sleep(POLL_INTERVAL);
        }
        if let Some(message) = leftovers.message() {
            hpp_io::line_to_stderr(&message);
        }
        std::process::exit(INTERRUPTED);
    });
}

/// Set by the first SIGINT or SIGTERM, so that a measurement ends and its files are removed. The second one ends the
/// process, and so does any after [`release`](Self::release).
#[derive(Clone, Debug)]
pub struct Interrupt {
    requested: Arc<AtomicBool>,
    ends_process: Arc<AtomicBool>,
}

impl Interrupt {
    /// From now on watches for signals.
    pub fn install() -> io::Result<Self> {
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

    /// Makes the next signal end the process: there is nothing more to remove.
    pub fn release(&self) {
        self.ends_process.store(true, Ordering::SeqCst);
    }
}
