//! `hpp-split`: from a model to partitions and a plan.

use clap::Parser;
use hpp_split::{Cli, run};
use std::process::ExitCode;

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}
