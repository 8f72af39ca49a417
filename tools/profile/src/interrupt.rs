//! Ctrl-C: the first asks for a clean stop, which keeps what is done; the second ends the process at once.

use signal_hook::consts::SIGINT;
use signal_hook::flag;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a process ended by Ctrl-C answers.
pub const INTERRUPTED: u8 = 130;

/// Whether Ctrl-C was pressed.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    asked: Arc<AtomicBool>,
}

impl Interrupt {
    /// Takes Ctrl-C over.
    pub fn install() -> io::Result<Self> {
        let this = Self::default();
        // In this order, each on every Ctrl-C: end if it was asked before; note the wish.
        flag::register_conditional_shutdown(SIGINT, i32::from(INTERRUPTED), Arc::clone(&this.asked))?;
        flag::register(SIGINT, Arc::clone(&this.asked))?;
        Ok(this)
    }

    /// Whether a stop was asked for.
    pub fn asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// Asks as Ctrl-C does.
    pub fn ask(&self) {
        self.asked.store(true, Ordering::SeqCst);
    }
}
