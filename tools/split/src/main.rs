//! `hpp-split`: from a model to partitions and a plan.

mod amount;
mod cli;
mod complaint;
mod costs;
mod destination;
mod error;
mod explain;
mod files;
mod here;
mod inspect;
mod lifted;
mod operators;
mod output;
mod pieces;
mod place;
mod predict;
mod presets;
mod print;
mod progress;
mod reason;
mod records;
mod refine;
mod request;
mod run;
mod settings;
mod split;
mod stdout;
mod suggest;
mod sweep;
mod table;
mod targets;
mod trace;

use clap::Parser;
use std::process::ExitCode;

/// What clap says of arguments it cannot take, or of `--help`, and what may have been meant.
fn refuse(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(meant) = suggest::subcommand(&arguments).filter(|_| error.use_stderr()) {
        eprintln!("hint: {meant}");
    }
    u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    let done = match cli.command {
        Some(cli::Command::Inspect(args)) => inspect::run(&args),
        None => split::run(&cli.split),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}
