//! The `hpp-profile` command: measures a model on this machine.

use clap::Parser;
use hpp_profile::{Cli, run};
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
