//! The `hpp-exec` command.

use clap::Parser;
use hpp_exec::cli::Cli;
use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(hpp_exec::run(Cli::parse()))
}
