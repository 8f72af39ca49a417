//! ONNX files in and out: reads models without loading weights, flattens and cuts them, and writes partitions.
//!
//! This room knows protobuf, files and hostile input. It knows nothing of tiers, devices and plans.

mod flatten;
mod model;
mod names;
pub mod proto;
mod read;
mod tensor;
mod walk;
mod weights;

pub use flatten::{BranchChoice, FunctionError};
pub use model::{Model, Note};
pub use read::{GraphError, LocateError, NEWEST_IR, OrderError, ReadError, WireError, locate};
pub use tensor::{TensorError, TensorProblem, TensorShape};
pub use weights::{Span, Storage, WeightError, WeightFile, Weights};
