//! Memory that is read into before weights are made of what was read: in huge pages, which a disk fills twice as fast as small ones.

use super::dense::PART;
use super::huge::HugePages;
use super::reader::DEPTH;
use std::io;
use std::sync::{Condvar, Mutex, PoisonError};

/// Bytes of one.
pub(super) const BUFFER: usize = PART;
/// How many there are: while what one round of reads has brought is expanded, the next are under way, some of which need none.
const COUNT: usize = DEPTH + DEPTH / 2;

/// A few buffers that reads take in turn.
#[derive(Default)]
pub(super) struct Staging {
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Default)]
struct State {
    /// The memory of all of them, once one was asked for.
    memory: Option<HugePages>,
    /// Those that nobody uses now.
    free: Vec<StagingBuffer>,
}

/// One of them: [`BUFFER`] bytes that are its owner's alone, for as long as all of them live.
pub(super) struct StagingBuffer(usize);

impl StagingBuffer {
    pub fn address(&self) -> *mut u8 {
        self.0 as *mut u8
    }
}

impl Staging {
    /// Takes one; where all are in use, waits for one if it `may_wait`, else takes none.
    pub fn take(&self, may_wait: bool) -> io::Result<Option<StagingBuffer>> {
        self.fill()?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.free.is_empty() && may_wait {
            state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(state.free.pop())
    }

    /// Gives one back.
    pub fn put(&self, buffer: StagingBuffer) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).free.push(buffer);
        self.returned.notify_one();
    }

    /// Sees to it that they are there, with all their pages in memory.
    pub fn fill(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.memory.is_some() {
            return Ok(());
        }
        let memory = HugePages::new(COUNT * BUFFER)?;
        let start = memory.start();
        state.free = (0..COUNT).map(|number| StagingBuffer(start + number * BUFFER)).collect();
        state.memory = Some(memory);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_one_takers_alone_and_who_finds_none_waits() {
        let staging = Staging::default();
        let taken: Vec<StagingBuffer> = (0..COUNT).map(|_| staging.take(false).unwrap().unwrap()).collect();
        assert!(staging.take(false).unwrap().is_none());
        let mut at: Vec<usize> = taken.iter().map(|buffer| buffer.address() as usize).collect();
        at.sort_unstable();
        assert!(
            at.windows(2).all(|pair| pair[1] - pair[0] == BUFFER) && at[0].is_multiple_of(super::super::mapping::HUGE)
        );
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let staging = &staging;
            scope.spawn(move || sender.send(staging.take(true).unwrap().unwrap().address() as usize).unwrap());
            assert!(receiver.recv_timeout(std::time::Duration::from_millis(50)).is_err());
            let first = taken.into_iter().next().unwrap();
            let address = first.address() as usize;
            staging.put(first);
            assert_eq!(receiver.recv().unwrap(), address);
        });
    }
}
