//! Makes a model one ordinary graph: local functions inlined, the generating branch of a merged decoder chosen.

mod branch;
mod functions;
mod rename;

pub use branch::BranchChoice;
pub use functions::FunctionError;

use crate::model::Note;
use crate::proto::ModelProto;

/// Flattens a model in place and says what changed. Functions come first: a branch may hide inside one.
pub fn flatten(model: &mut ModelProto) -> Result<Vec<Note>, FunctionError> {
    let mut notes = functions::inline(model)?;
    if let Some(graph) = &mut model.graph {
        notes.extend(branch::choose(graph).map(Note::Branch));
    }
    Ok(notes)
}
