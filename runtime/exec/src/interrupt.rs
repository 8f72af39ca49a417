//! Ctrl-C: the first asks for a clean stop, the second ends the process at once. While nothing is at stake (loading)
//! the first ends it too.

use signal_hook::consts::SIGINT;
use signal_hook::flag;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a process ended by Ctrl-C answers.
pub const INTERRUPTED: u8 = 130;

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
}
