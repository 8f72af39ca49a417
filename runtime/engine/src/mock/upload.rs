//! Uploads of weights and of tensors on the mock's clock: one after the other on each link, in the background, with checks of the slot contract.
//!
//! An upload overwrites its slot with NaNs when it starts and delivers the weights when it is waited for. A run in between fails.

use super::VirtualClock;
use super::queue::Queues;
use super::tensor::{MockBuffer, MockTensor, misfit};
use crate::error::BackendError;
use crate::port::{Interval, MemoryId, Tensor, Timing, Uploaded, WeightLocation};
use std::cell::RefCell;
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
}

/// The interval of an upload to a memory; changes while other transfers delay it.
type InFlight = (MemoryId, Rc<RefCell<Interval>>);

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
        let interval = self.queue(memory, free, time, clock);
        let to = to.iter().map(|buffer| (*buffer).clone()).collect();
        Ok(MockUpload { source: None, weights: source.weights.clone(), to, memory, interval })
    }

    /// Starts to copy a tensor on the host to a device, in `time`, after those in flight on the same link.
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
        let interval = self.queue(memory, clock.now(), time, clock);
        Ok(MockUpload { source: Some(from.clone()), weights: vec![bytes], to: vec![buffer], memory, interval })
    }

    /// The interval of an upload after those in flight on the same link, which starts at `free` or later.
    fn queue(&self, memory: MemoryId, free: Duration, time: Duration, clock: &VirtualClock) -> Rc<RefCell<Interval>> {
        let mut in_flight = self.0.borrow_mut();
        in_flight.retain(|(_, interval)| interval.borrow().end > clock.now());
        let same_link = in_flight.iter().filter(|(other, _)| *other == memory);
        let busy_until = same_link.map(|(_, interval)| interval.borrow().end).max();
        let start = busy_until.map_or(free, |busy| busy.max(free));
        let interval = Rc::new(RefCell::new(Interval { start, end: start + time }));
        in_flight.push((memory, Rc::clone(&interval)));
        interval
    }

    /// Another transfer occupies the link for `time`: uploads are delayed.
    pub fn delay(&self, to: MemoryId, time: Duration, clock: &VirtualClock) {
        for (_, interval) in self.0.borrow().iter().filter(|(memory, _)| *memory == to) {
            let mut interval = interval.borrow_mut();
            if interval.start >= clock.now() {
                interval.start += time;
            }
            if interval.end > clock.now() {
                interval.end += time;
            }
        }
    }
}

impl MockUpload {
    /// Waits for the upload, or makes its device wait.
    pub(super) fn wait(self, queues: &Queues, clock: &VirtualClock) -> Result<Uploaded, BackendError> {
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
