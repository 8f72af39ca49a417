//! A thread that copies host memory to a device while sessions compute, for devices without streams.
//!
//! Values are not `Send`, so the thread gets their addresses. Invariant: the requesting thread keeps the values in `Copier::pending`
//! until it has received the result of their job.

use super::copy_values::copy_values;
use super::lock::DeviceLock;
use super::value::Value;
use super::{ReadWeight, check};
use hpp_engine::BackendError;
use hpp_engine::port::Interval;
use hpp_schema::DType;
use ort::environment::Environment;
use ort::sys::OrtValue;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// The copy of one weight from host memory to a tensor of bytes on a device.
pub(crate) struct WeightCopy {
    pub from: Value,
    pub to: Value,
    /// The read that fills the staging buffer around `from`; `None` if `from` holds the weight already.
    pub read: Option<StagedRead>,
}

/// A read of a weight from its file into a staging buffer.
#[derive(Clone)]
pub(crate) struct StagedRead {
    pub read: ReadWeight,
    pub buffer: *mut u8,
    pub length: usize,
}

/// The copy thread of one device, and the copies that it works on.
pub(crate) struct Copier {
    /// `None` tells the thread to end.
    jobs: RefCell<Option<Sender<CopyJob>>>,
    thread: RefCell<Option<JoinHandle<()>>>,
    /// The values of each job whose result has not been received yet, by job number.
    pending: RefCell<BTreeMap<u64, Vec<WeightCopy>>>,
    next: Cell<u64>,
}

/// Copies in progress that were requested together. Dropping this waits for them.
pub(crate) struct PendingCopies {
    number: u64,
    done: Receiver<Result<Interval, String>>,
    copier: Rc<Copier>,
    received: bool,
}

struct CopyJob {
    copies: Vec<CopyAddresses>,
    lock: DeviceLock,
    done: Sender<Result<Interval, String>>,
}

struct CopyAddresses {
    from: *mut OrtValue,
    to: *mut OrtValue,
    read: Option<StagedRead>,
}

// SAFETY: `Copier::pending` keeps the values and their memory until the job's result was received, and nothing else writes to the host
// bytes meanwhile: jobs use the staging buffer one after the other, and other sources are only read. Nothing else uses these values.
unsafe impl Send for CopyAddresses {}

impl Copier {
    pub fn new(environment: Environment) -> std::io::Result<Rc<Self>> {
        let (jobs, queue) = channel::<CopyJob>();
        let work = move || {
            for job in queue {
                let mut start = None;
                let copied = job.copies.iter().try_for_each(|one| copy(&environment, one, &job.lock, &mut start));
                let end = hpp_engine::since_start();
                // The requesting thread may have dropped the receiver.
                let _ = job.done.send(copied.map(|()| Interval { start: start.unwrap_or(end), end }));
            }
        };
        let thread = std::thread::Builder::new().name("hpp-copier".into()).spawn(work)?;
        Ok(Rc::new(Copier {
            jobs: RefCell::new(Some(jobs)),
            thread: RefCell::new(Some(thread)),
            pending: RefCell::default(),
            next: Cell::new(0),
        }))
    }

    /// Starts to copy, one weight after the other, taking the device's lock for each.
    pub fn begin(self: &Rc<Self>, copies: Vec<WeightCopy>, lock: DeviceLock) -> PendingCopies {
        let (done, receiver) = channel();
        let addresses =
            |one: &WeightCopy| CopyAddresses { from: one.from.as_ptr(), to: one.to.as_ptr(), read: one.read.clone() };
        let job = CopyJob { copies: copies.iter().map(addresses).collect(), lock, done };
        let number = self.next.get();
        self.next.set(number + 1);
        self.pending.borrow_mut().insert(number, copies);
        if let Some(jobs) = &*self.jobs.borrow() {
            // If the thread has ended, the job and its sender are dropped, and waiting returns an error.
            let _ = jobs.send(job);
        }
        PendingCopies { number, done: receiver, copier: Rc::clone(self), received: false }
    }
}

impl PendingCopies {
    /// Waits for all copies; the interval in which they were made.
    pub fn wait(mut self) -> Result<Interval, BackendError> {
        self.finish()
    }

    fn finish(&mut self) -> Result<Interval, BackendError> {
        self.received = true;
        let outcome = self.done.recv().unwrap_or_else(|_| Err("the copy thread has ended".into()));
        // Only now the thread no longer uses the addresses.
        self.copier.pending.borrow_mut().remove(&self.number);
        outcome.map_err(|cause| BackendError::Runtime { doing: "copy weights to a device".into(), cause })
    }
}

impl Drop for PendingCopies {
    fn drop(&mut self) {
        if !self.received {
            let _ = self.finish();
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        *self.jobs.borrow_mut() = None;
        if let Some(thread) = self.thread.borrow_mut().take() {
            // `pending` is dropped after this, when the thread no longer uses its addresses.
            let _ = thread.join();
        }
    }
}

/// Copies one weight. Sets `start` when the first copy of a job starts: after its read, and with the lock held.
fn copy(
    environment: &Environment,
    addresses: &CopyAddresses,
    lock: &DeviceLock,
    start: &mut Option<Duration>,
) -> Result<(), String> {
    if let Some(StagedRead { read, buffer, length }) = &addresses.read {
        // SAFETY: a staging buffer of that length, which only this job uses now (see `CopyAddresses`).
        read(unsafe { std::slice::from_raw_parts_mut(*buffer, *length) })?;
    }
    let _lock = lock.acquire();
    start.get_or_insert_with(hpp_engine::since_start);
    // SAFETY: both values are alive and of equal size (see `CopyAddresses`).
    let status = unsafe { copy_values(environment, addresses.from, addresses.to) };
    // SAFETY: fresh from the call above.
    unsafe { check(status, || "copy weights".into()) }.map_err(|error| error.to_string())
}

/// The element type of both sides of a copy: plain bytes.
pub(crate) const BYTES: DType = DType::Uint8;
