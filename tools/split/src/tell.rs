//! What the command says on stderr besides errors; `--quiet` leaves it out.

use std::sync::atomic::{AtomicBool, Ordering};

static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Says nothing from now on.
pub fn be_quiet() {
    IS_QUIET.store(true, Ordering::Relaxed);
}

/// Whether `--quiet` was given.
pub fn is_quiet() -> bool {
    IS_QUIET.load(Ordering::Relaxed)
}

/// Prints a formatted line to stderr, unless `--quiet` was given.
macro_rules! tell {
    ($($line:tt)*) => {
        if !$crate::tell::is_quiet() {
            hpp_io::line_to_stderr(&format!($($line)*));
        }
    };
}
