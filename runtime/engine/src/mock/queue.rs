//! Asynchronous devices: they process their queue in order, and the mock's clock advances only when a caller waits.

use super::VirtualClock;
use crate::port::{Interval, MemoryId, TimingToken};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

/// All asynchronous devices, by their memory. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Queues(Rc<RefCell<State>>);

#[derive(Debug, Default)]
struct State {
    /// When the queue of each device will be empty.
    busy_until: BTreeMap<MemoryId, Duration>,
    /// Intervals not reported yet.
    unreported: Vec<(TimingToken, Interval)>,
    tokens: u64,
    waits: u64,
    /// Devices that report no intervals.
    untimed: BTreeSet<MemoryId>,
}

impl Queues {
    pub fn add(&self, memory: MemoryId) {
        self.0.borrow_mut().busy_until.insert(memory, Duration::ZERO);
    }

    /// Adds a device that reports no intervals.
    pub fn add_untimed(&self, memory: MemoryId) {
        self.add(memory);
        self.0.borrow_mut().untimed.insert(memory);
    }

    pub fn is_untimed(&self, memory: MemoryId) -> bool {
        self.0.borrow().untimed.contains(&memory)
    }

    pub fn memories(&self) -> Vec<MemoryId> {
        self.0.borrow().busy_until.keys().copied().collect()
    }

    /// When the queue of a device will be empty; `None` for a synchronous device.
    pub fn busy_until(&self, memory: MemoryId) -> Option<Duration> {
        self.0.borrow().busy_until.get(&memory).copied()
    }

    /// Waits until the queue of a device is empty.
    pub fn wait(&self, memory: MemoryId, clock: &VirtualClock) {
        let left = self.busy_until(memory).unwrap_or_default().saturating_sub(clock.now());
        if !left.is_zero() {
            self.0.borrow_mut().waits += 1;
            clock.advance(left);
        }
    }

    /// How often a caller waited for a busy device.
    pub fn waits(&self) -> u64 {
        self.0.borrow().waits
    }

    /// Queues an operation that takes `time`.
    pub fn push(&self, memory: MemoryId, now: Duration, time: Duration) -> TimingToken {
        let start = self.busy_until(memory).unwrap_or_default().max(now);
        self.0.borrow_mut().busy_until.insert(memory, start + time);
        self.token(Interval { start, end: start + time })
    }

    /// Makes a device wait until a point in time, once its queue is done.
    pub fn hold(&self, memory: MemoryId, now: Duration, until: Duration) -> TimingToken {
        let start = self.busy_until(memory).unwrap_or_default().max(now);
        self.push(memory, now, until.saturating_sub(start))
    }

    /// A token for a known interval.
    pub fn token(&self, interval: Interval) -> TimingToken {
        let mut state = self.0.borrow_mut();
        let token = TimingToken(state.tokens);
        state.tokens += 1;
        state.unreported.push((token, interval));
        token
    }

    /// Reports the intervals of all tokens since the last call.
    pub fn report(&self, report: &mut dyn FnMut(TimingToken, Interval)) {
        for (token, interval) in self.0.borrow_mut().unreported.drain(..) {
            report(token, interval);
        }
    }
}
