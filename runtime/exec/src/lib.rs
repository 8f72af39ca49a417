//! `hpp-exec`: obeys a plan and turns the result into text, files and reports.
//!
//! This crate knows the terminal, tokenizers, chat templates and sampling. It knows no graph and no session of ONNX
//! Runtime: it drives `hpp-engine` over `hpp-backend` and makes no choice that belongs in a plan.

mod busy;
pub mod cli;
pub mod command;
pub mod console;
mod disk;
pub mod embeddings;
pub mod error;
mod fit;
pub mod generate;
pub mod inputs;
pub mod interrupt;
pub mod machine;
pub mod numbers;
mod one_step;
pub mod plan_file;
mod progress;
pub mod prompt;
pub mod report;
pub mod sampling;
pub mod session;
pub mod settings;
mod streaming;
pub mod tensors;
pub mod text;

use cli::{Cli, Command};
use command::Around;
use console::{Console, Level};
use error::ExecError;
use interrupt::Interrupt;
use one_step::CachedPlan;
use settings::Task;
use std::io::{self, Write};

/// Does what the command line says; the process's answer.
pub fn run(cli: Cli) -> u8 {
    let console = Console::new(level(&cli));
    let outcome = perform(cli, &console);
    // Loading may have failed after a partition found no place where the plan wants it: every reason may be the cause.
    console.loading_done(|_| true);
    match outcome {
        Ok(code) => code,
        Err(error) => {
            if !error.is_quiet() {
                let _ = writeln!(io::stderr(), "{}", error.report());
            }
            error.code()
        }
    }
}

fn perform(cli: Cli, console: &std::sync::Arc<Console>) -> Result<u8, ExecError> {
    let interrupt = Interrupt::install().map_err(ExecError::Signal)?;
    let mut task = Task::resolve(cli)?;
    let cached = plan_of_model(&mut task, console)?;
    let mut out = io::stdout().lock();
    let outcome = command::run(task, &mut Around { console, out: &mut out, interrupt: &interrupt });
    if let Some(cached) = cached {
        cached.finish(&outcome, console);
    }
    outcome
}

/// Puts a plan in the place of a model that a task names. It must be kept until the task is done.
fn plan_of_model(task: &mut Task, console: &Console) -> Result<Option<CachedPlan>, ExecError> {
    let Some((path, runtime)) = task.plan() else { return Ok(None) };
    let cached = CachedPlan::of(path, runtime, console)?;
    if let Some(cached) = &cached {
        *path = cached.path();
    }
    Ok(cached)
}

fn level(cli: &Cli) -> Level {
    match &cli.command {
        None => cli.run.runtime.library.level(),
        Some(Command::Devices(args)) => args.library.level(),
        Some(Command::Verify(args)) => args.runtime.library.level(),
        Some(Command::Bench(args)) => args.runtime.library.level(),
        Some(Command::Probe(args)) => args.level(),
    }
}
