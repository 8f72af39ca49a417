//! Standard output: results only, shown as soon as they are written. A reader that went away is not an error to shout
//! about.

use std::io::{self, Write};

/// Why a result could not be shown.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// The reader closed its end, as `head` does: nothing more is wanted.
    #[error("nobody reads the output any more")]
    Closed,
    /// Something else.
    #[error("cannot write to stdout")]
    Write(#[source] io::Error),
}

impl From<io::Error> for OutputError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe { OutputError::Closed } else { OutputError::Write(error) }
    }
}

/// Shows text at once.
pub fn show(out: &mut dyn Write, text: &str) -> Result<(), OutputError> {
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Shows one JSON value on one line.
pub fn show_json(out: &mut dyn Write, value: &impl serde::Serialize) -> Result<(), OutputError> {
    let text = serde_json::to_string(value).map_err(|e| OutputError::Write(io::Error::other(e)))?;
    show(out, &(text + "\n"))
}
