//! The graph of a model and its analysis: element types and shapes, states, division into blocks, classes of equal
//! blocks, and cutting into partitions.
//!
//! Does not know protobuf or files: `hpp-onnx` builds a [`Graph`] and writes one back.

mod assign;
mod blocks;
mod class;
mod cut;
mod cut_points;
mod dot;
mod experts;
mod flow;
mod graph;
pub mod infer;
mod inseparable;
mod isomorphism;
mod join;
mod mixers;
pub mod ops;
mod relu;
mod rows;
mod segment;
mod segmentation;
mod spine;
mod states;
mod weights;

pub use class::map_block;
pub use cut::{CutError, PartitionGraph, cut};
pub use dot::{Fold, to_dot};
pub use experts::{
    DivisibleMixture, EXPECTED_EXPERTS, EarlyRouter, ExpertCounts, Mixture, Prediction, WholeMixture, WrittenExpert,
    WrittenOut, divisible_mixtures, has_mixture, whole_mixtures, written_out,
};
pub use graph::*;
pub use inseparable::{cut_finely, join_for_state};
pub use isomorphism::Isomorphism;
pub use join::{JoinError, join};
pub use relu::{GatedProduct, NeuronLayout, ReluProduct};
pub use rows::{
    InputDivision, NodeDivision, RowDivision, RowNode, RowsError, RowsReason, Shard, ShardLayout, WeightSlice,
    divide_rows, shard_name,
};
pub use segment::segment;
pub use segmentation::{Block, BlockKind, BlockState, Boundary, ClassId, Segmentation};
pub use states::{StateChange, StatePair, find_states};
pub use weights::{WeightUse, weight_bytes};
