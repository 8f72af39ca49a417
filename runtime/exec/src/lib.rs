//! `hpp-exec`: runs a plan and turns the result into text, files and reports.
//!
//! This crate knows the command line, the terminal and NumPy files. It drives `hpp-generate` and `hpp-engine` over `hpp-backend`. It
//! knows no graphs and no sessions of ONNX Runtime, and makes no decision that belongs in a plan.

mod activity;
pub mod cli;
pub mod command;
pub mod console;
pub mod error;
pub mod inputs;
pub mod interrupt;
pub mod job_files;
mod json_schema;
mod measure;
mod numbers;
mod other_load;
mod planning;
pub mod prompt;
pub mod report;
pub mod runtime;
pub mod settings;
pub mod tensors;

use cli::{Cli, Command, LibraryArgs, RuntimeArgs};
use command::CommandContext;
use console::Console;
use error::ExecError;
use hpp_engine::EngineError;
use hpp_generate::PlanFileError;
use interrupt::Interrupt;
use planning::CachedPlan;
use settings::Task;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Runs the command line. Returns the exit code of the process.
pub fn run(cli: Cli) -> u8 {
    hpp_backend::disable_telemetry();
    let args = library_args(&cli);
    let console = Console::new(args.level());
    let outcome = log(args.verbose, &console).and_then(|()| perform(cli, &console));
    // A load that failed may have fallen back to other devices first. All fallbacks are printed, because any of them may be the cause.
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

/// Logs through the console, which prints lines above its progress bar.
fn log(verbose: u8, console: &Arc<Console>) -> Result<(), ExecError> {
    let console = Arc::clone(console);
    Ok(hpp_io::log_to(verbose, move |line| console.line(line))?)
}

fn perform(cli: Cli, console: &Arc<Console>) -> Result<u8, ExecError> {
    let interrupt = Interrupt::install().map_err(ExecError::Signal)?;
    let first = cli.run.plan.clone().filter(|_| cli.command.is_none());
    let mut task = Task::resolve(cli)?;
    let cached = plan_models(&mut task, console, &interrupt)?;
    let mut out = io::stdout().lock();
    let outcome = command::run(task, &mut CommandContext { console, out: &mut out, interrupt: &interrupt });
    for cached in cached {
        let engine_error = outcome.as_ref().err().and_then(ExecError::engine);
        let files_differ = matches!(engine_error, Some(EngineError::Files { .. }));
        cached.release(files_differ, console);
    }
    outcome.map_err(|error| with_subcommand(error, first.as_deref()))
}

/// Adds a hint to the error of a missing plan: if the plan was the `first` word and looks like a subcommand, what to write instead.
fn with_subcommand(error: ExecError, first: Option<&Path>) -> ExecError {
    let ExecError::Plan(PlanFileError::Missing { path }) = &error else { return error };
    match first.filter(|first| *first == path).and_then(cli::instead_of) {
        Some(hint) => ExecError::Usage { message: error.to_string(), hint },
        None => error,
    }
}

/// Replaces the paths of models in the task by the paths of their plans. The caller must keep the returned plans until the task is done.
fn plan_models(task: &mut Task, console: &Console, interrupt: &Interrupt) -> Result<Vec<CachedPlan>, ExecError> {
    let mut plans = Vec::new();
    let mut replace = |path: &mut PathBuf, runtime: &RuntimeArgs| {
        if let Some(cached) = CachedPlan::for_model(path, runtime, console, interrupt)? {
            *path = cached.path();
            plans.push(cached);
        }
        Ok::<(), ExecError>(())
    };
    if let Some((path, runtime)) = task.second() {
        replace(path, &runtime)?;
    }
    if let Some((paths, runtime)) = task.plans() {
        paths.into_iter().try_for_each(|path| replace(path, runtime))?;
    }
    Ok(plans)
}

fn library_args(cli: &Cli) -> &LibraryArgs {
    match &cli.command {
        None => &cli.run.runtime.library,
        Some(Command::Devices(args)) => &args.library,
        Some(Command::Verify(args)) => &args.runtime.library,
        Some(Command::Bench(args)) => &args.runtime.library,
        Some(Command::Jobs(args)) => &args.runtime.library,
        Some(Command::Serve(args)) => &args.runtime.library,
        Some(Command::Probe(args)) => args,
    }
}
