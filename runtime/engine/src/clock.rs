//! The default clock: time since its first use in this process. A backend may have a clock of its own.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Time since the first call in this process. Never goes back.
pub fn since_start() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}
