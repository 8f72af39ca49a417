//! `hpp-exec PLAN` in a terminal: a conversation. Each turn reuses the sequence's state and computes only the new tokens.

use super::adaptation::{BesideEngine, adaptation};
use super::drafts::DraftChoice;
use super::generate::{request, warn_of_unknown_tokens};
use super::host_need::HostNeed;
use super::prefix_cache::{CacheSettings, open_cache, warning_of_pages};
use super::session::{Conversation, SessionFile, directory};
use super::{BLANK_PROMPT, CommandContext, context_length, load_engine, open_embeddings};
use crate::cli::KvArgs;
use crate::error::ExecError;
use crate::interrupt::INTERRUPTED;
use crate::numbers::{counted, rate};
use crate::prompt::PromptSource;
use crate::report::Timings;
use crate::runtime::{OnnxRuntime, OrtBackend};
use crate::settings::GenerateSettings;
use hpp_engine::EngineOptions;
use hpp_generate::kv::PageStoreError;
use hpp_generate::speculate::Drafts;
use hpp_generate::text::{Message, Role, TemplateError};
use hpp_generate::{
    FinishReason, GenerateError, Generated, Generation, GenerationEvent, GenerationRequest, ModelInputs, PlanFile,
    PromptEncoder, PromptError, SingleSequence, check_language_model, check_prompt, generate, prompt_chunk,
};
use hpp_io::show;
use hpp_schema::error_report;
use rustyline::error::ReadlineError;
use rustyline::{Behavior, Config, Editor};
use std::cell::RefCell;
use std::io::{self, IsTerminal};
use std::time::Duration;

/// Longest wait until KV pages are written to disk, if the disk has no room for the conversation beside them.
const PAGES_WRITTEN: Duration = Duration::from_secs(10);
/// A message of fewer bytes is not worth shortening: the conversation before it fills the context.
const SHORT_MESSAGE: usize = 100;
const HELP: &str = "/reset  forget the conversation\n/help   show this\n/bye    leave (Ctrl-D and /exit do too)\n\
                    Ctrl-C  stops the answer";

/// Loads the plan and chats until the user leaves.
pub fn run(settings: &GenerateSettings, ctx: &mut CommandContext<'_>) -> Result<u8, ExecError> {
    let plan = PlanFile::open(&settings.plan)?;
    check_language_model(&plan.plan)?;
    let encoder = PromptEncoder::open(&plan, true)?;
    encoder.tokenizer()?;
    let embeddings = open_embeddings(&plan.plan, settings.run.embeddings.as_deref())?;
    let inputs = ModelInputs { embeddings, ..ModelInputs::default() };
    ctx.interrupt.request_stop_on_signal();
    let session = settings.run.session.as_deref().map(|name| ChatSession::open(name, &settings.run.kv)).transpose()?;
    let draft = DraftChoice::open(&settings.draft_method, &plan, &encoder, ctx.console)?;
    let (sequence, chunk) = load(settings, &plan, inputs, session.as_ref(), &draft, ctx)?;
    let drafts = draft.load(&plan.plan, 1, &settings.run.runtime, ctx.console, ctx.interrupt)?;
    let drafts = settings.with_fixed_length(drafts, ctx.console);
    ctx.interrupt.exit_on_signal();
    let request = request(settings, &plan, &encoder, vec![])?;
    if encoder.template.is_none() {
        if settings.run.answer.system.is_some() {
            ctx.console.warn("--system has no effect: this model has no chat template");
        }
        ctx.console.info("this model has no chat template: it continues what you type as plain text");
    }
    let mut transcript = Transcript::new(settings, &encoder);
    if let Some(said) = session.as_ref().and_then(|session| session.said.as_ref()) {
        let is_other_kind = match &transcript {
            Transcript::Messages { .. } => !said.text.is_empty(),
            Transcript::Text(_) => !said.messages.is_empty(),
        };
        if is_other_kind {
            return Err(ExecError::Usage {
                message: "this session belongs to a model with a chat template, and this model has none, or vice versa"
                    .to_owned(),
                hint: "use another --session name with this model".to_owned(),
            });
        }
        let said_before = transcript.resume(said);
        ctx.console.info(&format!("continuing the conversation after {said_before}"));
    }
    let context = context_length(&plan, &settings.run.runtime);
    let file = session.map(|session| session.file);
    let restart = match settings.prompt {
        PromptSource::Text(_) => "another --session name starts a new conversation",
        _ => "/reset starts a new conversation",
    };
    let longest_context = plan.plan.model.context_length;
    let encoder = &encoder;
    let mut chat =
        Chat { drafts, sequence, chunk, transcript, file, encoder, request, context, longest_context, restart };
    match &settings.prompt {
        PromptSource::Text(source) => {
            if let Some(note) = settings.prompt.file_note() {
                ctx.console.info(&note);
            }
            let line = source.read_message()?;
            match line.as_str() {
                "" => return Err(GenerateError::from(PromptError::Empty).into()),
                blank if blank.trim().is_empty() => ctx.console.warn(BLANK_PROMPT),
                _ => {}
            }
            Ok(match chat.answer(&line, ctx)? {
                Reply::Complete => 0,
                Reply::Cancelled => INTERRUPTED,
                Reply::Refused => 1,
            })
        }
        _ => {
            ctx.console.info("/help shows the commands");
            chat.run(ctx)
        }
    }
}

/// A conversation that is saved under a name.
struct ChatSession {
    name: String,
    file: SessionFile,
    /// The earlier messages.
    said: Option<Conversation>,
    kv: KvArgs,
}

impl ChatSession {
    fn open(name: &str, args: &KvArgs) -> Result<Self, ExecError> {
        let directory = directory(args)?;
        let (file, said) = SessionFile::open(directory.clone(), name)?;
        Ok(ChatSession { name: name.to_owned(), file, said, kv: KvArgs { kv_dir: Some(directory), ..args.clone() } })
    }
}

/// Loads the model beside its draft, with the saved states of a session. Also returns the number of prompt tokens in one pass.
fn load(
    settings: &GenerateSettings,
    plan: &PlanFile,
    inputs: ModelInputs,
    session: Option<&ChatSession>,
    draft: &DraftChoice,
    ctx: &CommandContext<'_>,
) -> Result<(SingleSequence<OrtBackend>, usize), ExecError> {
    let args = &settings.run.runtime;
    // Within one process a conversation continues on its sequence. Saved pages serve the next process only, which finds those on disk.
    let session = session.filter(|session| session.kv.saves_on_disk());
    let kv = match session {
        None => 0,
        Some(session) => {
            let here = OnnxRuntime::open_and_plan_on_this_machine(&plan.plan, args)?;
            let need = HostNeed::new(&plan.plan, &here, args.weight_reads(), draft.memory());
            let pages = session.kv.ram(&need);
            if let Some(warning) = session.kv.kv_ram.and_then(|_| warning_of_pages(&need, pages)) {
                ctx.console.warn(&warning);
            }
            pages
        }
    };
    let options = EngineOptions { reserved: draft.memory().saturating_add(kv), ..args.engine_options() };
    let engine = load_engine(&plan.plan, &plan.dir, args, options, ctx.console, ctx.interrupt)?;
    let mut chunk = prompt_chunk(&engine);
    let cache = match session {
        None => None,
        Some(session) => {
            let settings = CacheSettings { args: &session.kv, ram: kv, models: 1 };
            match open_cache(&engine, &plan.plan, args, settings, || {}, ctx.console) {
                Err(ExecError::Store(
                    error @ (PageStoreError::InUse(_) | PageStoreError::TooSmall { .. } | PageStoreError::Full { .. }),
                )) => {
                    ctx.console.warn(&format!("{error}; until then the conversation is computed anew at each start"));
                    None
                }
                cache => cache?,
            }
        }
    };
    let kept = if cache.is_some() { kv } else { 0 };
    let beside = BesideEngine::new(draft, &plan.plan, 1, kept, args)?;
    let adaptation = adaptation(&engine, beside, args, ctx.console)?;
    let mut sequence = SingleSequence::new(engine, inputs);
    adaptation.into_iter().for_each(|adaptation| sequence.adapt(adaptation));
    if let Some((cache, session)) = cache.zip(session) {
        chunk = cache.page_tokens();
        sequence.save_in(cache, kv, &session.name);
    }
    Ok((sequence, chunk))
}

/// A conversation in progress.
struct Chat<'e> {
    drafts: Drafts<OrtBackend>,
    sequence: SingleSequence<OrtBackend>,
    /// Tokens of a prompt in one pass.
    chunk: usize,
    transcript: Transcript,
    /// The file in which the conversation is saved.
    file: Option<SessionFile>,
    encoder: &'e PromptEncoder,
    /// The settings of every answer; the prompt changes.
    request: GenerationRequest,
    context: u64,
    /// The longest context that the model was built for, where that is known.
    longest_context: Option<u64>,
    /// How the user starts a new conversation.
    restart: &'static str,
}

/// The conversation so far.
#[derive(Clone)]
enum Transcript {
    /// Messages for the chat template, after the system message if there is one.
    Messages { system: Option<Message>, messages: Vec<Message> },
    /// One growing text, for a model without a chat template.
    Text(String),
}

impl Transcript {
    fn new(settings: &GenerateSettings, encoder: &PromptEncoder) -> Self {
        match encoder.template {
            Some(_) => {
                let system = settings.run.answer.system.as_ref().map(|text| Message::new(Role::System, text.clone()));
                Transcript::Messages { system, messages: vec![] }
            }
            None => Transcript::Text(String::new()),
        }
    }

    /// Continues a saved conversation. Returns its length for people: messages without the system message, or characters of text.
    fn resume(&mut self, said: &Conversation) -> String {
        match self {
            Transcript::Messages { system, messages } => {
                let is_system = |message: &&Message| message.role == Role::System;
                // A system message of the command line replaces that of the session.
                *system = system.take().or_else(|| said.messages.first().filter(is_system).cloned());
                *messages = said.messages.iter().filter(|message| message.role != Role::System).cloned().collect();
                counted(messages.len() as u64, "message")
            }
            Transcript::Text(text) => {
                text.clone_from(&said.text);
                counted(text.chars().count() as u64, "character")
            }
        }
    }

    /// The conversation as it is saved.
    fn conversation(&self) -> Conversation {
        match self {
            Transcript::Messages { system, messages } => {
                Conversation { messages: system.iter().chain(messages).cloned().collect(), text: String::new() }
            }
            Transcript::Text(text) => Conversation { messages: vec![], text: text.clone() },
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Transcript::Messages { messages, .. } => messages.is_empty(),
            Transcript::Text(text) => text.is_empty(),
        }
    }

    fn clear(&mut self) {
        match self {
            Transcript::Messages { messages, .. } => messages.clear(),
            Transcript::Text(text) => text.clear(),
        }
    }

    fn push(&mut self, role: Role, content: &str) {
        match self {
            Transcript::Messages { messages, .. } => messages.push(Message::new(role, content)),
            Transcript::Text(text) => text.push_str(content),
        }
    }

    /// The tokens of the conversation.
    fn tokens(&self, encoder: &PromptEncoder) -> Result<Vec<u32>, GenerateError> {
        match self {
            Transcript::Messages { system, messages } => {
                let all: Vec<Message> = system.iter().chain(messages).cloned().collect();
                encoder.encode_conversation(&all)
            }
            Transcript::Text(text) => encoder.encode_text(text),
        }
    }
}

/// A line that the user typed, by its meaning.
#[derive(Debug, PartialEq, Eq)]
enum Typed {
    Nothing,
    Leave,
    Help,
    Reset,
    /// Neither a command nor a message, and why.
    Refused(String),
    Message,
}

impl Typed {
    fn read(line: &str) -> Self {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { return Typed::Nothing };
        let is_alone = words.next().is_none();
        let command = match first {
            "/bye" | "/exit" | "/quit" => Typed::Leave,
            "/help" => Typed::Help,
            "/reset" => Typed::Reset,
            unknown if unknown.starts_with('/') && is_alone => {
                return Typed::Refused(format!("there is no command {unknown}; /help shows the commands"));
            }
            // A message may begin with a path.
            _ => return Typed::Message,
        };
        match is_alone {
            true => command,
            false => Typed::Refused(format!(
                "{first} takes no more words; to send this as a message, begin it with another word"
            )),
        }
    }
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reply {
    /// It was answered.
    Complete,
    /// Ctrl-C stopped the answer; the conversation keeps what there was.
    Cancelled,
    /// It cannot become a prompt. The error was printed, with hints.
    Refused,
}

impl Chat<'_> {
    /// Reads lines until the user leaves.
    fn run(&mut self, ctx: &mut CommandContext<'_>) -> Result<u8, ExecError> {
        // If stdout is a file, the line editor's prompt goes to the terminal itself.
        let behavior = if io::stdout().is_terminal() { Behavior::Stdio } else { Behavior::PreferTerm };
        let config = Config::builder().behavior(behavior).auto_add_history(true).build();
        let mut editor: Editor<(), _> = Editor::with_config(config).map_err(ExecError::Terminal)?;
        loop {
            // The conversation is saved here, so Ctrl-C or a closed terminal may end the process at once.
            ctx.interrupt.exit_on_signal();
            if ctx.interrupt.is_terminated() {
                return Ok(INTERRUPTED);
            }
            let line = match editor.readline("> ") {
                Ok(line) => line,
                Err(ReadlineError::Interrupted) => {
                    ctx.console.info("to leave, press Ctrl-D or type /bye");
                    continue;
                }
                Err(ReadlineError::Eof) => return Ok(0),
                Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::InvalidData => {
                    ctx.console.warn("that line is not UTF-8 and was ignored; type it again");
                    continue;
                }
                Err(error) => return Err(ExecError::Terminal(error)),
            };
            match Typed::read(&line) {
                Typed::Nothing => {}
                Typed::Leave => return Ok(0),
                Typed::Help => ctx.console.info(HELP),
                Typed::Reset => {
                    self.transcript.clear();
                    self.sequence.clear();
                    self.save()?;
                }
                Typed::Refused(why) => ctx.console.info(&why),
                Typed::Message => drop(self.answer(&line, ctx)?),
            }
        }
    }

    /// The tokens of the conversation, if they fit the context.
    fn prompt(&self) -> Result<Vec<u32>, GenerateError> {
        let tokens = self.transcript.tokens(self.encoder)?;
        check_prompt(&tokens, self.context).map_err(|error| error.of_model_for(self.longest_context))?;
        Ok(tokens)
    }

    /// Answers one message. A message that cannot become a prompt is reported and dropped; any other error ends the conversation.
    fn answer(&mut self, line: &str, ctx: &mut CommandContext<'_>) -> Result<Reply, ExecError> {
        let before = self.transcript.clone();
        self.transcript.push(Role::User, line);
        let request = match self.prompt() {
            Ok(prompt) => GenerationRequest { prompt, ..self.request.clone() },
            Err(error @ (GenerateError::Prompt(_) | GenerateError::Template(TemplateError::Template { .. }))) => {
                self.transcript = before;
                // The whole conversation is the prompt, so a new conversation may help.
                let restart = Some(self.restart.to_owned()).filter(|_| !self.transcript.is_empty());
                let error = match (&restart, error) {
                    (Some(hint), GenerateError::Prompt(PromptError::TooLong { tokens, context, .. })) => {
                        ExecError::Usage {
                            message: format!(
                                "with this message the conversation has {} and the context holds {context}",
                                counted(tokens as u64, "token")
                            ),
                            hint: match line.len() {
                                0..SHORT_MESSAGE => hint.clone(),
                                _ => format!("{hint}; or shorten the message"),
                            },
                        }
                    }
                    (_, error) => ExecError::from(error),
                };
                let restart = restart.filter(|_| !matches!(error, ExecError::Usage { .. }));
                let hints: Vec<String> = restart.into_iter().chain(error.hint()).collect();
                let hint = Some(hints.join("; or ")).filter(|hint| !hint.is_empty());
                ctx.console.line(&error_report(&error, hint.as_deref()));
                return Ok(Reply::Refused);
            }
            Err(error) => return Err(error.into()),
        };
        ctx.interrupt.request_stop_on_signal();
        let watch = ctx.interrupt.cancel_on_request(&self.sequence.engine().cancel_handle());
        let tokenizer = self.encoder.tokenizer.as_ref();
        // If a closed terminal or pipe refuses the text of an answer, the answer ends and is saved.
        let unwritten = RefCell::new(None);
        let is_cancelled = || ctx.interrupt.is_requested() || unwritten.borrow().is_some();
        let out = &mut *ctx.out;
        let on_event = &mut |event: GenerationEvent<'_>| {
            let mut unwritten = unwritten.borrow_mut();
            if let (GenerationEvent::Text(text), None) = (event, &*unwritten) {
                *unwritten = show(out, text).err();
            }
            Ok::<_, ExecError>(())
        };
        let generation = self.drafts.speculate(Generation::new(request, tokenizer.cloned(), self.chunk));
        let generated = generate(&mut self.sequence, generation, &is_cancelled, on_event);
        drop(watch);
        ctx.interrupt.request_stop_on_signal();
        let generated = generated?;
        let unwritten = unwritten.into_inner().or_else(|| show(ctx.out, "\n").err());
        warn_of_unknown_tokens(tokenizer, &generated, ctx.console);
        ctx.console.info(&answer_summary(&generated, &mut self.sequence, self.restart));
        self.transcript.push(Role::Assistant, generated.text.as_deref().unwrap_or_default());
        self.save()?;
        if let Some(error) = unwritten {
            return Err(error.into());
        }
        Ok(if generated.finish_reason == FinishReason::Cancelled { Reply::Cancelled } else { Reply::Complete })
    }

    /// Saves the conversation, if it has a session.
    fn save(&self) -> Result<(), ExecError> {
        let Some(file) = &self.file else { return Ok(()) };
        let conversation = self.transcript.conversation();
        match (file.save(&conversation), self.sequence.cache()) {
            // If the disk is full, flushing the cache frees the room of pages that do not fit, and the file is saved again.
            (Err(ExecError::Session { .. }), Some(cache)) if cache.flush(PAGES_WRITTEN) => file.save(&conversation),
            (saved, _) => saved,
        }
    }
}

/// The line under an answer.
fn answer_summary(generated: &Generated, sequence: &mut SingleSequence<OrtBackend>, restart: &str) -> String {
    let timings = Timings::new(generated, &sequence.engine().telemetry());
    let speed = rate(timings.decode_tokens_per_second);
    // The last token was not fed to the model yet. The next message feeds it, so it counts as used context.
    let used = generated.usage.prompt_tokens + generated.usage.completion_tokens;
    let left = sequence.context().saturating_sub(used as u64);
    let left_in_context = format!("{} left in the context", counted(left, "token"));
    let end = match generated.finish_reason {
        FinishReason::Cancelled => format!("{left_in_context}, stopped"),
        FinishReason::Length if left == 0 => format!("the context is full: {restart}"),
        FinishReason::Length => format!("{left_in_context}, stopped by -n/--max-new"),
        FinishReason::Stop | FinishReason::Eos | FinishReason::Grammar => left_in_context,
    };
    let page = sequence.cache().map(|cache| cache.page_tokens());
    let pages = page.map_or_else(String::new, |page| format!(" (in whole KV pages of {page} tokens)"));
    format!(
        "[{}, {speed} tok/s, {} of the conversation reused{pages}, {end}]",
        counted(generated.usage.completion_tokens as u64, "token"),
        counted(generated.usage.reused_tokens as u64, "token"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_message_unless_it_begins_as_a_command_does() {
        for (line, typed) in [
            ("", Typed::Nothing),
            (" \t", Typed::Nothing),
            ("/bye", Typed::Leave),
            (" /quit ", Typed::Leave),
            ("/help", Typed::Help),
            ("/reset", Typed::Reset),
            ("hello /help", Typed::Message),
            ("/etc/hosts is which file?", Typed::Message),
            ("/helpful is a word", Typed::Message),
        ] {
            assert_eq!(Typed::read(line), typed, "{line:?}");
        }
        for (line, says) in [
            ("/nonsense", "there is no command /nonsense"),
            ("/help extra", "/help takes no more words"),
            ("/reset\tnow", "/reset takes no more words"),
        ] {
            let Typed::Refused(why) = Typed::read(line) else { panic!("{line:?}") };
            assert!(why.contains(says), "{why}");
        }
    }
}
