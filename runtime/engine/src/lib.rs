//! The engine: loads a plan's partitions through [ports](port), keeps each sequence's state, and follows the plan's schedule.
//!
//! It knows no ONNX Runtime, no CUDA, no HTTP and no command line. A [`Backend`] runs the partitions; a [`Reporter`] receives
//! progress and warnings.
//!
//! From the bottom up: `buffers` holds tensors between runs, `weights` brings weights to the stages that need them, `program` is
//! what a plan says and never changes after loading, `runtime` is what a pass changes, `load` makes both.

mod buffers;
mod cancel;
mod clock;
mod engine;
mod error;
mod file_watch;
mod host_memory_warning;
mod ids;
mod load;
#[cfg(any(test, feature = "mock"))]
pub mod mock;
mod options;
mod partition_bench;
mod plan_settings;
pub mod port;
mod program;
mod reporter;
mod runtime;
mod telemetry;
mod tensor;
mod weights;

pub use cancel::CancelHandle;
pub use clock::since_start;
pub use engine::Engine;
pub use error::{BackendError, EngineError};
pub use host_memory_warning::{
    budget_warning, least_needed as least_host_memory_needed, least_needed_in_smaller_process,
    needed as host_memory_needed, warning as host_memory_warning,
};
pub use options::{EngineOptions, RowBatching, Verify, WeightReads};
pub use partition_bench::{CacheFlusher, PartitionBench, RunTimes};
pub use plan_settings::{
    is_limited_by_disk, tries_none, untried, with_provider_options, with_providers, without_effect,
    without_missing_gpus,
};
pub use port::{Backend, Fallback};
pub use reporter::{ProviderFallback, Reporter, Silent, fallback_warnings, listed};
pub use runtime::{LogitRows, NamedTensors, PageLayout, PageToSave, Sequence, StepInput, WorkItem};
pub use telemetry::{Counter, PassTelemetry, Phase, StageTelemetry, Telemetry};
pub use tensor::{HostTensor, Logits};
pub use weights::budget::{holds_all_on_host, streams_on_host};
