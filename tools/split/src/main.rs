//! `hpp-split`: from a model to partitions and a plan.

mod cli;
mod complaint;
mod costs;
mod destination;
mod error;
mod explain;
mod files;
mod inspect;
mod lifted;
mod output;
mod pieces;
mod place;
mod predict;
mod print;
mod progress;
mod reason;
mod records;
mod refine;
mod request;
mod settings;
mod split;
mod sweep;
mod table;
mod targets;
mod trace;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(feature = "shell-files")]
    if let Some(done) = hpp_packaging::written(<cli::Cli as clap::CommandFactory>::command()) {
        return done;
    }
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
