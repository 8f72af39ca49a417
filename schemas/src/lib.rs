//! The file formats that tools and runtime share: plans, profiles, machine files and the probe protocol.
//!
//! Types, parsing, checks and JSON Schemas. This crate opens no files, sessions or devices.

mod activations;
mod check;
pub mod compression;
mod dim;
mod document;
mod dtype;
mod identity;
mod machine;
pub mod memory;
mod passes;
mod plan;
pub mod probe;
mod profile;
mod provider;
mod provider_faults;
mod read;
mod run_telemetry;
mod sample;
mod seal;
mod size;
mod statistics;
mod timeline;
mod unsplit;
mod words;

pub use activations::Activations;
pub use check::{Finding, Severity, names_a_file};
pub use dim::{Dim, DimError, Shape, Symbols};
pub use document::DocumentError;
pub use dtype::DType;
pub use identity::{FileIdentity, Known, PREPARED_DIR, VERIFIED_FILE, Verified};
pub use machine::*;
pub use passes::{chunk_length, prompt_passes};
pub use plan::*;
pub use profile::*;
pub use provider::*;
pub use provider_faults::{PROVIDER_FAULTS, ProviderFault};
pub use read::{PlanError, plan_json_schema};
pub use run_telemetry::{DiskTelemetry, RunTelemetry, StageTelemetry, TokenReads, TokenTelemetry};
pub use sample::sample_ranges;
pub use seal::Seal;
pub use size::ByteSize;
pub use statistics::*;
pub use timeline::*;
pub use unsplit::{WHOLE, Whole};
pub use words::{error_line, error_report};
