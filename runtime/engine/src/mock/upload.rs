//! Uploads of weights and of tensors on the mock's clock: one after the other on each link, in the background, with checks of the slot contract.
//!
//! An upload overwrites its slot with NaNs when it starts and delivers the weights when it is waited for. A run in between fails.

use super::VirtualClock;
use super::queue::Queues;
use super::tensor::{MockBuffer, MockTensor, misfit};
use crate::error::BackendError;
use crate::port::{Interval, MemoryId, Tensor, Timing, Uploaded, WeightLocation};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::rc::Rc;
use std::time::Duration;

/// Weights in memory, as their files hold them.
pub struct MockUploadSource {
    weights: Vec<Vec<u8>>,
}

/// An upload in progress.
pub struct MockUpload {
    /// The tensor it copies, which must not change meanwhile; none if it copies weights.
    source: Option<MockTensor>,
    weights: Vec<Vec<u8>>,
    to: Vec<MockBuffer>,
    memory: MemoryId,
    interval: Rc<RefCell<Interval>>,
    is_awaited: Rc<Cell<bool>>,
}

/// A copy to a memory. Its interval changes while other transfers delay it.
#[derive(Clone, Debug)]
struct InFlight {
    memory: MemoryId,
    interval: Rc<RefCell<Interval>>,
    /// Whether it copies a tensor: uploads of weights that no run waits for pause meanwhile.
    is_tensor: bool,
    /// Whether a run waits for it.
    is_awaited: Rc<Cell<bool>>,
}

/// Uploads in flight.
#[derive(Clone, Debug, Default)]
pub(super) struct Uploads(Rc<RefCell<Vec<InFlight>>>);

impl MockUploadSource {
    pub(super) fn read(weights: &[WeightLocation]) -> Result<Self, BackendError> {
        let read = |weight: &WeightLocation| -> std::io::Result<Vec<u8>> {
            let mut file = File::open(&weight.file)?;
            file.seek(SeekFrom::Start(weight.offset))?;
            let mut bytes = vec![0; weight.bytes as usize];
            file.read_exact(&mut bytes)?;
            Ok(bytes)
        };
        let failed =
            |cause: std::io::Error| BackendError::Runtime { doing: "read weights".into(), cause: cause.to_string() };
        Ok(MockUploadSource { weights: weights.iter().map(read).collect::<Result<_, _>>().map_err(failed)? })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.weights.iter().map(|weight| weight.len() as u64).sum()
    }
}

impl Uploads {
    /// Starts an upload that takes `time`, after those in flight on the same link and not before its slot is `free`.
    pub fn start(
        &self,
        source: &MockUploadSource,
        to: &[&MockBuffer],
        free: Duration,
        time: Duration,
        clock: &VirtualClock,
    ) -> Result<MockUpload, BackendError> {
        let memory = to.first().map_or(MemoryId::HOST, |buffer| buffer.memory());
        if to.len() != source.weights.len() {
            return Err(misfit("a copy of weights", format!("{} go to {} buffers", source.weights.len(), to.len())));
        }
        for (weight, buffer) in source.weights.iter().zip(to) {
            buffer.overwrite(weight.len())?;
        }
        let InFlight { interval, is_awaited, .. } = self.queue(memory, free, time, clock);
        let to = to.iter().map(|buffer| (*buffer).clone()).collect();
        Ok(MockUpload { source: None, weights: source.weights.clone(), to, memory, interval, is_awaited })
    }

    /// Starts to copy a tensor on the host to a device, in `time`, after other tensors on the same link; uploads of weights pause meanwhile.
    pub fn start_tensor(
        &self,
        from: &MockTensor,
        to: &MockTensor,
        time: Duration,
        clock: &VirtualClock,
    ) -> Result<MockUpload, BackendError> {
        let refuse = |why: &str| Err(misfit("a copy ahead", why.to_owned()));
        let memory = to.memory();
        if from.memory() != MemoryId::HOST || memory == MemoryId::HOST {
            return refuse("it goes from the host to a device");
        }
        if from.dtype() != to.dtype() || from.shape() != to.shape() {
            return refuse("its target has another type or shape");
        }
        if to.is_used(clock.now()) {
            return refuse("a run in progress uses its target");
        }
        if to.is_coming() || from.is_coming() {
            return refuse("another copy that was not waited for overwrites one of its sides");
        }
        let (bytes, buffer) = (from.contents(), to.whole_block()?);
        buffer.overwrite(bytes.len())?;
        let InFlight { interval, is_awaited, .. } = self.interrupt(memory, time, clock);
        let (source, weights, to) = (Some(from.clone()), vec![bytes], vec![buffer]);
        Ok(MockUpload { source, weights, to, memory, interval, is_awaited })
    }

    /// Queues an upload of weights after those in flight on the same link. It starts at `free` or later and pauses while tensors are copied.
    fn queue(&self, memory: MemoryId, free: Duration, time: Duration, clock: &VirtualClock) -> InFlight {
        let start = self.busy_until(memory, false, clock).map_or(free, |busy| busy.max(free));
        let mut pauses: Vec<Interval> = self.on_link(memory, true).map(|interval| *interval.borrow()).collect();
        pauses.sort_by_key(|pause| pause.start);
        let mut end = start + time;
        for pause in pauses.iter().filter(|pause| pause.end > start) {
            if pause.start < end {
                end += pause.end - pause.start.max(start);
            }
        }
        self.push(memory, Interval { start, end }, false)
    }

    /// Queues a copy of a tensor after those in flight on the same link and after weights that a run waits for; other uploads of weights pause
    /// meanwhile.
    fn interrupt(&self, memory: MemoryId, time: Duration, clock: &VirtualClock) -> InFlight {
        let now = clock.now();
        let start = self.busy_until(memory, true, clock).map_or(now, |busy| busy.max(now));
        let awaited = |copy: &&InFlight| copy.memory == memory && copy.is_awaited.get();
        let start =
            self.0.borrow().iter().filter(awaited).map(|copy| copy.interval.borrow().end).fold(start, Duration::max);
        self.pause_weights(memory, start, time);
        self.push(memory, Interval { start, end: start + time }, true)
    }

    /// Pauses uploads of weights for `time` from a point in time on. An upload that waits for its slot for longer than that is not delayed.
    fn pause_weights(&self, memory: MemoryId, from: Duration, time: Duration) {
        let (mut idle_from, mut delay) = (from, time);
        for interval in self.on_link(memory, false) {
            let Interval { start, end } = *interval.borrow();
            delay = delay.saturating_sub(start.saturating_sub(idle_from));
            idle_from = idle_from.max(end);
            shift(&interval, from, delay);
        }
    }

    /// The intervals of the copies of tensors or of weights to a memory.
    fn on_link(&self, memory: MemoryId, is_tensor: bool) -> impl Iterator<Item = Rc<RefCell<Interval>>> + use<> {
        let all = self.0.borrow().clone().into_iter();
        all.filter(move |copy| (copy.memory, copy.is_tensor) == (memory, is_tensor)).map(|copy| copy.interval)
    }

    /// When the copies in flight, of tensors or of weights, are done.
    fn busy_until(&self, memory: MemoryId, is_tensor: bool, clock: &VirtualClock) -> Option<Duration> {
        self.0.borrow_mut().retain(|copy| copy.interval.borrow().end > clock.now());
        self.on_link(memory, is_tensor).map(|interval| interval.borrow().end).max()
    }

    fn push(&self, memory: MemoryId, interval: Interval, is_tensor: bool) -> InFlight {
        let copy = InFlight { memory, interval: Rc::new(RefCell::new(interval)), is_tensor, is_awaited: Rc::default() };
        self.0.borrow_mut().push(copy.clone());
        copy
    }

    /// Delays the copies to a memory by `time`, in which another transfer occupies the link.
    pub fn delay(&self, to: MemoryId, time: Duration, clock: &VirtualClock) {
        for copy in self.0.borrow().iter().filter(|copy| copy.memory == to) {
            shift(&copy.interval, clock.now(), time);
        }
    }
}

/// Moves the interval of a copy that pauses for `time` from a point in time on.
fn shift(interval: &RefCell<Interval>, from: Duration, time: Duration) {
    let mut interval = interval.borrow_mut();
    if interval.start >= from {
        interval.start += time;
    }
    if interval.end > from {
        interval.end += time;
    }
}

impl MockUpload {
    /// Waits for the upload, or makes its device wait.
    pub(super) fn wait(self, queues: &Queues, clock: &VirtualClock) -> Result<Uploaded, BackendError> {
        self.is_awaited.set(true);
        let interval = *self.interval.borrow();
        if self.source.as_ref().is_some_and(|source| source.contents() != self.weights[0]) {
            return Err(misfit("a copy ahead", "its source has changed before it was waited for".into()));
        }
        for (weight, buffer) in self.weights.iter().zip(&self.to) {
            buffer.deliver(weight)?;
        }
        if queues.busy_until(self.memory).is_none() {
            clock.advance(interval.end.saturating_sub(clock.now()));
            return Ok(Uploaded { copy: Timing::Measured(interval), stall: None });
        }
        let stall = queues.hold(self.memory, clock.now(), interval.end);
        Ok(Uploaded { copy: Timing::Pending(queues.token(interval)), stall: Some(stall) })
    }
}
