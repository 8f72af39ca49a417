//! Going back: a sequence keeps the beginning of its text, where its states can forget the rest without being computed again.

use crate::engine::Engine;
use crate::port::Backend;
use crate::sequence::Sequence;
use crate::state::StateLayout;
use hpp_schema::StateUpdate;

impl<B: Backend> Engine<B> {
    /// Shortens a sequence to its first `length` tokens and returns true; or changes nothing and returns false, because a
    /// state holds what cannot be taken back: then only a new sequence begins where this one should.
    pub fn rewind(&self, sequence: &mut Sequence<B>, length: u64) -> bool {
        if sequence.interrupted || length > sequence.length {
            return false;
        }
        if length < sequence.length && !self.layouts.iter().all(|layout| forgets(layout, self.context)) {
            return false;
        }
        let width = sequence.history.embeddings.len() as u64 / sequence.length.max(1);
        sequence.history.tokens.truncate(length as usize);
        sequence.history.embeddings.truncate((length * width) as usize);
        sequence.length = length;
        true
    }
}

/// Whether tokens past the length are ignored by whoever reads the state. True of a buffer that holds the whole context:
/// each token has its own place there. A window reuses places, and the others mix tokens or their layout depends on how many there are.
fn forgets(layout: &StateLayout, context: u64) -> bool {
    match layout.update {
        StateUpdate::InPlace { capacity, .. } => capacity >= context,
        StateUpdate::ReadOnly => true,
        StateUpdate::Append { .. } | StateUpdate::Replace => false,
    }
}
