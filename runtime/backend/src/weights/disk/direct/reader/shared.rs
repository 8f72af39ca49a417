//! State shared by the threads of a reader: results of reads, and staging buffers.

use super::request::{Read, ReadTarget, Ticket};
use super::staging::StagingPool;
use crate::weights::file::WeightFile;
use std::collections::HashMap;
use std::io;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// When the disk started and finished a read.
pub(super) type Times = (Instant, Instant);

/// A read whose bytes wait to be decompressed.
pub(super) type ToDecompress = (Read, Times);

/// Results of finished reads, and staging buffers.
#[derive(Default)]
pub(super) struct Shared {
    done: Mutex<HashMap<Ticket, (io::Result<()>, Times)>>,
    posted: Condvar,
    pub staging: StagingPool,
}

impl Shared {
    /// Publishes the result of a read.
    pub fn post(&self, ticket: Ticket, result: io::Result<()>, times: Times) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.insert(ticket, (result, times));
        self.posted.notify_all();
    }

    /// Publishes the error of a read that never started.
    pub fn refuse(&self, ticket: Ticket, error: io::Error) {
        let now = Instant::now();
        self.post(ticket, Err(error), (now, now));
    }

    /// A read has finished: publishes it, or has it decompressed first.
    pub fn finish(&self, read: Read, result: io::Result<()>, times: Times, decompressor: &Sender<ToDecompress>) {
        let ticket = read.request.ticket;
        read.file.drop_cached(read.request.offset, read.request.length);
        match (&result, &read.request.to) {
            (Ok(()), ReadTarget::Through(_)) => {
                if let Err(unsent) = decompressor.send((read, times)) {
                    unsent.0.0.cancel(&self.staging);
                    self.refuse(ticket, io::Error::other("the thread that decompresses weights has ended"));
                }
            }
            _ => {
                read.cancel(&self.staging);
                self.post(ticket, result, times);
            }
        }
    }

    /// Decompresses the bytes of reads until the reader is dropped. Several threads do this at once.
    pub fn decompress(&self, reads: &Mutex<Receiver<ToDecompress>>) {
        loop {
            let next = reads.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok((read, times)) = next else { return };
            let ticket = read.request.ticket;
            let result = read.decompress(&self.staging);
            self.post(ticket, result, times);
        }
    }

    /// Waits for a read; how long ago the disk started and finished it.
    pub fn wait(&self, ticket: Ticket) -> io::Result<(Duration, Duration)> {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some((result, (from, to))) = done.remove(&ticket) {
                let now = Instant::now();
                return result.map(|()| (now - from, now - to));
            }
            done = self.posted.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The error of a file that ends before the bytes to read: that it has changed since it was opened, if it has.
pub(super) fn ends_early(file: &WeightFile) -> io::Error {
    let unchanged = || io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends too early");
    file.check().err().unwrap_or_else(unchanged)
}
