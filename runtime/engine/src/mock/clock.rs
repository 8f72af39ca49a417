//! Time that passes only when the mock does something that costs time.

use crate::port::MemoryId;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// A clock that stands still until it is advanced. Clones are the same clock.
#[derive(Clone, Debug, Default)]
pub struct VirtualClock(Rc<Cell<Duration>>);

impl VirtualClock {
    /// Time since it was made.
    pub fn now(&self) -> Duration {
        self.0.get()
    }

    /// Lets time pass.
    pub fn advance(&self, time: Duration) {
        self.0.set(self.0.get() + time);
    }
}

/// The duration of a copy between two memories: `latency + bytes / bandwidth`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkCost {
    /// Starting it.
    pub latency: Duration,
    /// Bytes per millisecond; 0 is unlimited.
    pub bytes_per_ms: f64,
}

impl LinkCost {
    /// The duration of a copy of this many bytes.
    pub fn time(&self, bytes: u64) -> Duration {
        let moving = if self.bytes_per_ms > 0.0 { bytes as f64 / self.bytes_per_ms / 1e3 } else { 0.0 };
        self.latency + Duration::try_from_secs_f64(moving).unwrap_or(Duration::MAX)
    }
}

/// The cost of each path between memories. A copy between devices without a path of their own goes through the host.
#[derive(Debug, Default)]
pub(super) struct Links(RefCell<BTreeMap<(MemoryId, MemoryId), LinkCost>>);

impl Links {
    pub fn set(&self, from: MemoryId, to: MemoryId, cost: LinkCost) {
        self.0.borrow_mut().insert((from, to), cost);
    }

    /// The paths of a copy, one after the other.
    pub fn legs(&self, from: MemoryId, to: MemoryId) -> impl Iterator<Item = (MemoryId, MemoryId)> + use<> {
        let host = MemoryId::HOST;
        let direct = from == to || from == host || to == host || self.0.borrow().contains_key(&(from, to));
        let legs = if direct { [Some((from, to)), None] } else { [Some((from, host)), Some((host, to))] };
        legs.into_iter().flatten()
    }

    pub fn time(&self, from: MemoryId, to: MemoryId, bytes: u64) -> Duration {
        let links = self.0.borrow();
        let way = |from, to| links.get(&(from, to)).map_or(Duration::ZERO, |cost| cost.time(bytes));
        match links.get(&(from, to)) {
            Some(cost) => cost.time(bytes),
            None if from == to => Duration::ZERO,
            None => way(from, MemoryId::HOST) + way(MemoryId::HOST, to),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_devices_bytes_go_through_the_host() {
        let (links, ms) = (Links::default(), Duration::from_millis);
        let (a, b) = (MemoryId(1), MemoryId(2));
        links.set(a, MemoryId::HOST, LinkCost { latency: ms(1), bytes_per_ms: 10.0 });
        links.set(MemoryId::HOST, b, LinkCost { latency: ms(2), bytes_per_ms: 5.0 });
        assert_eq!(links.time(a, MemoryId::HOST, 100), ms(11));
        assert_eq!(links.time(a, b, 100), ms(11) + ms(22));
        assert_eq!(links.time(b, MemoryId::HOST, 100), Duration::ZERO);
        links.set(a, b, LinkCost { latency: ms(3), bytes_per_ms: 0.0 });
        assert_eq!(links.time(a, b, 100), ms(3));
    }
}
