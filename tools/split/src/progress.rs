//! Progress bars on stderr, drawn only on a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A progress bar in bytes.
pub fn bytes(what: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {bar:32} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    ProgressBar::new(0).with_message(what).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
