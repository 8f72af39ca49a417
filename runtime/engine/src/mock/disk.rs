//! A disk on the mock's clock: one read after the other at a constant rate, and the laws of reading weights.

use super::VirtualClock;
use super::tensor::misfit;
use crate::error::BackendError;
use crate::port::{ChunkBytes, Took};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// The disk of a [`MockBackend`](super::MockBackend). Clones are the same disk.
#[derive(Clone, Debug, Default)]
pub struct MockDisk(Rc<Drive>);

#[derive(Debug, Default)]
struct Drive {
    bytes_per_ms: Cell<f64>,
    /// Bytes of memory that each byte read fills; as many where it is 0.
    density: Cell<u64>,
    /// When the last read that was begun ends.
    busy_until: Cell<Duration>,
    held: Cell<u64>,
    most_held: Cell<u64>,
    /// The next read fails so.
    breaks: RefCell<Option<String>>,
}

impl MockDisk {
    /// What it reads, in bytes per millisecond.
    pub fn reads_at(&self, bytes_per_ms: f64) {
        self.0.bytes_per_ms.set(bytes_per_ms);
    }

    /// Stores weights so densely that each byte read fills so many.
    pub fn stores(&self, density: u64) {
        self.0.density.set(density);
    }

    /// Makes the next read fail.
    pub fn breaks(&self, why: &str) {
        *self.0.breaks.borrow_mut() = Some(why.to_owned());
    }

    fn chunk(&self, held: u64) -> ChunkBytes {
        ChunkBytes { held, read: held / self.0.density.get().max(1) }
    }

    /// Most bytes of weights that were being read or present at once.
    pub fn most_held(&self) -> u64 {
        self.0.most_held.get()
    }

    fn read(&self, ChunkBytes { held, read: bytes }: ChunkBytes, clock: &VirtualClock) -> Took {
        let drive = &self.0;
        let from = drive.busy_until.get().max(clock.now());
        let seconds = if drive.bytes_per_ms.get() > 0.0 { bytes as f64 / drive.bytes_per_ms.get() / 1e3 } else { 0.0 };
        let to = from + Duration::from_secs_f64(seconds);
        drive.busy_until.set(to);
        drive.held.set(drive.held.get() + held);
        drive.most_held.set(drive.most_held.get().max(drive.held.get()));
        Took { from, to }
    }
}

/// The chunks of one session's weights, and which are there.
#[derive(Clone, Debug, Default)]
pub(super) struct Weights {
    bytes: Vec<ChunkBytes>,
    reads: Vec<Chunk>,
    disk: MockDisk,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Chunk {
    Absent,
    Reading(Took),
    Present,
}

impl Weights {
    pub fn new(bytes: Vec<u64>, disk: MockDisk) -> Self {
        let bytes: Vec<_> = bytes.into_iter().map(|held| disk.chunk(held)).collect();
        Weights { reads: vec![Chunk::Absent; bytes.len()], bytes, disk }
    }

    /// The first `locked` bytes stay in memory from now on.
    pub fn settle(&mut self, mut locked: u64) {
        let rest = |bytes: &ChunkBytes| {
            let stays = locked.min(bytes.held);
            locked -= stays;
            self.disk.chunk(bytes.held - stays)
        };
        self.bytes = self.bytes.iter().map(rest).filter(|bytes| bytes.held > 0).collect();
        self.reads = vec![Chunk::Absent; self.bytes.len()];
    }

    pub fn bytes(&self) -> &[ChunkBytes] {
        &self.bytes
    }

    pub fn begin(&mut self, chunk: usize, clock: &VirtualClock) -> Result<(), BackendError> {
        match self.reads[chunk] {
            Chunk::Absent => self.reads[chunk] = Chunk::Reading(self.disk.read(self.bytes[chunk], clock)),
            Chunk::Reading(_) | Chunk::Present => {
                return Err(misfit("a chunk", "it is read before it was let go".into()));
            }
        }
        Ok(())
    }

    pub fn finish(&mut self, chunk: usize, clock: &VirtualClock) -> Result<Took, BackendError> {
        let Chunk::Reading(took) = self.reads[chunk] else {
            return Err(misfit("a chunk", "nobody has begun to read it".into()));
        };
        if let Some(cause) = self.disk.0.breaks.borrow_mut().take() {
            return Err(BackendError::Runtime { doing: "read weights".into(), cause });
        }
        clock.advance(took.to.saturating_sub(clock.now()));
        self.reads[chunk] = Chunk::Present;
        Ok(took)
    }

    pub fn release(&mut self) {
        for (state, bytes) in self.reads.iter_mut().zip(&self.bytes).filter(|(state, _)| **state != Chunk::Absent) {
            self.disk.0.held.set(self.disk.0.held.get() - bytes.held);
            *state = Chunk::Absent;
        }
    }

    /// No run computes with weights that are not there.
    pub fn check(&self) -> Result<(), BackendError> {
        match self.reads.iter().position(|state| *state != Chunk::Present) {
            Some(chunk) => Err(misfit("a run", format!("chunk {chunk} of its weights is not there"))),
            None => Ok(()),
        }
    }
}
