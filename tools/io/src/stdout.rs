//! Writes results to standard output and flushes each one. A failed write is an error; a closed pipe is reported
//! separately, so that the command can end without a message.

use std::io::{self, Write};

/// The reason why a result could not be written.
#[derive(Debug, thiserror::Error)]
pub enum StdoutError {
    /// The reader closed the pipe, as `head` does.
    #[error("the reader of stdout closed the pipe")]
    Closed,
    /// Any other error, such as a full disk.
    #[error("cannot write to stdout")]
    Write(#[source] io::Error),
}

impl StdoutError {
    /// Whether the reader closed the pipe. The command then ends without a message, with success.
    pub fn is_closed(&self) -> bool {
        matches!(self, StdoutError::Closed)
    }

    /// What the user can do.
    pub fn hint(&self) -> &'static str {
        match self {
            StdoutError::Write(error) if is_full_disk(error) => "free space where stdout goes, or send it elsewhere",
            StdoutError::Write(_) | StdoutError::Closed => "send stdout elsewhere",
        }
    }
}

/// Whether a write failed because there is no room for more: on the disk, within a quota, or within a limit of file sizes.
pub fn is_full_disk(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

impl From<io::Error> for StdoutError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe { StdoutError::Closed } else { StdoutError::Write(error) }
    }
}

/// Writes text and flushes it.
pub fn show(out: &mut dyn Write, text: &str) -> Result<(), StdoutError> {
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Writes one JSON value on one line and flushes it.
pub fn show_json(out: &mut dyn Write, value: &impl serde::Serialize) -> Result<(), StdoutError> {
    let text = serde_json::to_string(value).map_err(|e| StdoutError::Write(io::Error::other(e)))?;
    show(out, &(text + "\n"))
}

/// Writes text and a line end to standard output.
pub fn print_line(text: &str) -> Result<(), StdoutError> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    show(&mut out, "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_full_disk_is_said_to_be_full() {
        let hint = |kind: io::ErrorKind| StdoutError::from(io::Error::from(kind)).hint();
        assert!(hint(io::ErrorKind::StorageFull).contains("free space"));
        assert!(!hint(io::ErrorKind::PermissionDenied).contains("free space"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_device_and_a_closed_pipe_are_different_errors() {
        let mut full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        assert!(matches!(show(&mut full, "x"), Err(StdoutError::Write(_))));
        let (reader, mut writer) = io::pipe().unwrap();
        drop(reader);
        assert!(show(&mut writer, "x").unwrap_err().is_closed());
    }
}
