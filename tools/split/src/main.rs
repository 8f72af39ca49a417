//! `hpp-split`: from a model to partitions and a plan.

mod cli;
mod error;
mod files;
mod inspect;
mod output;
mod place;
mod predict;
mod progress;
mod reason;
mod records;
mod split;
mod stdout;
mod table;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    let done = match cli.command {
        Some(cli::Command::Inspect(args)) => inspect::run(&args),
        None => split::run(&cli.split),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}
