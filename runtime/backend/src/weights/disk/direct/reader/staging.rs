//! Staging buffers of reads that are decompressed or copied: in huge pages, which disks fill twice as fast as small ones.

use super::super::compressed::PART;
use super::super::huge_pages::HugePages;
use super::DEPTH;
use std::io;
use std::sync::{Condvar, Mutex, PoisonError};

/// Bytes of one buffer.
pub(in super::super) const BUFFER: usize = PART;
/// Number of buffers: for one round of reads that is decompressed, and for the reads of the next round that need a buffer.
const COUNT: usize = DEPTH + DEPTH / 2;

/// A pool of buffers.
#[derive(Default)]
pub(super) struct StagingPool {
    state: Mutex<PoolState>,
    returned: Condvar,
}

#[derive(Default)]
struct PoolState {
    /// The memory of all buffers, allocated with the first.
    memory: Option<HugePages>,
    /// Buffers that no read uses.
    free: Vec<StagingBuffer>,
}

/// One buffer: [`BUFFER`] bytes that only its owner uses, for as long as the pool lives.
pub(super) struct StagingBuffer(usize);

impl StagingBuffer {
    pub fn address(&self) -> *mut u8 {
        self.0 as *mut u8
    }
}

impl StagingPool {
    /// A free buffer. If all are in use, waits for one if it `may_wait`, else returns `None`.
    pub fn acquire(&self, may_wait: bool) -> io::Result<Option<StagingBuffer>> {
        self.allocate()?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.free.is_empty() && may_wait {
            state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(state.free.pop())
    }

    /// Returns a buffer.
    pub fn release(&self, buffer: StagingBuffer) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).free.push(buffer);
        self.returned.notify_one();
    }

    /// Allocates the buffers with all their pages, unless that was done before.
    pub fn allocate(&self) -> io::Result<()> {
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
    fn a_buffer_has_one_owner_and_acquire_waits_for_a_free_one() {
        let staging = StagingPool::default();
        let taken: Vec<StagingBuffer> = (0..COUNT).map(|_| staging.acquire(false).unwrap().unwrap()).collect();
        assert!(staging.acquire(false).unwrap().is_none());
        let mut at: Vec<usize> = taken.iter().map(|buffer| buffer.address() as usize).collect();
        at.sort_unstable();
        assert!(
            at.windows(2).all(|pair| pair[1] - pair[0] == BUFFER)
                && at[0].is_multiple_of(super::super::super::address_space::HUGE)
        );
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let staging = &staging;
            scope.spawn(move || sender.send(staging.acquire(true).unwrap().unwrap().address() as usize).unwrap());
            assert!(receiver.recv_timeout(std::time::Duration::from_millis(50)).is_err());
            let first = taken.into_iter().next().unwrap();
            let address = first.address() as usize;
            staging.release(first);
            assert_eq!(receiver.recv().unwrap(), address);
        });
    }
}
