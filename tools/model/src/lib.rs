//! Analyses a model for planning and profiling: graph, blocks, states, roles of inputs and outputs, configuration.
//! Turns costs into a planning problem, and a placement decision into a plan.
//!
//! This crate makes no placement decisions and writes no files.

mod activations;
mod active_neurons;
mod analyse;
mod assemble;
mod config;
mod context_limit;
mod costs;
mod error;
mod expert_layout;
mod faults;
mod gpu_experts;
mod hash;
mod host;
mod host_kernels;
mod memory;
mod operators;
mod problem;
mod providers;
mod reliability;
mod roles;
mod rotary_caches;
mod rows;
mod sliding_cache;
mod state_shapes;
mod states;
mod streams;
mod symbols;
mod task;

pub use analyse::{
    Analysis, AnalysisOptions, DEFAULT_CHUNK, ExpertComputation, ExpertsOnGpu, LOGIT_POSITIONS, LogitsMode,
    QuantizedWeights, analyse, analyse_with, check_quantizable, quantization_candidates, quantization_formats,
    quantization_inputs,
};
pub use assemble::{Decision, DiskStreaming, PartitionSpec, assemble};
pub use config::{CONFIG_FILES, ConfigError, ModelConfig};
pub use costs::{Scenario, blocks, widest_workspace};
pub use error::ModelError;
pub use faults::{avoid_faults, faulty_blocks};
pub use gpu_experts::GpuExperts;
pub use hash::model_hash;
pub use host::ThisHost;
pub use host_kernels::host_kernels;
pub use memory::HostMemory;
pub use operators::{
    has_paged_caches, machine_layouts, mark_blocks_without_kernels, unknown_operators, without_cpu_kernel,
};
pub use problem::{CostSource, ProviderTimes, packing, problem, scales_beside_packed};
pub use providers::ProviderPolicy;
pub use reliability::{fit_error, unreliable_blocks, unreliable_times};
pub use rows::DividedRows;
pub use states::PlannedState;
pub use streams::shared_weights;
pub use symbols::{PassSize, symbol_values};
