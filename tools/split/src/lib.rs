//! `hpp-split`: plans where each part of an ONNX model computes, cuts the model there, and writes the partitions and
//! `plan.yaml`.
//!
//! This crate reads settings, calls one library per step and prints the result. The planner is `hpp-partition`, graph
//! surgery is `hpp-graph` and `hpp-onnx`.

#[macro_use]
mod tell;

mod amount;
mod analysis;
mod bits_budget;
mod calibrate;
mod choose;
mod cli;
mod compression;
mod costs;
mod destination;
mod draft_files;
mod error;
mod exec;
mod expected;
mod expert_report;
mod experts;
mod explain;
mod files;
mod fitting_context;
mod fold;
mod gpu_experts;
mod group;
mod host_providers;
mod input_errors;
mod inspect;
mod interrupt;
mod lines;
mod local_machine;
mod measured_run;
mod neurons;
mod operators;
mod output;
mod own_draft;
mod partitioning;
mod predicted;
mod presets;
mod print;
mod quantize;
mod reason;
mod records;
mod refine;
mod request;
mod run_hint;
mod sequences;
mod settings;
mod split;
mod split_mode;
mod sweep;
mod table;
mod targets;
mod trace;
mod unknown_providers;
mod unused_options;
mod unwritten_plan;
mod weight_inputs;
mod with_launches;
mod write_options;
mod written_out;

pub use cli::Cli;
pub use error::SplitError;

/// Runs the command that `cli` describes.
pub fn run(cli: &Cli) -> Result<(), SplitError> {
    if cli.quiet {
        tell::be_quiet();
    }
    hpp_io::log_to(cli.verbose, destination::print_above_bars)?;
    match &cli.command {
        Some(cli::Command::Inspect(args)) => inspect::run(args),
        None => split::run(&cli.split),
    }
}
