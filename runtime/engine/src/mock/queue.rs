//! Devices that compute while their callers go on: what they are given is done one after the other, and takes its time on
//! the mock's clock only when somebody waits for it.

use super::VirtualClock;
use crate::port::{MemoryId, Ticket, Took};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

/// All such devices, by their memory. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Queues(Rc<RefCell<State>>);

#[derive(Debug, Default)]
struct State {
    /// When each device is through.
    over: BTreeMap<MemoryId, Duration>,
    /// Times nobody has been told yet.
    times: Vec<(Ticket, Took)>,
    tickets: u64,
    waits: u64,
    /// Devices that tell no times.
    silent: BTreeSet<MemoryId>,
}

impl Queues {
    pub fn add(&self, memory: MemoryId) {
        self.0.borrow_mut().over.insert(memory, Duration::ZERO);
    }

    /// The same, but nobody is told how long anything took.
    pub fn add_silent(&self, memory: MemoryId) {
        self.add(memory);
        self.0.borrow_mut().silent.insert(memory);
    }

    pub fn is_silent(&self, memory: MemoryId) -> bool {
        self.0.borrow().silent.contains(&memory)
    }

    pub fn memories(&self) -> Vec<MemoryId> {
        self.0.borrow().over.keys().copied().collect()
    }

    /// When a device is through with what it was given so far; nothing where callers wait for each thing.
    pub fn over(&self, memory: MemoryId) -> Option<Duration> {
        self.0.borrow().over.get(&memory).copied()
    }

    /// Waits until a device is through with what it was given so far.
    pub fn wait(&self, memory: MemoryId, clock: &VirtualClock) {
        let left = self.over(memory).unwrap_or_default().saturating_sub(clock.now());
        if !left.is_zero() {
            self.0.borrow_mut().waits += 1;
            clock.advance(left);
        }
    }

    /// Times somebody waited for a device that was not through.
    pub fn waits(&self) -> u64 {
        self.0.borrow().waits
    }

    /// Gives a device something to do for so long, now or behind what it has.
    pub fn push(&self, memory: MemoryId, now: Duration, time: Duration) -> Ticket {
        let from = self.over(memory).unwrap_or_default().max(now);
        self.0.borrow_mut().over.insert(memory, from + time);
        self.ticket(Took { from, to: from + time })
    }

    /// Lets a device wait until some moment, behind what it has.
    pub fn hold(&self, memory: MemoryId, now: Duration, until: Duration) -> Ticket {
        let from = self.over(memory).unwrap_or_default().max(now);
        self.push(memory, now, until.saturating_sub(from))
    }

    /// A ticket for a time that is known already.
    pub fn ticket(&self, took: Took) -> Ticket {
        let mut state = self.0.borrow_mut();
        let ticket = Ticket(state.tickets);
        state.tickets += 1;
        state.times.push((ticket, took));
        ticket
    }

    /// Tells the times of all tickets since the last call.
    pub fn tell(&self, tell: &mut dyn FnMut(Ticket, Took)) {
        for (ticket, took) in self.0.borrow_mut().times.drain(..) {
            tell(ticket, took);
        }
    }
}
