//! The `hpp-exec` command.

use clap::Parser;
use hpp_exec::cli::{Cli, known_spellings};
use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(feature = "shell-files")]
    if let Some(done) = hpp_packaging::written(<Cli as clap::CommandFactory>::command()) {
        return done;
    }
    ExitCode::from(hpp_exec::run(Cli::parse_from(known_spellings(std::env::args_os()))))
}
