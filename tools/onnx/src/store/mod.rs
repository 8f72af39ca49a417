//! Puts weight bytes where partitions can reach them: out of a model file once, packed into one file, or linked in place.

mod externalise;
mod layout;
mod pack;
mod place;

pub use externalise::{ExternaliseError, externalise, needs_externalising};
pub use pack::{PackError, PackProgress, Packed, pack};
pub use place::{PlaceError, Placed, place};
