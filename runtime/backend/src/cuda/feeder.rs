//! A thread that reads weights from their files, or copies states from host memory, into pinned memory and enqueues their copies on a
//! device's copy stream.
//!
//! What lies in pinned memory needs no thread. The rest goes through a double buffer: while one half is copied, the thread fills the other.

use super::streams::{CopyRange, CopyStream, QueuedCopies, Streams};
use crate::raw::ReadWeight;
use crate::raw::memory::Memory;
use cudarc::driver::CudaEvent;
use hpp_engine::BackendError;
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Where one weight or state comes from.
pub(crate) enum FeedWeight {
    /// From pinned memory.
    Pinned(CopyRange),
    /// From its file: `read` fills `length` bytes of a half; the weight is at `weight` in them.
    Read { read: ReadWeight, length: usize, weight: Range<usize>, to: *mut c_void },
    /// From host memory that is not pinned, in pieces of at most `piece` bytes, for which a half has room.
    Host { range: CopyRange, piece: usize },
}

/// The thread of one copy stream of a device. After this is dropped, the thread finishes its jobs and ends.
pub(crate) struct Feeder {
    jobs: Sender<FeedJob>,
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

// SAFETY: `PendingFeed` keeps the memory of these addresses alive until the thread has enqueued all copies, and device and pinned memory
// wait for the stream before they are freed. Only the thread uses the staging memory, and the other sources are only read; nothing writes to
// them before the job is enqueued (see `Backend::copy_ahead`), and then those that are not pinned have been read.
unsafe impl Send for FeedJob {}

impl Feeder {
    pub fn new(streams: Arc<Streams>, on: CopyStream) -> io::Result<Self> {
        let (jobs, queue) = channel::<FeedJob>();
        let work = move || {
            let mut buffer = DoubleBuffer { on, halves: None, copied: [None, None], next: 0 };
            for job in queue {
                // The requesting thread may have dropped the receiver.
                let _ = job.queued.send(buffer.feed(&streams, job.after, job.weights, job.halves));
            }
        };
        std::thread::Builder::new().name("hpp-feeder".into()).spawn(work)?;
        Ok(Feeder { jobs })
    }

    /// Starts to copy weights after the event `after`. `halves` are two parts of staging memory, each with room for the
    /// largest read; `memory` owns them, the sources and the targets.
    pub fn begin(
        &self,
        after: CudaEvent,
        weights: Vec<FeedWeight>,
        halves: [*mut u8; 2],
        memory: Vec<Memory>,
    ) -> PendingFeed {
        let (queued, receiver) = channel();
        // If the thread has ended, the job and its sender are dropped, and waiting returns an error.
        let _ = self.jobs.send(FeedJob { after, weights, halves, queued });
        PendingFeed { queued: receiver, _memory: memory, received: false }
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
struct DoubleBuffer {
    on: CopyStream,
    halves: Option<[*mut u8; 2]>,
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
        if self.halves.replace(halves).is_some_and(|before| before != halves) {
            // The new halves may overlap with the ones before: the copies from both of those must have finished.
            (0..2).try_for_each(|half| self.wait_for(half, streams))?;
        }
        let start = streams.begin_copies(self.on, after)?;
        for weight in weights {
            match weight {
                // SAFETY: see `FeedJob`.
                FeedWeight::Pinned(range) => unsafe { streams.copy_one(self.on, range) }?,
                FeedWeight::Read { read, length, weight, to } => {
                    let half = self.next_half(streams, halves)?;
                    // SAFETY: each half has room for the largest read (see `begin`), and the last copy from it has finished.
                    read(unsafe { std::slice::from_raw_parts_mut(half, length) }).map_err(failed)?;
                    // SAFETY: see `FeedJob`; the weight lies within the bytes that were read.
                    unsafe {
                        streams.copy_one(self.on, CopyRange { from: half.add(weight.start), to, bytes: weight.len() })
                    }?;
                    self.half_is_copied(streams)?;
                }
                FeedWeight::Host { range, piece } => self.feed_host(streams, range, piece, halves)?,
            }
        }
        streams.end_copies(self.on, start)
    }

    /// Copies host memory through the halves.
    fn feed_host(
        &mut self,
        streams: &Streams,
        CopyRange { from, to, bytes }: CopyRange,
        piece: usize,
        halves: [*mut u8; 2],
    ) -> Result<(), BackendError> {
        for start in (0..bytes).step_by(piece) {
            let length = piece.min(bytes - start);
            let half = self.next_half(streams, halves)?;
            // SAFETY: source and target have `bytes` bytes (see `FeedJob`), each half has room for a piece, and the last copy from it
            // has finished.
            unsafe {
                std::ptr::copy_nonoverlapping(from.add(start), half, length);
                streams.copy_one(self.on, CopyRange { from: half, to: to.byte_add(start), bytes: length })?;
            }
            self.half_is_copied(streams)?;
        }
        Ok(())
    }

    /// Records that the copy from the half that was filled last is enqueued, and makes the other half the next.
    fn half_is_copied(&mut self, streams: &Streams) -> Result<(), BackendError> {
        self.copied[self.next] = Some(streams.record_copies(self.on)?);
        self.next = 1 - self.next;
        Ok(())
    }

    /// The next half, after the last copy from it has finished.
    fn next_half(&mut self, streams: &Streams, halves: [*mut u8; 2]) -> Result<*mut u8, BackendError> {
        self.wait_for(self.next, streams)?;
        Ok(halves[self.next])
    }

    fn wait_for(&mut self, half: usize, streams: &Streams) -> Result<(), BackendError> {
        if let Some(copied) = self.copied[half].take() {
            copied.synchronize().map_err(|error| failed(error.to_string()))?;
            streams.recycle(copied);
        }
        Ok(())
    }
}

fn failed(cause: String) -> BackendError {
    BackendError::Runtime { doing: "copy weights to a device".into(), cause }
}
