//! The commands, one module each, and what they share: loading a plan, reading a prompt, opening inputs.

mod adaptation;
mod bench;
mod chat;
mod devices;
mod drafts;
mod generate;
mod host_need;
mod infer;
mod jobs;
mod prefix_cache;
mod probe;
mod sequences;
mod serve;
mod session;
mod trace;
mod unsplit;
mod verify;

use crate::cli::RuntimeArgs;
use crate::console::Console;
use crate::error::ExecError;
use crate::inputs::check_inputs;
use crate::interrupt::Interrupt;
use crate::prompt::PromptSource;
use crate::runtime::{OnnxRuntime, OrtBackend, available_memory, memory_limit, resident_memory};
use crate::settings::Task;
use crate::tensors::{read_npy, read_npz};
use hpp_engine::{
    Engine, EngineOptions, NamedTensors, budget_warning, host_memory_needed, host_memory_warning,
    least_needed_in_smaller_process,
};
use hpp_generate::text::{Message, Role};
use hpp_generate::{EmbeddingTable, ModelInputs, PlanFile, PromptEncoder, PromptError, SingleSequence};
use hpp_schema::{InputRole, Plan};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

/// What every command works with.
pub struct CommandContext<'a> {
    /// Messages for people, on stderr.
    pub console: &'a Arc<Console>,
    /// Results, on stdout.
    pub out: &'a mut dyn Write,
    /// Ctrl-C.
    pub interrupt: &'a Interrupt,
}

/// Runs a task. Returns the exit code of the process.
pub fn run(task: Task, ctx: &mut CommandContext<'_>) -> Result<u8, ExecError> {
    match task {
        Task::Generate(settings) => generate::run(&settings, ctx),
        Task::Chat(settings) => chat::run(&settings, ctx),
        Task::Infer(settings) => infer::run(&settings, ctx),
        Task::Devices(args) => devices::run(&args, ctx),
        Task::Verify(args) => verify::run(&args, ctx),
        Task::Bench(args) => bench::run(&args, ctx),
        Task::Jobs(args) => jobs::run(&args, ctx),
        Task::Serve(args) => serve::run(&args, ctx),
        Task::Probe(args) => probe::run(&args, ctx),
    }
}

/// Loads a plan and starts an empty sequence on it. Ctrl-C cancels the load.
fn load_sequence(
    plan: &Plan,
    dir: &Path,
    args: &RuntimeArgs,
    inputs: ModelInputs,
    console: &Arc<Console>,
    interrupt: &Interrupt,
) -> Result<SingleSequence<OrtBackend>, ExecError> {
    let engine = load_engine(plan, dir, args, args.engine_options(), console, interrupt)?;
    Ok(SingleSequence::new(engine, inputs))
}

/// Loads a plan with these options. Ctrl-C cancels the load, and so does the cancel handle in `options`.
fn load_engine(
    plan: &Plan,
    dir: &Path,
    args: &RuntimeArgs,
    options: EngineOptions,
    console: &Arc<Console>,
    interrupt: &Interrupt,
) -> Result<Engine<OrtBackend>, ExecError> {
    let runtime = OnnxRuntime::open_for(plan, args, console)?;
    warn_of_memory(plan, &runtime.plan_on_this_machine(plan, args), console);
    let cancel = options.cancel.clone().unwrap_or_default();
    let watch = interrupt.cancel_on_request(&cancel);
    let options = EngineOptions { cancel: Some(cancel), ..options };
    let loaded = runtime.load_with(options, plan, dir, args, console);
    drop(watch);
    let engine = unless_interrupted(loaded, interrupt, &|line| console.info(line))?;
    if let Some(warning) = endless_answers(plan) {
        console.warn(&warning);
    }
    if engine.recomputes() {
        console.warn("this model keeps no state: every token computes the whole text again");
    }
    Ok(engine)
}

/// Refuses to write a file that another option of the same command names too. Options with their paths.
fn refuse_same_file(written: (&str, &Path), other: (&str, Option<&Path>)) -> Result<(), ExecError> {
    let is_same = |other| written.1 != Path::new("-") && hpp_io::is_same_file(written.1, other);
    if !other.1.is_some_and(is_same) {
        return Ok(());
    }
    let message = format!("{} and {} name the same file, {}", other.0, written.0, written.1.display());
    Err(ExecError::Usage { message, hint: format!("give another file to {}", written.0) })
}

/// Returns `loaded`, unless Ctrl-C or another signal requested a stop meanwhile. Then it says so and returns the error `LoadInterrupted`, which is
/// not printed.
fn unless_interrupted<T>(
    loaded: Result<T, ExecError>,
    interrupt: &Interrupt,
    say: &dyn Fn(&str),
) -> Result<T, ExecError> {
    // The load may have succeeded before the request could cancel it.
    let is_stopped = match &loaded {
        Ok(_) => true,
        Err(error) => error.is_cancelled(),
    };
    if !is_stopped || !interrupt.is_requested() {
        return loaded;
    }
    say("loading was interrupted");
    Err(ExecError::LoadInterrupted { code: interrupt.exit_code() })
}

/// A warning if the model can choose none of the tokens that end an answer. If only some of them lie beyond the vocabulary it is no mistake: they are
/// tokens added to the tokenizer.
fn endless_answers(plan: &Plan) -> Option<String> {
    let ends = &plan.generation.as_ref()?.eos_token_ids;
    let vocabulary = plan.model.vocabulary()?;
    if ends.is_empty() || ends.iter().any(|id| u64::from(*id) < vocabulary) {
        return None;
    }
    let ids: Vec<String> = ends.iter().map(u32::to_string).collect();
    Some(format!(
        "answers end only where a limit ends them: no end token of the plan ({}) is in the vocabulary of {vocabulary} tokens; correct \
         generation.eos_token_ids in plan.yaml, or make the plan again with hpp-split",
        ids.join(", ")
    ))
}

/// Warns if this machine has less free memory than a plan needs. `here`: the plan as it runs on this machine.
fn warn_of_memory(plan: &Plan, here: &Plan, console: &Console) {
    if let Some(warning) = budget_warning(plan) {
        console.warn(&warning);
    }
    // If the weights of a missing GPU do not fit the memory limit, the engine reads them from disk: then the plan's own need counts.
    let fits = |limit: u64| host_memory_needed(here, here.budgets.batch) <= limit;
    let plan = if memory_limit().is_none_or(fits) { here } else { plan };
    // A plan's need includes the memory that the process has already, so that is added to the free memory. The control group's limit caps the sum,
    // because pages of shared libraries may be charged to another group.
    let free = available_memory().map(|free| free.saturating_add(resident_memory()));
    let free = free.into_iter().chain(memory_limit()).min();
    let is_limited_to_it = free.is_some() && free == memory_limit();
    if is_limited_to_it && free.is_some_and(|free| least_needed_in_smaller_process(plan) <= free) {
        return;
    }
    if let Some(warning) = host_memory_warning(plan, free) {
        console.warn(&warning);
    }
}

/// Reads the table of embeddings, which must be given if and only if the model takes embeddings.
fn open_embeddings(plan: &Plan, path: Option<&Path>) -> Result<Option<EmbeddingTable>, ExecError> {
    let embeddings = plan.model.inputs.iter().find(|input| input.role == InputRole::Embeddings);
    let usage = |message: &str, hint: &str| ExecError::Usage { message: message.to_owned(), hint: hint.to_owned() };
    match (embeddings, path) {
        (Some(_), None) => Err(usage(
            "this model takes embeddings, not token ids",
            "give the table of its embeddings: --embeddings FILE.npy, [vocab, hidden]",
        )),
        (None, Some(_)) => Err(usage("this model takes token ids, not embeddings", "leave --embeddings out")),
        (None, None) => Ok(None),
        (Some(input), Some(path)) => {
            let table = EmbeddingTable::new(&read_npy(path)?).and_then(|table| table.for_input(input));
            Ok(Some(table.map_err(|source| ExecError::Embeddings { path: path.to_owned(), source })?))
        }
    }
}

/// Reads the inputs of a language model that the engine cannot fill by itself.
fn open_extra_inputs(plan: &Plan, path: Option<&Path>) -> Result<NamedTensors, ExecError> {
    let tensors = path.map(read_npz).transpose()?.unwrap_or_default();
    let path = path.unwrap_or(Path::new("(no --inputs)"));
    Ok(check_inputs(tensors, &plan.user_inputs(), path)?)
}

/// How text becomes a prompt.
enum PromptFormat<'a> {
    /// As it is.
    Plain,
    /// As the user's message in the chat template, after a system message if there is one.
    Chat { system: Option<&'a str> },
}

/// Longest prompt, in bytes of text per token of context. Longer text is refused before tokenizing, which would take minutes. No token of any
/// vocabulary is nearly as long.
const MOST_BYTES_PER_TOKEN: u64 = 1024;

/// The warning about a prompt of spaces.
const BLANK_PROMPT: &str =
    "the prompt is only white space: the model generates text from nothing; give a prompt with -p";

/// Reads the prompt and turns it into tokens. `context`: most tokens of a prompt. Calls `on_blank` if the text has only white space.
fn prompt_tokens(
    source: &PromptSource,
    encoder: &PromptEncoder,
    format: &PromptFormat<'_>,
    context: u64,
    on_blank: &dyn Fn(),
) -> Result<Vec<u32>, ExecError> {
    let source = match source {
        PromptSource::Text(source) => source,
        PromptSource::Tokens(tokens) => return Ok(tokens.clone()),
        PromptSource::Terminal => return Err(PromptError::Empty.into()),
    };
    // A missing tokenizer is reported before stdin is read.
    encoder.tokenizer()?;
    let text = match format {
        PromptFormat::Plain => source.read()?,
        PromptFormat::Chat { .. } => source.read_message()?,
    };
    if text.len() as u64 > context.saturating_mul(MOST_BYTES_PER_TOKEN) {
        return Err(PromptError::TextTooLong { bytes: text.len() as u64, context }.into());
    }
    if text.is_empty() {
        return Err(PromptError::Empty.into());
    }
    if text.trim().is_empty() {
        on_blank();
    }
    Ok(match format {
        PromptFormat::Plain => encoder.encode_text(&text)?,
        PromptFormat::Chat { system } => {
            let system = system.map(|text| Message::new(Role::System, text));
            let messages: Vec<Message> = system.into_iter().chain([Message::new(Role::User, text)]).collect();
            encoder.encode_conversation(&messages)?
        }
    })
}

/// Tokens of context: the argument, else what the plan was made for.
fn context_length(plan: &PlanFile, args: &RuntimeArgs) -> u64 {
    args.context.unwrap_or(plan.plan.budgets.context)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::TextSource;
    use hpp_engine::EngineError;

    #[test]
    fn an_interrupted_load_says_so_once_and_another_error_stays() {
        let load = |loaded: Result<u8, ExecError>, is_requested: bool| {
            let (interrupt, said) = (Interrupt::never(), std::cell::RefCell::new(vec![]));
            if is_requested {
                interrupt.request();
            }
            let outcome = unless_interrupted(loaded, &interrupt, &|line| said.borrow_mut().push(line.to_owned()));
            (outcome.map_err(|error| error.is_cancelled()), said.into_inner())
        };
        let interrupted = (Err(true), vec!["loading was interrupted".to_owned()]);
        assert_eq!(load(Ok(7), true), interrupted);
        assert_eq!(load(Err(EngineError::Cancelled.into()), true), interrupted);
        assert_eq!(load(Ok(7), false), (Ok(7), vec![]));
        assert_eq!(load(Err(EngineError::EmptyInput.into()), true), (Err(false), vec![]));
    }

    #[test]
    fn the_exit_code_of_an_interrupted_load_is_that_of_the_signal() {
        for (interrupt, code) in
            [(Interrupt::never(), 130), (Interrupt::with_signal(15), 143), (Interrupt::with_signal(1), 129)]
        {
            interrupt.request();
            let error = unless_interrupted(Ok(()), &interrupt, &|_| {}).unwrap_err();
            assert_eq!((error.code(), error.is_quiet()), (code, true));
        }
    }

    #[test]
    fn text_without_a_tokenizer_points_to_tokens() {
        let encoder = PromptEncoder::default();
        let text = PromptSource::Text(TextSource::Argument("x".into()));
        let error = prompt_tokens(&text, &encoder, &PromptFormat::Plain, 8, &|| {}).unwrap_err();
        assert!(error.hint().unwrap().contains("--tokens"));
        let tokens = PromptSource::Tokens(vec![3]);
        assert_eq!(prompt_tokens(&tokens, &encoder, &PromptFormat::Plain, 8, &|| {}).unwrap(), [3]);
    }
}
