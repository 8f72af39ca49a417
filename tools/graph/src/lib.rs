//! The graph of a model and what its structure says: boundaries, blocks, classes, liveness.
//!
//! This room knows no protobuf and no files: `hpp-onnx` builds a [`Graph`] and writes one back.

mod graph;

pub use graph::*;
