//! What can be wrong with a plan that parses. Every rule reports all it finds; nothing here opens a file.

mod flow;
mod names;
mod paths;
mod placement;
mod schedule;
mod sizes;
mod states;
#[cfg(test)]
mod tests;

use crate::Plan;
use std::fmt;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The plan can run; a person may want to know.
    Warning,
    /// The plan must not run.
    Error,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Where: `partitions[2].inputs[0]`.
    pub place: String,
    /// What, in a sentence.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

impl Plan {
    /// Everything that is wrong with this plan, in the order of the file. Paths, names, dtypes, the flow of values, the
    /// schedule and the arithmetic are checked; whether files and devices exist is for whoever runs it.
    pub fn check(&self) -> Vec<Finding> {
        let mut found = Findings::default();
        names::check(self, &mut found);
        paths::check(self, &mut found);
        sizes::check(self, &mut found);
        flow::check(self, &mut found);
        states::check(self, &mut found);
        schedule::check(self, &mut found);
        placement::check(self, &mut found);
        found.0
    }
}

/// Collects findings.
#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn error(&mut self, place: impl Into<String>, message: impl Into<String>) {
        self.0.push(Finding { severity: Severity::Error, place: place.into(), message: message.into() });
    }

    fn warning(&mut self, place: impl Into<String>, message: impl Into<String>) {
        self.0.push(Finding { severity: Severity::Warning, place: place.into(), message: message.into() });
    }

    /// An error unless it holds.
    fn require(&mut self, holds: bool, place: impl Into<String>, message: impl Into<String>) {
        if !holds {
            self.error(place, message);
        }
    }
}
