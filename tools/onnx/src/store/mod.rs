//! Puts weight bytes where partitions can reach them: out of a model file once, packed into one file (rounded, if asked), or
//! linked in place; and small ones back into model files.

mod embed;
mod externalise;
mod layout;
mod pack;
mod place;
mod round;
mod slabs;
mod source;

pub use embed::embed_structure;
pub use externalise::{ExternaliseError, externalise, needs_externalising};
pub use pack::{PackError, PackProgress, Packed, pack};
pub use place::{PlaceError, Placed, place};
pub use round::{RoundError, Rounding, round};
pub use source::SourceError;
