//! Makes a model one ordinary graph: local functions inlined, the generating branch of a merged decoder
//! chosen, large constants lifted to weights.

mod branch;
mod constants;
mod functions;
mod rename;

pub use branch::BranchChoice;
pub use functions::{FunctionError, needed as needed_functions};
pub use rename::{Fresh, Renamer};

use crate::model::Note;
use crate::proto::ModelProto;

/// Flattens a model in place and says what changed. Functions come first: a branch may hide inside one.
pub fn flatten(model: &mut ModelProto) -> Result<Vec<Note>, FunctionError> {
    let mut notes = functions::inline(model)?;
    if let Some(graph) = &mut model.graph {
        notes.extend(branch::choose(graph).map(Note::Branch));
        let constants = constants::lift(graph);
        notes.extend((constants > 0).then_some(Note::LiftedConstants { constants }));
    }
    Ok(notes)
}
