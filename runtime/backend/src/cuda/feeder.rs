//! A thread that reads weights from their files into pinned memory and enqueues their copies on a device's copy stream.
//!
//! Weights in pinned memory need no thread. The others go through a double buffer: while one half is copied, the thread fills the other.

use super::streams::{CopyRange, QueuedCopies, Streams};
use crate::raw::ReadWeight;
use crate::raw::memory::Memory;
use cudarc::driver::CudaEvent;
use hpp_engine::BackendError;
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Where one weight comes from.
pub(crate) enum FeedWeight {
    /// From pinned memory.
    Pinned(CopyRange),
    /// From its file: `read` fills `length` bytes of a half; the weight is at `weight` in them.
    Read { read: ReadWeight, length: usize, weight: Range<usize>, to: *mut c_void },
}

/// The thread of one device. After this is dropped, the thread finishes its jobs and ends.
pub(crate) struct Feeder {
    jobs: Sender<FeedJob>,
    streams: Arc<Streams>,
}

/// A job of the thread. Dropping this waits until the job is enqueued.
pub(crate) struct PendingFeed {
    queued: Receiver<Result<QueuedCopies, BackendError>>,
    /// The memory whose addresses the job has.
    _memory: Vec<Memory>,
    received: bool,
}

struct FeedJob {
    after: CudaEvent,
    weights: Vec<FeedWeight>,
    halves: [*mut u8; 2],
    queued: Sender<Result<QueuedCopies, BackendError>>,
}

// SAFETY: `PendingFeed` keeps the memory of these addresses alive until the thread has enqueued all copies, and that memory waits for the
// stream before it is freed. Only the thread uses the staging memory, and the other sources are only read.
unsafe impl Send for FeedJob {}

impl Feeder {
    pub fn new(streams: Arc<Streams>) -> io::Result<Self> {
        let (jobs, queue) = channel::<FeedJob>();
        let own = Arc::clone(&streams);
        let work = move || {
            let mut buffer = DoubleBuffer::default();
            for job in queue {
                // The requesting thread may have dropped the receiver.
                let _ = job.queued.send(buffer.feed(&own, job.after, job.weights, job.halves));
            }
        };
        std::thread::Builder::new().name("hpp-feeder".into()).spawn(work)?;
        Ok(Feeder { jobs, streams })
    }

    /// Starts to copy weights after the runs that are enqueued now. `halves` are two parts of staging memory, each with room for the
    /// largest read; `memory` owns them, the sources and the targets.
    pub fn begin(
        &self,
        weights: Vec<FeedWeight>,
        halves: [*mut u8; 2],
        memory: Vec<Memory>,
    ) -> Result<PendingFeed, BackendError> {
        let (queued, receiver) = channel();
        // If the thread has ended, the job and its sender are dropped, and waiting returns an error.
        let _ = self.jobs.send(FeedJob { after: self.streams.record_compute()?, weights, halves, queued });
        Ok(PendingFeed { queued: receiver, _memory: memory, received: false })
    }
}

impl PendingFeed {
    /// Waits until all copies are enqueued on the copy stream; they may not have finished.
    pub fn wait(mut self) -> Result<QueuedCopies, BackendError> {
        self.received = true;
        self.receive()
    }

    fn receive(&self) -> Result<QueuedCopies, BackendError> {
        self.queued.recv().unwrap_or_else(|_| Err(failed("the thread that reads weights has ended".into())))
    }
}

impl Drop for PendingFeed {
    fn drop(&mut self) {
        if !self.received {
            let _ = self.receive();
        }
    }
}

/// The events after the last copy from each half, and which half is filled next.
#[derive(Default)]
struct DoubleBuffer {
    copied: [Option<CudaEvent>; 2],
    next: usize,
}

impl DoubleBuffer {
    fn feed(
        &mut self,
        streams: &Streams,
        after: CudaEvent,
        weights: Vec<FeedWeight>,
        halves: [*mut u8; 2],
    ) -> Result<QueuedCopies, BackendError> {
        let start = streams.begin_copies(after)?;
        for weight in weights {
            match weight {
                // SAFETY: see `FeedJob`.
                FeedWeight::Pinned(range) => unsafe { streams.copy_one(range) }?,
                FeedWeight::Read { read, length, weight, to } => {
                    let half = self.next_half(streams, halves)?;
                    // SAFETY: each half has room for the largest read (see `begin`), and the last copy from it has finished.
                    read(unsafe { std::slice::from_raw_parts_mut(half, length) }).map_err(failed)?;
                    // SAFETY: see `FeedJob`; the weight lies within the bytes that were read.
                    unsafe { streams.copy_one(CopyRange { from: half.add(weight.start), to, bytes: weight.len() }) }?;
                    self.copied[self.next] = Some(streams.record_copies()?);
                    self.next = 1 - self.next;
                }
            }
        }
        streams.end_copies(start)
    }

    /// The next half, after the last copy from it has finished.
    fn next_half(&mut self, streams: &Streams, halves: [*mut u8; 2]) -> Result<*mut u8, BackendError> {
        if let Some(copied) = self.copied[self.next].take() {
            copied.synchronize().map_err(|error| failed(error.to_string()))?;
            streams.recycle(copied);
        }
        Ok(halves[self.next])
    }
}

fn failed(cause: String) -> BackendError {
    BackendError::Runtime { doing: "copy weights to a device".into(), cause }
}
