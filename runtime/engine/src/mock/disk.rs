//! A disk on the mock's clock: one read after the other at a constant rate, with checks of the streaming contract.

use super::VirtualClock;
use super::tensor::misfit;
use crate::error::BackendError;
use crate::port::{ChunkSize, Interval, WeightPager, WeightResidency};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// The disk of a [`MockBackend`](super::MockBackend). Clones are the same disk.
#[derive(Clone, Debug, Default)]
pub struct MockDisk(Rc<Drive>);

#[derive(Debug, Default)]
struct Drive {
    bytes_per_ms: Cell<f64>,
    /// Bytes in memory for each byte on disk; 0 for 1.
    compression: Cell<u64>,
    /// When the last read ends.
    busy_until: Cell<Duration>,
    held: Cell<u64>,
    peak_held: Cell<u64>,
    /// The error of a read, and how many reads are waited for before it.
    next_error: RefCell<Option<(usize, String)>>,
}

impl MockDisk {
    /// Sets its rate, in bytes per millisecond.
    pub fn reads_at(&self, bytes_per_ms: f64) {
        self.0.bytes_per_ms.set(bytes_per_ms);
    }

    /// Stores weights compressed: `compression` bytes in memory for each on disk.
    pub fn compresses(&self, compression: u64) {
        self.0.compression.set(compression);
    }

    /// Makes the next read fail.
    pub fn fails(&self, why: &str) {
        self.fails_after(0, why);
    }

    /// Makes a read fail after this many that succeed, in the order in which they are waited for.
    pub fn fails_after(&self, reads: usize, why: &str) {
        *self.0.next_error.borrow_mut() = Some((reads, why.to_owned()));
    }

    /// The error of the read that is waited for now.
    fn take_error(&self) -> Option<String> {
        let next = &mut *self.0.next_error.borrow_mut();
        match next {
            Some((reads @ 1.., _)) => {
                *reads -= 1;
                None
            }
            _ => next.take().map(|(_, why)| why),
        }
    }

    /// Most bytes of weights that were in memory or on their way at once.
    pub fn peak_held(&self) -> u64 {
        self.0.peak_held.get()
    }

    fn chunk(&self, resident: u64) -> ChunkSize {
        ChunkSize { resident, stored: resident / self.0.compression.get().max(1) }
    }

    fn read(&self, ChunkSize { resident, stored }: ChunkSize, clock: &VirtualClock) -> Interval {
        let drive = &self.0;
        let start = drive.busy_until.get().max(clock.now());
        let rate = drive.bytes_per_ms.get();
        let seconds = if rate > 0.0 { stored as f64 / rate / 1e3 } else { 0.0 };
        let end = start + Duration::from_secs_f64(seconds);
        drive.busy_until.set(end);
        drive.held.set(drive.held.get() + resident);
        drive.peak_held.set(drive.peak_held.get().max(drive.held.get()));
        Interval { start, end }
    }
}

/// The weights of one session. Clones are the same.
#[derive(Clone, Debug)]
pub struct MockWeights(Rc<RefCell<Weights>>);

#[derive(Debug)]
struct Weights {
    is_unmanaged: bool,
    /// Bytes of the chunks that every run needs if none are locked.
    unlocked: Vec<u64>,
    /// The chunks that every run needs, then one for each expert.
    chunks: Vec<Chunk>,
    /// How many experts there are.
    experts: usize,
    /// The experts that the next run uses.
    selected: Vec<u32>,
    disk: MockDisk,
    clock: VirtualClock,
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    size: ChunkSize,
    state: ChunkState,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ChunkState {
    Absent,
    Reading(Interval),
    Present,
}

impl MockWeights {
    /// Weights in chunks of these bytes; each of the last `experts` chunks holds one expert.
    pub(super) fn new(
        bytes: Vec<u64>,
        experts: usize,
        residency: WeightResidency,
        disk: MockDisk,
        clock: VirtualClock,
    ) -> Self {
        let chunk = |resident| Chunk { size: disk.chunk(resident), state: ChunkState::Absent };
        let unlocked = bytes[..bytes.len() - experts].to_vec();
        let chunks = bytes.into_iter().map(chunk).collect();
        let is_unmanaged = residency == WeightResidency::InMemory;
        let selected = Vec::new();
        MockWeights(Rc::new(RefCell::new(Weights { is_unmanaged, unlocked, chunks, experts, selected, disk, clock })))
    }

    /// An error if a run would compute with weights that are not in memory.
    pub(super) fn check(&self) -> Result<(), BackendError> {
        let weights = self.0.borrow();
        let first = weights.first_expert();
        let selected = weights.selected.iter().map(|expert| first + *expert as usize);
        match (0..first).chain(selected).find(|chunk| weights.chunks[*chunk].state != ChunkState::Present) {
            Some(index) => Err(misfit("a run", format!("chunk {index} of its weights is not in memory"))),
            None => Ok(()),
        }
    }
}

impl Weights {
    fn first_expert(&self) -> usize {
        self.chunks.len() - self.experts
    }

    fn evict(&mut self, chunk: usize) {
        let chunk = &mut self.chunks[chunk];
        if chunk.state != ChunkState::Absent {
            let held = &self.disk.0.held;
            held.set(held.get() - chunk.size.resident);
            chunk.state = ChunkState::Absent;
        }
    }
}

/// The pager of a session's weights.
pub struct MockWeightPager {
    weights: MockWeights,
    /// The sizes of the chunks, as of the last [`lock_and_stream`](WeightPager::lock_and_stream).
    sizes: Vec<ChunkSize>,
    /// The chunk of each expert, likewise.
    experts: Vec<Range<usize>>,
}

impl MockWeightPager {
    pub(super) fn new(weights: MockWeights) -> Self {
        let mut stream = MockWeightPager { weights, sizes: Vec::new(), experts: Vec::new() };
        stream.describe();
        stream
    }

    fn describe(&mut self) {
        let weights = self.weights.0.borrow();
        self.sizes = weights.chunks.iter().map(|chunk| chunk.size).collect();
        self.experts = (weights.first_expert()..weights.chunks.len()).map(|chunk| chunk..chunk + 1).collect();
    }
}

impl WeightPager for MockWeightPager {
    fn is_unmanaged(&self) -> bool {
        self.weights.0.borrow().is_unmanaged
    }

    fn lock_and_stream(&mut self, mut locked: u64) -> Result<Option<String>, BackendError> {
        {
            let weights = &mut *self.weights.0.borrow_mut();
            let (disk, first_expert) = (weights.disk.clone(), weights.first_expert());
            if weights.chunks[..first_expert].iter().any(|chunk| chunk.state != ChunkState::Absent) {
                return Err(misfit("weights", "others are locked while chunks are in memory".into()));
            }
            let read = weights.unlocked.iter().map(|bytes| {
                let stays = locked.min(*bytes);
                locked -= stays;
                Chunk { size: disk.chunk(bytes - stays), state: ChunkState::Absent }
            });
            let read: Vec<Chunk> = read.filter(|chunk| chunk.size.resident > 0).collect();
            weights.chunks.splice(..first_expert, read);
        }
        self.describe();
        Ok(None)
    }

    fn experts(&self) -> &[Range<usize>] {
        &self.experts
    }

    fn select_experts(&mut self, experts: &[u32]) {
        self.weights.0.borrow_mut().selected = experts.to_vec();
    }

    fn evict(&mut self, chunk: usize) {
        self.weights.0.borrow_mut().evict(chunk);
    }

    fn chunks(&self) -> &[ChunkSize] {
        &self.sizes
    }

    fn prefetch(&mut self, chunk: usize) -> Result<(), BackendError> {
        let weights = &mut *self.weights.0.borrow_mut();
        let Chunk { size, state } = &mut weights.chunks[chunk];
        if *state != ChunkState::Absent {
            return Err(misfit("a chunk", "it is read again before it was released".into()));
        }
        *state = ChunkState::Reading(weights.disk.read(*size, &weights.clock));
        Ok(())
    }

    fn wait(&mut self, chunk: usize) -> Result<Interval, BackendError> {
        let weights = &mut *self.weights.0.borrow_mut();
        let ChunkState::Reading(interval) = weights.chunks[chunk].state else {
            return Err(misfit("a chunk", "it is waited for before it was prefetched".into()));
        };
        if let Some(cause) = weights.disk.take_error() {
            weights.evict(chunk);
            return Err(BackendError::Runtime { doing: "read weights".into(), cause });
        }
        weights.clock.advance(interval.end.saturating_sub(weights.clock.now()));
        weights.chunks[chunk].state = ChunkState::Present;
        Ok(interval)
    }

    fn release(&mut self) {
        let weights = &mut *self.weights.0.borrow_mut();
        (0..weights.first_expert()).for_each(|chunk| weights.evict(chunk));
    }
}
