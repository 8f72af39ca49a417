//! Copies of weights to devices on the mock's clock: one after the other on each way, in the background, and the laws of slots.
//!
//! A copy overwrites its slot when it begins, with ones that are no numbers, and delivers the weights when somebody waits
//! for it. A run in between fails.

use super::VirtualClock;
use super::queue::Queues;
use super::tensor::{MockBuffer, misfit};
use crate::error::BackendError;
use crate::port::{Arrived, MemoryId, Time, Took, WeightSpec};
use std::cell::RefCell;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::rc::Rc;
use std::time::Duration;

/// Weights in memory, as their files hold them.
pub struct MockSource {
    weights: Vec<Vec<u8>>,
}

/// A copy under way.
pub struct MockUpload {
    weights: Vec<Vec<u8>>,
    to: Vec<MockBuffer>,
    memory: MemoryId,
    took: Rc<RefCell<Took>>,
}

/// When a copy to a memory begins and ends, as far as is known.
type Way = (MemoryId, Rc<RefCell<Took>>);

/// Copies on their way to each memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Uploads(Rc<RefCell<Vec<Way>>>);

impl MockSource {
    pub(super) fn read(weights: &[WeightSpec]) -> Result<Self, BackendError> {
        let read = |weight: &WeightSpec| -> std::io::Result<Vec<u8>> {
            let mut file = File::open(&weight.file)?;
            file.seek(SeekFrom::Start(weight.offset))?;
            let mut bytes = vec![0; weight.bytes as usize];
            file.read_exact(&mut bytes)?;
            Ok(bytes)
        };
        let failed =
            |cause: std::io::Error| BackendError::Runtime { doing: "read weights".into(), cause: cause.to_string() };
        Ok(MockSource { weights: weights.iter().map(read).collect::<Result<_, _>>().map_err(failed)? })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.weights.iter().map(|weight| weight.len() as u64).sum()
    }
}

impl Uploads {
    /// Begins a copy that takes `time` on its way, behind those that are on it already and not before its slot is `free`.
    pub fn begin(
        &self,
        source: &MockSource,
        to: &[&MockBuffer],
        (free, time): (Duration, Duration),
        clock: &VirtualClock,
    ) -> Result<MockUpload, BackendError> {
        let memory = to.first().map_or(MemoryId::HOST, |buffer| buffer.memory());
        if to.len() != source.weights.len() {
            return Err(misfit("a copy of weights", format!("{} go to {} buffers", source.weights.len(), to.len())));
        }
        for (weight, buffer) in source.weights.iter().zip(to) {
            buffer.overwrite(weight.len())?;
        }
        let mut ways = self.0.borrow_mut();
        ways.retain(|(_, took)| took.borrow().to > clock.now());
        let busy = ways.iter().filter(|(other, _)| *other == memory).map(|(_, took)| took.borrow().to).max();
        let from = busy.map_or(free, |busy| busy.max(free));
        let took = Rc::new(RefCell::new(Took { from, to: from + time }));
        ways.push((memory, Rc::clone(&took)));
        let to = to.iter().map(|buffer| (*buffer).clone()).collect();
        Ok(MockUpload { weights: source.weights.clone(), to, memory, took })
    }

    /// Something else goes the same way for so long: weights wait.
    pub fn stand_still(&self, to: MemoryId, time: Duration, clock: &VirtualClock) {
        for (_, took) in self.0.borrow().iter().filter(|(memory, _)| *memory == to) {
            let mut took = took.borrow_mut();
            if took.from >= clock.now() {
                took.from += time;
            }
            if took.to > clock.now() {
                took.to += time;
            }
        }
    }
}

impl MockUpload {
    /// Waits for the copy, or lets its device wait.
    pub(super) fn arrive(self, queues: &Queues, clock: &VirtualClock) -> Result<Arrived, BackendError> {
        let took = *self.took.borrow();
        debug_assert!(self.memory != MemoryId::HOST || self.to.is_empty());
        for (weight, buffer) in self.weights.iter().zip(&self.to) {
            buffer.deliver(weight)?;
        }
        if queues.over(self.memory).is_none() {
            clock.advance(took.to.saturating_sub(clock.now()));
            return Ok(Arrived { copy: Time::Known(took), stall: None });
        }
        let stall = queues.hold(self.memory, clock.now(), took.to);
        Ok(Arrived { copy: Time::Later(queues.ticket(took)), stall: Some(stall) })
    }
}
