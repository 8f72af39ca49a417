//! `hpp-profile`: measures a model on this machine.

use clap::Parser;
use hpp_profile::{Cli, run};
use std::process::ExitCode;

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}
