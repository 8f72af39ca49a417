//! The order in which pages are read from disk: those that a request waits for, then the others by the priority of their requests, the
//! first requested first. A page that two requests want has the urgency of the more urgent request.

use crate::key::PageKey;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

/// How urgent a read is; a larger one is more urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ReadUrgency {
    /// Whether a request cannot start before it.
    pub is_awaited: bool,
    /// The priority of the request.
    pub priority: i32,
}

/// A position in the queue: urgent reads are before others, and of equally urgent ones the first requested.
type QueuePosition = (Reverse<ReadUrgency>, u64);

/// Pages to be read, the most urgent first.
#[derive(Debug, Default)]
pub(crate) struct ReadQueue {
    order: BTreeMap<QueuePosition, PageKey>,
    positions: HashMap<PageKey, QueuePosition>,
    /// Reads requested so far.
    requested: u64,
}

impl ReadQueue {
    /// Adds a page, or moves it forward if it is more urgent now. Pages are never moved back.
    pub fn request(&mut self, key: PageKey, urgency: ReadUrgency) {
        let known = self.positions.get(&key).copied();
        if known.is_some_and(|(Reverse(known), _)| known >= urgency) {
            return;
        }
        if let Some(known) = known {
            self.order.remove(&known);
        }
        let position = (Reverse(urgency), self.requested);
        self.requested += 1;
        self.order.insert(position, key);
        self.positions.insert(key, position);
    }

    /// The most urgent page.
    pub fn first(&self) -> Option<PageKey> {
        self.order.first_key_value().map(|(_, key)| *key)
    }

    /// Removes a page, if it is in the queue.
    pub fn remove(&mut self, key: &PageKey) {
        if let Some(position) = self.positions.remove(key) {
            self.order.remove(&position);
        }
    }

    /// Whether nothing is to be read.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// All pages, and leaves none.
    pub fn take_all(&mut self) -> Vec<PageKey> {
        self.positions.clear();
        std::mem::take(&mut self.order).into_values().collect()
    }
}
