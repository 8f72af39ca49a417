//! Truncation: a sequence drops its last tokens, as far as its states can go back.

use super::Sequence;
use crate::buffers::{BufferPool, StateLayout};
use crate::error::EngineError;
use crate::port::Backend;
use crate::program::Program;
use hpp_schema::StateUpdate;

impl<B: Backend> Sequence<B> {
    /// Drops tokens so that at most `length` are left, and returns how many are: `length`, or those before the last pass if a state
    /// remembers only that. `None`, and no change, if a state cannot go back that far.
    pub(crate) fn truncate(
        &mut self,
        program: &Program,
        pool: &BufferPool<B>,
        length: u64,
        scratch: &mut Vec<u8>,
    ) -> Result<Option<u64>, EngineError> {
        if self.interrupted || length > self.length {
            return Ok(None);
        }
        if length == self.length {
            return Ok(Some(length));
        }
        let reach = |layout: &StateLayout| self.reach(layout, program.context, length);
        let Some(left) = program.layouts.iter().try_fold(length, |least, layout| Some(least.min(reach(layout)?)))
        else {
            return Ok(None);
        };
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

    /// Whether the sequence could be truncated to its length now after a pass of `tokens` more.
    pub(crate) fn can_go_back(&self, program: &Program, tokens: u64) -> bool {
        let total = self.length.saturating_add(tokens);
        let fits = |layout: &StateLayout| match layout.update {
            StateUpdate::InPlace { capacity, .. } => capacity >= program.context || total <= capacity,
            _ => true,
        };
        !self.interrupted && program.layouts.iter().all(fits)
    }

    /// The most tokens, up to `length`, to which a state can go back; `None` if it cannot go back that far. A buffer with a place for
    /// each token so far needs no change: readers ignore what lies behind the sequence's length. Rows of an appended state are moved
    /// together. A replaced state mixes tokens, but the buffer of the pass before is still there. A sliding window that is full has
    /// overwritten what it dropped.
    fn reach(&self, layout: &StateLayout, context: u64, length: u64) -> Option<u64> {
        match layout.update {
            StateUpdate::InPlace { capacity, .. } => (capacity >= context || self.length <= capacity).then_some(length),
            StateUpdate::ReadOnly | StateUpdate::Append { .. } => Some(length),
            StateUpdate::Replace => self.pass_start.filter(|start| *start <= length),
        }
    }
}
