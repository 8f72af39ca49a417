//! Results on stdout, quietly done when nobody reads on.

use std::io::{self, Write};

/// Prints a line; a reader that has gone away (`| head`) is not an error.
pub fn line(text: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}
