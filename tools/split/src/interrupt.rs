//! Ctrl-C while a plan is written: says what stays on disk.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
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
            eprintln!(
                "interrupted: {} keeps what was written; the same command continues or replaces it, or remove it",
                partial.display()
            );
        }
        std::process::exit(INTERRUPTED);
    });
}
