//! Reads through io_uring: one thread, several reads in flight.

use super::DEPTH;
use super::request::{NotNow, Read, ReadRequest};
use super::shared::{Shared, Times, ToDecompress, ends_early};
use crate::weights::file::SECTOR;
use io_uring::{IoUring, opcode, types};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// A read that was given to the ring.
struct InFlight {
    read: Read,
    /// Bytes read so far.
    done: usize,
    started: Instant,
}

/// Names the poll of [`Wake`] among the ring's completions; tickets count from zero.
const WAKE: u64 = u64::MAX;

/// Wakes the thread of a ring while it waits for reads, so that a new request starts at once and not only after one of these reads.
pub(super) struct Wake(File);

impl Wake {
    pub fn new() -> io::Result<Self> {
        // SAFETY: the call takes no pointer.
        let descriptor = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was made above and nothing else owns it.
        Ok(Wake(unsafe { File::from_raw_fd(descriptor) }))
    }

    pub fn notify(&self) {
        // Fails only if the counter is full, and then the thread wakes anyway.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }

    fn clear(&self) {
        // Fails only if the counter is zero already.
        let _ = (&self.0).read(&mut [0; 8]);
    }
}

/// A ring with room for [`DEPTH`] reads and one poll, and what wakes its thread.
pub(super) struct WakeableRing {
    ring: IoUring,
    pub wake: Arc<Wake>,
}

impl WakeableRing {
    pub fn new() -> io::Result<Self> {
        Ok(WakeableRing { ring: IoUring::new(DEPTH as u32 + 1)?, wake: Arc::new(Wake::new()?) })
    }
}

/// Reads requests until no more can come.
pub(super) fn through_ring(
    WakeableRing { ring, wake }: WakeableRing,
    requests: &Mutex<Receiver<ReadRequest>>,
    shared: &Shared,
    decompressor: &Sender<ToDecompress>,
) {
    let requests = &*requests.lock().unwrap_or_else(PoisonError::into_inner);
    let mut worker = RingWorker {
        ring,
        wake,
        is_polled: false,
        requests,
        shared,
        decompressor,
        deferred: None,
        to_submit: VecDeque::new(),
        in_flight: HashMap::new(),
        finished: Vec::new(),
    };
    while worker.accept() {
        worker.submit();
        worker.wait();
    }
}

struct RingWorker<'a> {
    ring: IoUring,
    wake: Arc<Wake>,
    /// Whether the ring polls `wake`.
    is_polled: bool,
    requests: &'a Receiver<ReadRequest>,
    shared: &'a Shared,
    decompressor: &'a Sender<ToDecompress>,
    /// A request that waits for a staging buffer.
    deferred: Option<ReadRequest>,
    to_submit: VecDeque<InFlight>,
    in_flight: HashMap<u64, InFlight>,
    /// Finished and not yet published.
    finished: Vec<(Read, io::Result<()>, Times)>,
}

impl RingWorker<'_> {
    /// Takes requests up to the queue depth; waits for one if there is nothing else to do. False once no more can come.
    fn accept(&mut self) -> bool {
        while self.in_flight.len() + self.to_submit.len() < DEPTH {
            let is_idle = self.in_flight.is_empty() && self.to_submit.is_empty() && self.finished.is_empty();
            let request = match self.deferred.take() {
                Some(request) => Ok(request),
                None if is_idle => self.requests.recv().map_err(|_| TryRecvError::Disconnected),
                None => self.requests.try_recv(),
            };
            match request {
                Ok(request) => match Read::new(request, &self.shared.staging, is_idle) {
                    Ok(read) => self.to_submit.push_back(InFlight { read, done: 0, started: Instant::now() }),
                    Err(NotNow::Refused(ticket, error)) => self.shared.refuse(ticket, error),
                    Err(NotNow::Later(request)) => {
                        self.deferred = Some(request);
                        break;
                    }
                },
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) if is_idle => return false,
                Err(TryRecvError::Disconnected) => break,
            }
        }
        true
    }

    fn submit(&mut self) {
        while let Some(mut flight) = self.to_submit.pop_front() {
            if self.in_flight.is_empty() {
                flight.started = Instant::now();
            }
            push_read(&mut self.ring, &flight);
            self.in_flight.insert(flight.read.request.ticket.0, flight);
        }
        // Poll for new requests only if another read could start now.
        if self.in_flight.len() < DEPTH && self.deferred.is_none() && !self.is_polled {
            push_poll(&mut self.ring, &self.wake);
            self.is_polled = true;
        }
        // Submit before publishing completions: waking a waiter may preempt this thread and leave the disk idle. An error of `submit`
        // shows again in `wait`.
        if !self.finished.is_empty() {
            let _ = self.ring.submit();
        }
        for (read, result, times) in self.finished.drain(..) {
            self.shared.finish(read, result, times, self.decompressor);
        }
    }

    /// Waits for one of the reads in flight, if there are any, or for a new request, and collects the reads that have finished.
    fn wait(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        match self.ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if is_transient(&error) => return,
            Err(error) => self.abort(&error),
        }
        loop {
            let Some(entry) = self.ring.completion().next() else { break };
            if entry.user_data() == WAKE {
                self.wake.clear();
                self.is_polled = false;
            } else if let Some(flight) = self.in_flight.remove(&entry.user_data()) {
                self.complete(flight, entry.result());
            }
        }
    }

    /// The ring cannot be waited on: the kernel may still write to the destinations of reads in flight, and whether it does cannot be
    /// found out, so no read may be published. Only a mistake in this file leads here.
    fn abort(&self, error: &io::Error) -> ! {
        eprintln!(
            "hpp: fatal: io_uring cannot be waited on ({error}) with {} reads of weights in flight, which may still write to \
             memory",
            self.in_flight.len()
        );
        std::process::abort()
    }

    /// A read returned a number of bytes, or a negative error number. A short read continues.
    fn complete(&mut self, mut flight: InFlight, returned: i32) {
        let expected = flight.read.expected();
        let result = match usize::try_from(returned) {
            Err(_) => Err(io::Error::from_raw_os_error(-returned)),
            Ok(bytes) if flight.done + bytes >= expected => Ok(()),
            Ok(bytes) => {
                // Direct reads continue at a sector.
                let done = (flight.done + bytes) / SECTOR as usize * SECTOR as usize;
                if done > flight.done {
                    flight.done = done;
                    self.to_submit.push_back(flight);
                    return;
                }
                Err(ends_early(&flight.read.file))
            }
        };
        let times = (flight.started, Instant::now());
        self.finished.push((flight.read, result, times));
    }
}

/// Whether the same call may succeed the next time.
fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

fn push_read(ring: &mut IoUring, InFlight { read, done, .. }: &InFlight) {
    let request = &read.request;
    let length = (request.length - done) as u32;
    let entry = opcode::Read::new(types::Fd(read.file.descriptor()), read.at().wrapping_add(*done), length)
        .offset(request.offset + *done as u64)
        .build()
        .user_data(request.ticket.0);
    // SAFETY: `InFlight` keeps the descriptor open and the staging buffer alive until the read has finished; any other destination
    // stays valid by the contract of `Reader::read`.
    unsafe { push(ring, &entry) }
}

fn push_poll(ring: &mut IoUring, wake: &Wake) {
    let entry = opcode::PollAdd::new(types::Fd(wake.0.as_raw_fd()), libc::POLLIN as u32).build().user_data(WAKE);
    // SAFETY: a poll has no memory, and the ring's worker keeps the descriptor open for as long as the ring lives.
    unsafe { push(ring, &entry) }
}

/// # Safety
/// The descriptor and the memory of the entry stay valid until it has completed.
unsafe fn push(ring: &mut IoUring, entry: &io_uring::squeue::Entry) {
    // SAFETY: the contract of this function. The queue has an entry for each of `DEPTH` reads and one poll.
    let pushed = unsafe { ring.submission().push(entry) };
    pushed.expect("the ring has an entry for each read in flight and one for the poll");
}
