//! The `hpp-profile` command: measures a model on this machine.

use clap::{CommandFactory, Parser};
use hpp_cli::Habit;
use hpp_profile::{Cli, run};
use std::process::ExitCode;

const HABITS: [Habit; 2] =
    [("-m", "give the model without -m: hpp-profile MODEL"), ("-o", "give the output file with --out FILE")];

fn main() -> ExitCode {
    #[cfg(feature = "shell-files")]
    if let Some(done) = hpp_cli::shell_files::written(Cli::command()) {
        return done;
    }
    let arguments: Vec<String> = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let cli = Cli::try_parse();
    match run(&cli.unwrap_or_else(|error| hpp_cli::explain(error, &Cli::command(), &arguments, &HABITS).exit())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}
