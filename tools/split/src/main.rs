//! The `hpp-split` executable: parses arguments, runs the library, sets the exit status.

use clap::Parser;
use hpp_split::{Cli, run, suggestion};
use std::process::ExitCode;

/// Prints clap's error or help text, with a hint where the first argument looks like a mistyped subcommand.
fn exit_with(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(hint) = suggestion(&arguments).filter(|_| error.use_stderr()) {
        eprintln!("hint: {hint}");
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
        Err(error) => return exit_with(&error),
    };
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}
