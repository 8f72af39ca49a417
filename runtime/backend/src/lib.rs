//! Implements the engine's ports with ONNX Runtime. The only crate with `unsafe`; it knows one partition at a time, no plans and no HTTP.
//!
//! [`discover`] finds the library, `environment` initialises it once per process, `create_session` creates sessions, `weights` streams
//! weights from disk or copies them to devices, and `raw` wraps the C API.

mod backend;
mod buffer;
mod create_session;
mod cuda;
mod devices;
pub mod discover;
mod environment;
mod loading;
mod log;
mod openvino;
mod operators;
mod os;
mod pages;
mod plugin;
mod probe;
mod provider_devices;
mod raw;
mod session;
#[cfg_attr(not(target_os = "linux"), path = "sigbus/non_linux.rs")]
mod sigbus;
mod state_file;
mod telemetry;
mod weights;

pub use backend::OrtBackend;
pub use buffer::OrtBuffer;
pub use devices::{DeviceReport, ProviderReport, ProviderSource, SystemReport};
pub use environment::{IdleThreads, OpenError, OrtOptions};
pub use os::{
    allowed_memory, available_memory, machine_cores, machine_memory, memory_limit, processor_name, resident_memory,
};
pub use raw::binding::OrtBinding;
pub use raw::run::OrtControl;
pub use session::{OrtSession, OrtTensor, OrtWeightPager};
pub use telemetry::disable_telemetry;
pub use weights::disk::{decompression_rate, read_rate};
