//! ONNX files in and out: reads models without loading weights, flattens and cuts them, and writes partitions.
//!
//! This room knows protobuf, files and hostile input. It knows nothing of tiers, devices and plans.

mod extract;
mod flatten;
pub mod hash;
mod head;
mod lift;
mod model;
mod names;
pub mod proto;
mod read;
mod samples;
mod store;
mod tensor;
mod typed;
mod walk;
mod weights;
mod work_dir;
mod write;

pub use extract::{ExtractError, Extractor};
pub use flatten::{BranchChoice, FunctionError};
pub use head::{HeadReason, POSITIONS_DIM, gather_logit_positions};
pub use lift::{Lifted, LiftedWeight, WeightBytes, lift};
pub use model::{Model, Note};
pub use read::{GraphError, LocateError, NEWEST_IR, OrderError, ReadError, WireError, locate};
pub use samples::looks_widened;
pub use store::{
    Contents, ExternaliseError, Made, PackError, PackProgress, Packed, PlaceError, Placed, RoundError, Rounding,
    SourceError, embed_structure, externalise, externalised, needs_externalising, pack, packed, place, place_of, round,
};
pub use tensor::{TensorError, TensorProblem, TensorShape};
pub use weights::{Span, Storage, WeightError, WeightFile, Weights};
pub use work_dir::WorkDir;
pub use write::{WriteError, encode, write_bytes, write_model};
