//! What the threads of a reader share: how reads ended, and who expands what they brought.

use super::super::staging::Staging;
use super::request::{Read, Ticket, To};
use std::collections::HashMap;
use std::io;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// From when to when the disk was at a read.
pub(super) type Times = (Instant, Instant);

/// A read whose bytes wait to be expanded.
pub(super) type ToExpand = (Read, Times);

/// What became of reads, and memory for those to come.
#[derive(Default)]
pub(super) struct Shared {
    done: Mutex<HashMap<Ticket, (io::Result<()>, Times)>>,
    rang: Condvar,
    pub staging: Staging,
}

impl Shared {
    /// Tells whoever waits how a read ended.
    pub fn post(&self, ticket: Ticket, result: io::Result<()>, times: Times) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.insert(ticket, (result, times));
        self.rang.notify_all();
    }

    /// The same of one that never began.
    pub fn refuse(&self, (ticket, error): (Ticket, io::Error)) {
        let now = Instant::now();
        self.post(ticket, Err(error), (now, now));
    }

    /// A read is over: it is told, or expanded first.
    pub fn end(&self, read: Read, result: io::Result<()>, times: Times, expander: &Sender<ToExpand>) {
        let ticket = read.request.ticket;
        read.file.forget(read.request.offset, read.request.length);
        match (&result, &read.request.to) {
            (Ok(()), To::Through(_)) => {
                if let Err(unsent) = expander.send((read, times)) {
                    unsent.0.0.give_up(&self.staging);
                    self.refuse((ticket, io::Error::other("the thread that expands weights has ended")));
                }
            }
            _ => {
                read.give_up(&self.staging);
                self.post(ticket, result, times);
            }
        }
    }

    /// Expands what reads bring until nobody reads any more.
    pub fn expand(&self, reads: &Receiver<ToExpand>) {
        for (read, times) in reads {
            let ticket = read.request.ticket;
            let result = read.expand(&self.staging);
            self.post(ticket, result, times);
        }
    }

    /// Waits for a read; how long ago the disk began and ended it.
    pub fn wait(&self, ticket: Ticket) -> io::Result<(Duration, Duration)> {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some((result, (from, to))) = done.remove(&ticket) {
                let now = Instant::now();
                return result.map(|()| (now - from, now - to));
            }
            done = self.rang.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

pub(super) fn ends_early() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends too early")
}
