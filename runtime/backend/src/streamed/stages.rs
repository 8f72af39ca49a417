//! Memory that is read into before weights are made of what was read.

use super::dense::PART;
use crate::os::Pages;
use std::io;
use std::sync::{Condvar, Mutex, PoisonError};

/// Bytes of one.
pub(super) const STAGE: usize = PART;
/// How many there are at most.
const COUNT: usize = 8;
/// Bytes of the smallest page.
const PAGE: usize = 4096;

/// A few stages that reads take in turn.
#[derive(Default)]
pub(super) struct Stages {
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Default)]
struct State {
    /// Those that nobody uses now.
    free: Vec<Pages>,
    /// How many there are.
    count: usize,
}

impl Stages {
    /// Takes one; where all are in use, waits for one.
    pub fn take(&self) -> io::Result<Pages> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(stage) = state.free.pop() {
                return Ok(stage);
            }
            if state.count < COUNT {
                let stage = Pages::reserve(STAGE)?;
                state.count += 1;
                return Ok(stage);
            }
            state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives one back.
    pub fn put(&self, stage: Pages) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).free.push(stage);
        self.returned.notify_one();
    }

    /// Sees to it that there are as many as there may be, with all their pages in memory.
    pub fn fill(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.count < COUNT {
            let stage = Pages::reserve(STAGE)?;
            // SAFETY: each address is within the pages just reserved, which nobody else knows.
            (0..STAGE).step_by(PAGE).for_each(|at| unsafe { stage.address().add(at).write_volatile(0) });
            state.count += 1;
            state.free.push(stage);
        }
        Ok(())
    }
}
