//! ONNX Runtime and devices behind the engine's ports. The only crate with `unsafe`; it knows no plan beyond one partition, and no HTTP.
//!
//! [`discover`] finds the library, `environment` sets it up once for the process, `create_session` creates sessions, `weights` holds
//! those that are streamed from disk or copied to devices, and `raw` calls the C API: small owners whose lifetimes follow ownership,
//! each call checked.

mod backend;
mod create_session;
mod cuda;
mod devices;
pub mod discover;
mod environment;
#[cfg_attr(not(target_os = "linux"), path = "fault/elsewhere.rs")]
mod fault;
mod loading;
mod log;
mod os;
mod pages;
mod plugin;
mod probe;
mod raw;
mod session;
mod weights;

pub use backend::{OrtBackend, OrtBuffer};
pub use devices::{DeviceReport, ProviderReport, ProviderSource, Report};
pub use environment::{OpenError, OrtOptions, Waiting};
pub use os::{available_memory, machine_cores, machine_memory, memory_limit, processor_name};
pub use raw::binding::OrtBinding;
pub use raw::run::OrtControl;
pub use session::{OrtSession, OrtTensor, OrtWeightStream};
pub use weights::disk::read_rate;
