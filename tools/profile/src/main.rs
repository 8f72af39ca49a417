//! The `hpp-profile` command: measures a model on this machine.

use clap::{CommandFactory, Parser};
use hpp_cli::Advice;
use hpp_profile::{Cli, run};
use std::process::ExitCode;

const ADVICE: Advice = Advice {
    habits: &[
        ("-m", "give the model without -m: hpp-profile MODEL"),
        ("run", "profiling needs no subcommand: write `hpp-profile MODEL`"),
        ("profile", "profiling needs no subcommand: write `hpp-profile MODEL`"),
    ],
    second_word: "give one model; options begin with --",
};

fn main() -> ExitCode {
    hpp_cli::report_file_size_limit();
    #[cfg(feature = "shell-files")]
    if let Some(done) = hpp_cli::shell_files::written(Cli::command()) {
        return done;
    }
    let arguments: Vec<String> = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let cli = Cli::try_parse();
    match run(&cli.unwrap_or_else(|error| ADVICE.explain(error, &Cli::command(), &arguments).exit())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}
