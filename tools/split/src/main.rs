//! `hpp-split`: from a model to partitions and a plan.

use clap::Parser;
use hpp_split::{Cli, run, suggestion};
use std::process::ExitCode;

/// What clap says of arguments it cannot take, or of `--help`, and what may have been meant.
fn refuse(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(meant) = suggestion(&arguments).filter(|_| error.use_stderr()) {
        eprintln!("hint: {meant}");
    }
    u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

fn main() -> ExitCode {
    #[cfg(feature = "shell-files")]
    if let Some(done) = hpp_packaging::written(<Cli as clap::CommandFactory>::command()) {
        return done;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}
