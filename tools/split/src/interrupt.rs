//! Ctrl-C: while plans are measured, and while a plan is written.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Exit status of an interrupted process.
const INTERRUPTED: i32 = 130;
/// Interval at which the flag is read.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// From now on, an interruption ends the process with a line that names `partial`, the directory that stays.
pub fn name_partial_directory(partial: PathBuf) {
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
        if partial.exists() {
            hpp_io::line_to_stderr(&format!(
                "interrupted: {} keeps what was written; the same command continues or replaces it, or remove it",
                partial.display()
            ));
        }
        std::process::exit(INTERRUPTED);
    });
}

/// Set by the first SIGINT or SIGTERM, so that a measurement ends and its files are removed. The second one ends the
/// process.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From now on watches for signals.
    pub fn install() -> io::Result<Self> {
        let requested = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_shutdown(signal, INTERRUPTED, Arc::clone(&requested))?;
            flag::register(signal, Arc::clone(&requested))?;
        }
        Ok(Interrupt(requested))
    }

    /// Whether a signal has come.
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
