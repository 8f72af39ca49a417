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
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// A weight on its way.
pub(crate) enum Weight {
    /// It lies in pinned memory.
    There(Address),
    /// It is read from its file, `within` so many bytes.
    Filled { fill: Fill, room: usize, within: Range<usize>, to: *mut c_void },
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

    /// Begins to copy weights behind what computes now. `halves` are two pieces of staging memory, each with room for the largest
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
        self.begun.recv().unwrap_or_else(|_| Err(failed("the thread that reads them is gone".into())))
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
                Weight::Filled { fill, room, within, to } => {
                    let half = self.half(streams, halves)?;
                    // SAFETY: each half has room for the largest weight (see `begin`), and what was copied from it last is over.
                    fill(unsafe { std::slice::from_raw_parts_mut(half, room) }).map_err(failed)?;
                    // SAFETY: see `Job`; the weight lies within what was filled.
                    unsafe { streams.copy_one(Address { from: half.add(within.start), to, bytes: within.len() }) }?;
                    self.copied[self.next] = Some(streams.mark_copies()?);
                    self.next = 1 - self.next;
                }
            }
        }
        streams.end_copies(from)
    }

    /// The next half, once nothing is copied from it any more.
    fn half(&mut self, streams: &Streams, halves: [*mut u8; 2]) -> Result<*mut u8, BackendError> {
        if let Some(copied) = self.copied[self.next].take() {
            copied.synchronize().map_err(|error| failed(error.to_string()))?;
            streams.give_back(copied);
        }
        Ok(halves[self.next])
    }
}

fn failed(cause: String) -> BackendError {
    BackendError::Runtime { doing: "copy weights to a device".into(), cause }
}
