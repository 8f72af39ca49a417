//! Formats errors with their causes and a hint, the same for all commands.

use std::error::Error;
use std::fmt::Write;

/// Several lines for users: `error: ...`, one `because: ...` per cause, `hint: ...`.
pub fn error_report(error: &dyn Error, hint: Option<&str>) -> String {
    let mut text = format!("error: {error}");
    for cause in causes(error) {
        let _ = write!(text, "\n  because: {cause}");
    }
    if let Some(hint) = hint {
        let _ = write!(text, "\nhint: {hint}");
    }
    text
}

/// One line for records: the error and its causes, separated by colons.
pub fn error_line(error: &dyn Error) -> String {
    let words: Vec<String> = std::iter::once(error.to_string()).chain(causes(error).map(ToString::to_string)).collect();
    words.join(": ").lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

fn causes(error: &dyn Error) -> impl Iterator<Item = &dyn Error> {
    std::iter::successors(error.source(), |cause: &&dyn Error| (*cause).source())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot read {0}")]
    struct Outer(&'static str, #[source] Inner);

    #[derive(Debug, thiserror::Error)]
    #[error("the disk\n  is gone")]
    struct Inner(#[source] io::Error);

    fn error() -> Outer {
        Outer("x.yaml", Inner(io::Error::other("no power")))
    }

    #[test]
    fn a_report_has_one_line_per_cause() {
        let lines = "error: cannot read x.yaml\n  because: the disk\n  is gone\n  because: no power";
        assert_eq!(error_report(&error(), None), lines);
        assert_eq!(error_report(&error(), Some("plug it in")), format!("{lines}\nhint: plug it in"));
    }

    #[test]
    fn a_record_is_one_line() {
        assert_eq!(error_line(&error()), "cannot read x.yaml: the disk is gone: no power");
        assert_eq!(error_line(&io::Error::other("alone")), "alone");
    }
}
