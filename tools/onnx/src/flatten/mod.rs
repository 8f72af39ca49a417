//! Flattens a model into one plain graph: inlines its functions, keeps the generating branch of a merged decoder, and
//! turns large `Constant` nodes into weights.

mod branch;
mod constants;
mod functions;
mod rename;

pub use functions::{FunctionError, HasOperator, needed as needed_functions};
pub use rename::{Fresh, Renamer};

use crate::note::Note;
use crate::proto::ModelProto;

/// Flattens a model in place. Returns the changes. Functions come first, because they may contain a branch.
pub fn flatten(model: &mut ModelProto, has_operator: HasOperator<'_>) -> Result<Vec<Note>, FunctionError> {
    let mut notes = functions::inline(model, has_operator)?;
    if let Some(graph) = &mut model.graph {
        notes.extend(branch::choose(graph).map(Note::Branch));
        let constants = constants::lift(graph);
        notes.extend((constants > 0).then_some(Note::LiftedConstants { constants }));
    }
    Ok(notes)
}
