//! What is wrong with what a person asked for: collected, so that all of it is said at once.

use hpp_schema::Finding;
use std::fmt;

/// One thing that is wrong, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complaint {
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub hint: Option<&'static str>,
}

impl Complaint {
    /// With what to do about it.
    pub fn new(message: impl Into<String>, hint: &'static str) -> Self {
        Complaint { message: message.into(), hint: Some(hint) }
    }

    /// A finding in a file or against it, which says itself what to mend.
    pub fn in_file(what: &str, finding: &Finding) -> Self {
        Complaint { message: format!("{what}: {finding}"), hint: None }
    }
}

/// Everything that is wrong.
#[derive(Clone, Debug, Default)]
pub struct Complaints(pub Vec<Complaint>);

impl Complaints {
    /// A complaint unless it holds.
    pub fn require(&mut self, holds: bool, message: impl Into<String>, hint: &'static str) {
        if !holds {
            self.0.push(Complaint::new(message, hint));
        }
    }

    /// An error if there is any.
    pub fn refuse(self) -> Result<(), Complaints> {
        if self.0.is_empty() { Ok(()) } else { Err(self) }
    }
}

impl fmt::Display for Complaints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let messages: Vec<&str> = self.0.iter().map(|complaint| complaint.message.as_str()).collect();
        f.write_str(&messages.join("; "))
    }
}

impl std::error::Error for Complaints {}
