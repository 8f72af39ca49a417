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

/// How often work that takes long is reported.
const INTERVAL: std::time::Duration = std::time::Duration::from_secs(10);

/// Does this work, and says every ten seconds that it goes on.
pub fn while_telling<T>(what: &str, work: impl FnOnce() -> T) -> T {
    std::thread::scope(|scope| {
        let (finished, wait) = std::sync::mpsc::channel::<()>();
        let started = std::time::Instant::now();
        scope.spawn(move || {
            while wait.recv_timeout(INTERVAL) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                tell!("{what}: {:.0} s so far", started.elapsed().as_secs_f64());
            }
        });
        let done = work();
        drop(finished);
        done
    })
}
