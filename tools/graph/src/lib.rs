//! The graph of a model and what its structure says: boundaries, blocks, classes, liveness.
//!
//! This room knows no protobuf and no files: `hpp-onnx` builds a [`Graph`] and writes one back.

mod assign;
mod blocks;
mod boundary;
mod class;
mod cut;
mod dot;
mod flow;
mod graph;
pub mod infer;
mod isomorphism;
mod join;
mod mixers;
pub mod ops;
mod order;
mod segment;
mod spine;
mod states;
mod weights;

pub use class::{ClassId, map_block};
pub use cut::{CutError, Part, cut};
pub use dot::{Fold, to_dot};
pub use graph::*;
pub use isomorphism::Mapping;
pub use join::{JoinError, join};
pub use order::{CycleError, Liveness};
pub use segment::{Block, BlockKind, BlockState, Boundary, Segmentation, segment};
pub use states::{StateChange, StatePair, find_states};
pub use weights::{WeightUse, weight_bytes};
