//! Threads that read pages of mapped files ahead, in the order of requests.

use super::views;
use crate::weights::file::WeightFile;
use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Threads, each with one range in progress.
const THREADS: usize = 4;
/// Bytes of the smallest page of any system.
const PAGE: usize = 4096;

/// Identifies a range that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ticket(u64);

/// Reads pages of mapped files in the background.
pub(super) struct MappedPageReader {
    requests: Option<Sender<Request>>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    next: Cell<u64>,
}

struct Request {
    ticket: Ticket,
    file: Arc<WeightFile>,
    addresses: Range<usize>,
}

/// The results of finished reads.
#[derive(Default)]
struct Shared {
    done: Mutex<HashMap<Ticket, Outcome>>,
    posted: Condvar,
}

struct Outcome {
    result: io::Result<()>,
    began: Instant,
    ended: Instant,
}

impl MappedPageReader {
    /// Starts its threads.
    pub fn start() -> io::Result<Self> {
        let (sender, receiver) = channel();
        let (shared, receiver) = (Arc::<Shared>::default(), Arc::new(Mutex::new(receiver)));
        let mut threads = Vec::new();
        for _ in 0..THREADS {
            let (shared, receiver) = (Arc::clone(&shared), Arc::clone(&receiver));
            threads.push(Builder::new().name("hpp-page-reader".into()).spawn(move || shared.serve(&receiver))?);
        }
        Ok(MappedPageReader { requests: Some(sender), shared, threads, next: Cell::default() })
    }

    /// Starts to read the pages at these addresses.
    ///
    /// # Safety
    /// They must be part of a view of the file that stays mapped until [`wait`](Self::wait) has returned for the ticket.
    pub unsafe fn read(&self, file: &Arc<WeightFile>, addresses: Range<usize>) -> Ticket {
        let ticket = Ticket(self.next.replace(self.next.get() + 1));
        let request = Request { ticket, file: Arc::clone(file), addresses };
        let sent = self.requests.as_ref().map(|requests| requests.send(request));
        if !matches!(sent, Some(Ok(()))) {
            let (now, error) = (Instant::now(), io::Error::other("the threads that read weights have ended"));
            self.shared.post(ticket, Outcome { result: Err(error), began: now, ended: now });
        }
        ticket
    }

    /// Waits for a read; returns how long ago it began and ended. An error if the file was changed since it was opened.
    pub fn wait(&self, ticket: Ticket) -> io::Result<(Duration, Duration)> {
        let mut done = self.shared.done.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(Outcome { result, began, ended }) = done.remove(&ticket) {
                return result.map(|()| (began.elapsed(), ended.elapsed()));
            }
            done = self.shared.posted.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for MappedPageReader {
    fn drop(&mut self) {
        self.requests = None;
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

impl Shared {
    fn serve(&self, requests: &Mutex<Receiver<Request>>) {
        loop {
            let next = requests.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(Request { ticket, file, addresses }) = next else { return };
            let began = Instant::now();
            // A truncated file would end the process when its missing pages are read.
            let result = file.check();
            if result.is_ok() {
                views::prefetch(&addresses);
                touch(addresses);
            }
            self.post(ticket, Outcome { result, began, ended: Instant::now() });
        }
    }

    fn post(&self, ticket: Ticket, outcome: Outcome) {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).insert(ticket, outcome);
        self.posted.notify_all();
    }
}

/// Reads a byte of each page, so that all are in memory afterwards.
fn touch(addresses: Range<usize>) {
    for at in addresses.step_by(PAGE) {
        // SAFETY: the view stays mapped until the read was waited for (`MappedPageReader::read`), and nobody writes to it.
        unsafe { (at as *const u8).read_volatile() };
    }
}
