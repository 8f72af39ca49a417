//! The `hpp-split` executable: parses arguments, runs the library, sets the exit status.

use clap::{CommandFactory, Parser};
use hpp_cli::Advice;
use hpp_split::{Cli, run};
use std::process::ExitCode;

const NO_SUBCOMMAND: &str = "splitting needs no subcommand: write `hpp-split MODEL [OPTIONS]`";
const ADVICE: Advice = Advice {
    habits: &[
        ("plan", NO_SUBCOMMAND),
        ("split", NO_SUBCOMMAND),
        ("run", NO_SUBCOMMAND),
        ("partition", NO_SUBCOMMAND),
        ("-m", "give the model without -m: hpp-split MODEL"),
        ("--model", "give the model without --model: hpp-split MODEL"),
        ("--flash-attn", "ONNX Runtime's attention decides that itself: leave -fa out"),
        (
            "--model-draft",
            "hpp-split --draft int4 writes a draft of the model itself; hpp-exec --draft PLAN takes another model's plan",
        ),
    ],
    second_word: "give one model; options begin with --",
};

fn main() -> ExitCode {
    hpp_cli::report_file_size_limit();
    #[cfg(feature = "shell-files")]
    if let Some(done) = hpp_cli::shell_files::written(Cli::command()) {
        return done;
    }
    let given = hpp_cli::normalize_spellings(std::env::args_os());
    let arguments: Vec<String> = given.iter().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let cli = Cli::try_parse_from(&given);
    match run(&cli.unwrap_or_else(|error| ADVICE.explain(error, &Cli::command(), &arguments).exit())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}
