//! Lines about long measurements: the first, and then at most one every few seconds.

use std::time::{Duration, Instant};

/// Least time between two lines.
const BETWEEN_LINES: Duration = Duration::from_secs(5);

/// Decides which lines are printed.
#[derive(Debug, Default)]
pub struct Lines {
    next: Option<Instant>,
}

impl Lines {
    /// Prints a line if it is the first, or the one before is long ago.
    pub fn say(&mut self, line: &str) {
        if self.is_due(Instant::now()) {
            tell!("{line}");
        }
    }

    fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.next.is_none_or(|next| now >= next);
        if is_due {
            self.next = Some(now + BETWEEN_LINES);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_seconds_apart() {
        let (mut lines, begun) = (Lines::default(), Instant::now());
        let due = [0, 1, 4, 5, 6, 9, 20].map(|seconds| lines.is_due(begun + Duration::from_secs(seconds)));
        assert_eq!(due, [true, false, false, true, false, false, true]);
    }
}
