//! Checks of a parsed plan. Every rule reports all its findings. Opens no files.

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
pub use names::names_a_file;
use std::fmt;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The plan can run.
    Warning,
    /// The plan must not run.
    Error,
}

/// An error or warning at a place of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its severity.
    pub severity: Severity,
    /// The place, such as `partitions[2].inputs[0]`.
    pub place: String,
    /// What is wrong, in a sentence.
    pub message: String,
}

impl Finding {
    /// An error at a place.
    pub fn error(place: impl Into<String>, message: impl Into<String>) -> Finding {
        Finding { severity: Severity::Error, place: place.into(), message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

impl Plan {
    /// All findings, grouped by rule: names, paths, sizes, data flow, states, schedule, placement. Does not check
    /// whether files and devices exist.
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
        self.0.push(Finding::error(place, message));
    }

    fn warning(&mut self, place: impl Into<String>, message: impl Into<String>) {
        self.0.push(Finding { severity: Severity::Warning, ..Finding::error(place, message) });
    }

    /// Adds an error unless `holds`.
    fn require(&mut self, holds: bool, place: impl Into<String>, message: impl Into<String>) {
        if !holds {
            self.error(place, message);
        }
    }
}
