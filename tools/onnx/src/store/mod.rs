//! Puts weight bytes where partitions can reach them: out of a model file once, packed into one file (rounded, if asked), or
//! linked in place; and small ones back into model files. What would be written can be had without writing it.

mod contents;
mod embed;
mod externalise;
mod layout;
mod pack;
mod place;
mod round;
mod slabs;
mod source;

pub use contents::{Contents, Made};
pub use embed::embed_structure;
pub use externalise::{ExternaliseError, externalise, externalised, needs_externalising};
pub use pack::{PackError, PackProgress, Packed, pack, packed};
pub use place::{PlaceError, Placed, place, place_of};
pub use round::{RoundError, Rounding, round};
pub use source::SourceError;
