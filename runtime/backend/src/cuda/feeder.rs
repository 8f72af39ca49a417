//! A thread that reads weights from their files into pinned memory and gives them to a device's stream for copies.
//!
//! Weights that lie in pinned memory need no thread. The others go through two halves of a staging buffer: while one is copied,
//! the other is filled.

use super::streams::{Address, Copied, Streams};
use crate::raw::Fill;
use crate::raw::memory::Memory;
use cudarc::driver::CudaEvent;
use hpp_engine::BackendError;
use std::ffi::c_void;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// A weight on its way.
pub(crate) enum Weight {
    /// It lies in pinned memory.
    There(Address),
    /// It is read from its file.
    Filled { fill: Fill, to: *mut c_void, bytes: usize },
}

/// The thread of one device. It ends when this is dropped, after what it was given.
pub(crate) struct Feeder {
    jobs: Sender<Job>,
    streams: Arc<Streams>,
}

/// Weights that were given to the thread together.
pub(crate) struct Feeding {
    begun: Receiver<Result<Copied, BackendError>>,
    /// Memory that the thread has addresses of.
    _memory: Vec<Memory>,
    over: bool,
}

struct Job {
    after: CudaEvent,
    weights: Vec<Weight>,
    halves: [*mut u8; 2],
    begun: Sender<Result<Copied, BackendError>>,
}

// SAFETY: the addresses are of memory that `Feeding` keeps until the thread has given all of it to the device's stream, and that
// waits for that stream before it goes. Nobody else touches staging memory, and the rest is only read.
unsafe impl Send for Job {}

impl Feeder {
    pub fn new(streams: Arc<Streams>) -> io::Result<Self> {
        let (jobs, todo) = channel::<Job>();
        let own = Arc::clone(&streams);
        let work = move || {
            let mut staging = Staging::default();
            for job in todo {
                // Whoever asked may be gone.
                let _ = job.begun.send(staging.feed(&own, job.after, job.weights, job.halves));
            }
        };
        std::thread::Builder::new().name("hpp-feeder".into()).spawn(work)?;
        Ok(Feeder { jobs, streams })
    }

    /// Begins to copy weights behind what computes now. `halves` are two pieces of staging memory, each as large as the largest
    /// weight that is read; `memory` keeps them and where the weights go.
    pub fn begin(
        &self,
        weights: Vec<Weight>,
        halves: [*mut u8; 2],
        memory: Vec<Memory>,
    ) -> Result<Feeding, BackendError> {
        let (begun, over) = channel();
        // A thread that is gone drops the job, and with it the sender: waiting then says so.
        let _ = self.jobs.send(Job { after: self.streams.mark()?, weights, halves, begun });
        Ok(Feeding { begun: over, _memory: memory, over: false })
    }
}

impl Feeding {
    /// Waits until the device's stream has all of it, which is before it is copied.
    pub fn wait(mut self) -> Result<Copied, BackendError> {
        self.over = true;
        self.receive()
    }

    fn receive(&self) -> Result<Copied, BackendError> {
        let gone = || BackendError::Runtime {
            doing: "copy weights to a device".into(),
            cause: "the thread that reads them is gone".into(),
        };
        self.begun.recv().unwrap_or_else(|_| Err(gone()))
    }
}

impl Drop for Feeding {
    fn drop(&mut self) {
        if !self.over {
            let _ = self.receive();
        }
    }
}

/// Which half is filled next, and until when each is copied from.
#[derive(Default)]
struct Staging {
    copied: [Option<CudaEvent>; 2],
    next: usize,
}

impl Staging {
    fn feed(
        &mut self,
        streams: &Streams,
        after: CudaEvent,
        weights: Vec<Weight>,
        halves: [*mut u8; 2],
    ) -> Result<Copied, BackendError> {
        let from = streams.begin_copies(after)?;
        for weight in weights {
            match weight {
                // SAFETY: see `Job`.
                Weight::There(address) => unsafe { streams.copy_one(address) }?,
                Weight::Filled { fill, to, bytes } => self.fill(streams, &fill, (halves, to, bytes))?,
            }
        }
        streams.end_copies(from)
    }

    fn fill(
        &mut self,
        streams: &Streams,
        fill: &Fill,
        (halves, to, bytes): ([*mut u8; 2], *mut c_void, usize),
    ) -> Result<(), BackendError> {
        let failed = |cause: String| BackendError::Runtime { doing: "copy weights to a device".into(), cause };
        if let Some(copied) = self.copied[self.next].take() {
            copied.synchronize().map_err(|error| failed(error.to_string()))?;
            streams.give_back(copied);
        }
        let half = halves[self.next];
        // SAFETY: each half has room for the largest weight (see `begin`), and what was copied from it last is over.
        fill(unsafe { std::slice::from_raw_parts_mut(half, bytes) }).map_err(failed)?;
        // SAFETY: see `Job`.
        unsafe { streams.copy_one(Address { from: half, to, bytes }) }?;
        self.copied[self.next] = Some(streams.mark_copies()?);
        self.next = 1 - self.next;
        Ok(())
    }
}
