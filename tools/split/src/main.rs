//! `hpp-split`: from a model to partitions and a plan.

use clap::Parser;
use hpp_split::{Cli, run};
use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(feature = "shell-files")]
    if let Some(done) = hpp_packaging::written(<Cli as clap::CommandFactory>::command()) {
        return done;
    }
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}
