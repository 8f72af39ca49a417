//! Stores weights for partitions: moves embedded weights to a weight file, packs weights into one file, rounds them,
//! links weight files, and embeds small tensors. Externalising and packing can also produce a virtual file.

mod embed;
mod externalise;
mod layout;
mod link;
mod pack;
mod round;
mod source;

pub use embed::embed_structure;
pub use externalise::{ExternaliseError, externalise, externalise_virtually, needs_externalising};
pub(crate) use layout::{Layout, refer, refer_to_length};
pub use link::{LinkError, LinkOutcome, link, predict_link};
pub use pack::{PackError, PackProgress, PackStats, pack, pack_virtually};
pub use round::{RoundError, Rounding, round};
pub use source::RangeReadError;
