//! The engine: loads a plan's partitions through ports, keeps each sequence's state, and follows the plan's schedule.
//!
//! It knows no ONNX Runtime, no CUDA, no HTTP and no command line. What runs partitions comes in through [`Backend`];
//! what a person should know goes out through [`Reporter`].

mod area;
mod boundary;
mod cancel;
mod clock;
mod engine;
mod error;
mod feed;
mod files;
mod keeping;
mod load;
mod meter;
pub mod mock;
mod once;
mod options;
mod pass;
pub mod port;
mod ports;
mod reading;
mod rehearse;
mod reporter;
mod rewind;
mod sequence;
mod shape;
mod slots;
mod stage;
mod state;
mod step;
mod supply;
mod telemetry;
mod tensor;
mod visit;
mod watch;

pub use cancel::CancelHandle;
pub use clock::since_start;
pub use engine::Engine;
pub use error::{BackendError, EngineError};
pub use once::Named;
pub use options::{EngineOptions, Verify, WeightReads};
pub use port::{Backend, Fallback};
pub use rehearse::{Evictor, Rehearsal, Runs};
pub use reporter::{Reporter, Silent, listed};
pub use sequence::Sequence;
pub use step::{LogitRows, StepInput};
pub use telemetry::{PassTelemetry, Phase, StageTelemetry, Tally, Telemetry};
pub use tensor::{HostTensor, Logits};
