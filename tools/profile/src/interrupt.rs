//! Ctrl-C and SIGTERM: the first requests a clean stop, which keeps finished measurements; the second ends the process at once.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit status after Ctrl-C.
pub const INTERRUPTED: u8 = 130;

/// Whether Ctrl-C was pressed.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    asked: Arc<AtomicBool>,
}

impl Interrupt {
    /// Installs the signal handlers.
    pub fn install() -> io::Result<Self> {
        let this = Self::default();
        // The handlers run in this order at every signal: exit if a stop was already requested; request a stop.
        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_shutdown(signal, i32::from(INTERRUPTED), Arc::clone(&this.asked))?;
            flag::register(signal, Arc::clone(&this.asked))?;
        }
        Ok(this)
    }

    pub fn is_requested(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// Requests a stop, as Ctrl-C does.
    #[cfg(all(test, unix))]
    pub fn request(&self) {
        self.asked.store(true, Ordering::SeqCst);
    }
}
