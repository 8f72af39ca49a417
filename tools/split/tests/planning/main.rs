//! Runs `hpp-split`: costs from files, targets, sweeps, streaming, and invalid settings.

mod assign;
mod costs;
mod drafts;
mod machine;
mod memory;
mod outputs;
mod refusals;
mod rows;
mod streaming;
mod support;
mod throughput;
