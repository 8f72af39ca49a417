//! Truncation: a sequence drops its last tokens, where its states allow that without computing the rest again.

use super::Sequence;
use crate::buffers::StateLayout;
use crate::port::Backend;
use crate::program::Program;
use hpp_schema::StateUpdate;

impl<B: Backend> Sequence<B> {
    /// Truncates the sequence to its first `length` tokens; false, and no change, if a state cannot drop the others.
    pub(crate) fn truncate(&mut self, program: &Program, length: u64) -> bool {
        if self.interrupted || length > self.length {
            return false;
        }
        let can_drop = || program.layouts.iter().all(|layout| can_truncate(layout, program.context));
        if length < self.length && !can_drop() {
            return false;
        }
        let width = self.history.embeddings.len() as u64 / self.length.max(1);
        self.history.tokens.truncate(length as usize);
        self.history.embeddings.truncate((length * width) as usize);
        self.length = length;
        true
    }
}

/// Whether readers of a state ignore what lies past the sequence's length. True for a buffer with a place for each token of the
/// context. A sliding window reuses places, a replaced state mixes tokens, and the layout of an appended state depends on its length.
fn can_truncate(layout: &StateLayout, context: u64) -> bool {
    match layout.update {
        StateUpdate::InPlace { capacity, .. } => capacity >= context,
        StateUpdate::ReadOnly => true,
        StateUpdate::Append { .. } | StateUpdate::Replace => false,
    }
}
