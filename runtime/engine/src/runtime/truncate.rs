//! Truncation: a sequence drops its last tokens, if its states can go back that far.

use super::Sequence;
use crate::buffers::{BufferPool, StateLayout};
use crate::error::EngineError;
use crate::port::{Backend, MemoryId};
use crate::program::Program;
use hpp_schema::StateUpdate;

impl<B: Backend> Sequence<B> {
    /// Drops tokens so that at most `length` are left, and returns how many are left: `length`, or the number before the last pass if a state can
    /// go back only to that. Returns `None` and changes nothing if a state cannot go back that far.
    pub(crate) fn truncate(
        &mut self,
        program: &Program,
        pool: &BufferPool<B>,
        length: u64,
        scratch: &mut Vec<u8>,
    ) -> Result<Option<u64>, EngineError> {
        let Some(left) = self.truncated_length(program, length) else { return Ok(None) };
        if left == self.length {
            return Ok(Some(left));
        }
        // A failure below leaves some states truncated and others not.
        self.interrupted = true;
        let is_last_pass = self.pass_start == Some(left);
        for (state, layout) in self.states.iter_mut().zip(program.layouts.iter()) {
            state.truncate(layout, pool, (self.length, left), is_last_pass, scratch)?;
        }
        self.interrupted = false;
        let width = self.history.embeddings.len() as u64 / self.length.max(1);
        self.history.tokens.truncate(left as usize);
        self.history.embeddings.truncate((left * width) as usize);
        (self.length, self.pass_start) = (left, None);
        Ok(Some(left))
    }

    /// How many tokens [`truncate`](Self::truncate) to `length` would leave; `None` if it cannot go back that far.
    pub(crate) fn truncated_length(&self, program: &Program, length: u64) -> Option<u64> {
        if self.interrupted || length > self.length {
            return None;
        }
        if length == self.length {
            return Some(length);
        }
        program.layouts.iter().try_fold(length, |least, layout| Some(least.min(self.reach(layout, length)?)))
    }

    /// Most tokens of a pass after which the sequence could be truncated to its length now, or to less where the caller then feeds
    /// tokens again. A window that drops tokens in such a pass needs a snapshot, which only a window on the host can have.
    pub(crate) fn max_undo(&self, program: &Program) -> u64 {
        let most = |layout: &StateLayout| match layout.update {
            StateUpdate::InPlace { capacity, .. } if capacity < program.context && layout.memory != MemoryId::HOST => {
                capacity.saturating_sub(self.length)
            }
            _ => u64::MAX,
        };
        program.layouts.iter().map(most).min().unwrap_or(u64::MAX)
    }

    /// Before a pass of `tokens` tokens that may be undone: copies the windows that drop tokens in it.
    pub(super) fn take_snapshots(
        &mut self,
        program: &Program,
        pool: &BufferPool<B>,
        tokens: u64,
    ) -> Result<(), EngineError> {
        let total = self.length + tokens;
        for (state, layout) in self.states.iter_mut().zip(program.layouts.iter()) {
            if layout.has_dropped(total) && layout.memory == MemoryId::HOST {
                state.take_snapshot(layout, pool)?;
            }
        }
        Ok(())
    }

    /// The most tokens, up to `length`, to which a state can go back; `None` if it cannot go back that far. A buffer with a place for
    /// each token so far needs no change: readers ignore what lies behind the sequence's length. Rows of an appended state are moved
    /// together. A replaced state mixes tokens, and a window drops them: both can only go back to their contents before the last pass, which the other
    /// buffer of a double-buffered state holds.
    fn reach(&self, layout: &StateLayout, length: u64) -> Option<u64> {
        let before_pass = self.pass_start.filter(|start| *start <= length);
        match layout.update {
            StateUpdate::InPlace { .. } if layout.has_dropped(self.length) => {
                before_pass.filter(|_| self.has_snapshots && layout.memory == MemoryId::HOST)
            }
            StateUpdate::Sliding { .. } if layout.has_dropped(self.length) => before_pass,
            StateUpdate::InPlace { .. }
            | StateUpdate::ReadOnly
            | StateUpdate::Append { .. }
            | StateUpdate::Sliding { .. } => Some(length),
            StateUpdate::Replace => before_pass,
        }
    }
}
