//! ONNX Runtime and devices behind the engine's ports. The only room with `unsafe`; it knows no plan beyond one partition, and no HTTP.
//!
//! [`discover`] finds the library, `environment` sets it up once for the process, `provide` makes sessions, and `raw` holds
//! what must speak to C: small owners whose lifetimes follow ownership, each call checked.

mod backend;
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
mod peek;
mod plugin;
mod probe;
mod provide;
mod raw;
mod session;
#[cfg_attr(not(target_os = "linux"), path = "streamed/elsewhere.rs")]
mod streamed;
mod upload;

pub use backend::{OrtBackend, OrtBuffer};
pub use devices::{DeviceReport, ProviderReport, ProviderSource, Report};
pub use environment::{OpenError, OrtOptions, Waiting};
pub use os::{available_memory, machine_cores, machine_memory, memory_limit, processor_name};
pub use peek::needs_packing;
pub use raw::binding::OrtBinding;
pub use raw::run::OrtControl;
pub use session::{OrtSession, OrtTensor, OrtWeightStream};
pub use streamed::read_rate;
