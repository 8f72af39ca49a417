//! Errors in the command line and in the files it names, collected so that one run reports all of them.

use hpp_schema::Finding;
use std::fmt;

/// One error, and what the user can do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputError {
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub hint: Option<&'static str>,
}

impl InputError {
    /// An error with a hint.
    pub fn new(message: impl Into<String>, hint: &'static str) -> Self {
        InputError { message: message.into(), hint: Some(hint) }
    }

    /// A finding of a file's check, whose message already says what to correct.
    pub fn in_file(file: &str, finding: &Finding) -> Self {
        InputError { message: format!("{file}: {finding}"), hint: None }
    }
}

/// All errors found.
#[derive(Clone, Debug, Default)]
pub struct InputErrors(pub Vec<InputError>);

impl InputErrors {
    /// Adds an error unless `holds`.
    pub fn require(&mut self, holds: bool, message: impl Into<String>, hint: &'static str) {
        if !holds {
            self.0.push(InputError::new(message, hint));
        }
    }

    /// `Ok` if there are no errors.
    pub fn into_result(self) -> Result<(), InputErrors> {
        if self.0.is_empty() { Ok(()) } else { Err(self) }
    }
}

impl fmt::Display for InputErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let messages: Vec<&str> = self.0.iter().map(|error| error.message.as_str()).collect();
        f.write_str(&messages.join("; "))
    }
}

impl std::error::Error for InputErrors {}
