//! From the path of a model to what planning and profiling need of it: graph, blocks, states, roles, configuration, costs
//! in numbers; and from a decision about its blocks to a plan.
//!
//! This room decides nothing and writes nothing.

mod analyse;
mod assemble;
mod config;
mod costs;
mod error;
mod faults;
mod hash;
mod host;
mod memory;
mod operators;
mod problem;
mod roles;
mod states;
mod streams;
mod symbols;

pub use analyse::{Analysis, DEFAULT_CHUNK, LOGIT_POSITIONS, Logits, analyse};
pub use assemble::{Decision, FromDisk, Piece, assemble};
pub use config::{ConfigError, ModelConfig};
pub use costs::{Load, blocks};
pub use error::ModelError;
pub use faults::{avoid_faults, faulty_blocks};
pub use hash::model_hash;
pub use host::ThisHost;
pub use memory::HostMemory;
pub use operators::{unknown_operators, without_cpu_kernel};
pub use problem::{Source, problem};
pub use states::PlannedState;
pub use streams::shared_weights;
pub use symbols::{Pass, symbols};
