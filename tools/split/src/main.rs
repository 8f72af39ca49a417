//! `hpp-split`: from a model to partitions and a plan.

mod analyse;
mod assemble;
mod cli;
mod config;
mod costs;
mod error;
mod files;
mod inspect;
mod output;
mod place;
mod progress;
mod reason;
mod records;
mod roles;
mod split;
mod states;
mod stdout;
mod symbols;
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
