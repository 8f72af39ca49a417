//! Intervals of time on the clock of [`Backend::now`](super::Backend::now).

use std::time::Duration;

/// A span of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interval {
    /// Its start.
    pub start: Duration,
    /// Its end.
    pub end: Duration,
}

impl Interval {
    /// Its length.
    pub fn duration(self) -> Duration {
        self.end.saturating_sub(self.start)
    }
}

/// Stands for an interval that is known once a device has finished
/// ([`Backend::synchronize_all`](super::Backend::synchronize_all)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimingToken(pub u64);

/// The interval of an operation that may run asynchronously on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// The operation has finished.
    Measured(Interval),
    /// The backend reports it later.
    Pending(TimingToken),
}
