//! The `hpp-exec` command.

use clap::Parser;
use hpp_cli::normalize_spellings;
use hpp_exec::cli::{Cli, checked, explained};
use std::process::ExitCode;

fn main() -> ExitCode {
    hpp_cli::report_file_size_limit();
    #[cfg(feature = "shell-files")]
    if let Some(done) = hpp_cli::shell_files::written(<Cli as clap::CommandFactory>::command()) {
        return done;
    }
    let arguments = normalize_spellings(std::env::args_os());
    let cli = Cli::try_parse_from(&arguments).and_then(checked);
    ExitCode::from(hpp_exec::run(cli.unwrap_or_else(|error| explained(error, &arguments).exit())))
}
