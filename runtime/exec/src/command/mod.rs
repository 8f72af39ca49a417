//! One module for each thing a person can ask for.

mod bench;
mod chat;
mod devices;
mod generate;
mod probe;
mod run_once;
mod unsplit;
mod verify;

pub use probe::MeasureError;

use crate::cli::RuntimeArgs;
use crate::console::Console;
use crate::embeddings::Embeddings;
use crate::error::ExecError;
use crate::interrupt::Interrupt;
use crate::machine::{Machine, OrtBackend, available_memory};
use crate::plan_file::PlanFile;
use crate::prompt::PromptError;
use crate::session::Session;
use crate::settings::Task;
use hpp_engine::{CancelHandle, EngineError, NamedTensors};
use hpp_schema::{InputRole, ModelKind, Plan};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

/// What every command works with.
pub struct Around<'a> {
    /// Where people read.
    pub console: &'a Arc<Console>,
    /// Where results go.
    pub out: &'a mut dyn Write,
    /// Ctrl-C.
    pub interrupt: &'a Interrupt,
}

/// Does it; the process's answer.
pub fn run(task: Task, around: &mut Around<'_>) -> Result<u8, ExecError> {
    match task {
        Task::Generate(settings) => generate::run(&settings, around),
        Task::Chat(settings) => chat::run(&settings, around),
        Task::RunOnce(settings) => run_once::run(&settings, around),
        Task::Devices(args) => devices::run(&args, around),
        Task::Verify(args) => verify::run(&args, around),
        Task::Bench(args) => bench::run(&args, around),
        Task::Probe(args) => probe::run(&args, around),
    }
}

/// A loaded plan ready to take tokens in.
fn load_session(
    plan: &Plan,
    dir: &Path,
    args: &RuntimeArgs,
    feeds: Feeds,
    console: &Arc<Console>,
    interrupt: &Interrupt,
) -> Result<Session<OrtBackend>, ExecError> {
    warn_of_memory(plan, console);
    let machine = Machine::open_to_run(plan, args, console)?;
    let cancel = CancelHandle::new();
    let watch = interrupt.watch(&cancel);
    let engine = machine.load_until(&cancel, plan, dir, args, console)?;
    drop(watch);
    // Whoever pressed Ctrl-C while it loaded wants no answer, though it was over before it could be cancelled.
    if interrupt.asked() {
        return Err(EngineError::Cancelled.into());
    }
    if engine.recomputes() {
        console.warn("this model keeps no state: every token computes the whole text again");
    }
    Ok(Session::new(engine, feeds.embeddings, feeds.extra))
}

/// Says so where this machine has less free memory than a plan needs.
fn warn_of_memory(plan: &Plan, console: &Console) {
    if let Some(warning) = crate::fit::warning(plan, available_memory()) {
        console.warn(&warning);
    }
}

/// What a language model reads besides tokens.
#[derive(Default)]
struct Feeds {
    embeddings: Option<Embeddings>,
    extra: NamedTensors,
}

impl Feeds {
    /// Opens the embeddings table where the model needs one.
    fn open(plan: &PlanFile, embeddings: Option<&Path>) -> Result<Self, ExecError> {
        let needs = plan.plan.model.inputs.iter().any(|input| input.role == InputRole::Embeddings);
        let usage = |message: &str, hint: &str| ExecError::Usage { message: message.to_owned(), hint: hint.to_owned() };
        match (needs, embeddings) {
            (true, None) => Err(usage(
                "this model takes embeddings, not token ids",
                "give the table of its embeddings: --embeddings FILE.npy, [vocab, hidden]",
            )),
            (false, Some(_)) => Err(usage("this model takes token ids, not embeddings", "leave --embeddings out")),
            (false, None) => Ok(Self::default()),
            (true, Some(path)) => Ok(Self { embeddings: Some(Embeddings::open(path)?), extra: NamedTensors::new() }),
        }
    }
}

/// Refuses plans whose model generates nothing.
fn needs_language_model(plan: &Plan) -> Result<(), PromptError> {
    if plan.model.kind == ModelKind::SingleRun { Err(PromptError::NotALanguageModel) } else { Ok(()) }
}

/// Tokens one text may have: what was asked for, else what the plan was made for.
fn context(plan: &Plan, args: &RuntimeArgs) -> u64 {
    args.context.unwrap_or(plan.budgets.context)
}
