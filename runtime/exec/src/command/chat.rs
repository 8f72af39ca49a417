//! `hpp-exec PLAN` in a terminal: a conversation. Each turn reuses the sequence's state and computes only the new tokens.

use super::drafts::DraftSource;
use super::generate::{request, warn_of_unknown_tokens};
use super::{CommandContext, context_length, load_sequence, open_embeddings};
use crate::error::ExecError;
use crate::numbers::{counted, rate};
use crate::report::Timings;
use crate::runtime::OrtBackend;
use crate::settings::GenerateSettings;
use hpp_generate::text::{Message, Role, TemplateError};
use hpp_generate::{
    Event, FinishReason, GenerateError, Generated, Generation, ModelInputs, PlanFile, PromptEncoder, Request,
    SingleSequence, check_language_model, check_prompt, generate, prompt_chunk,
};
use hpp_io::show;
use rustyline::error::ReadlineError;
use rustyline::{Behavior, Config, Editor};
use std::io::{self, IsTerminal};

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
    ctx.interrupt.graceful();
    let (dir, args) = (&plan.dir, &settings.run.runtime);
    let sequence = load_sequence(&plan.plan, dir, args, inputs, ctx.console, ctx.interrupt)?;
    let drafter = DraftSource::open(settings, &plan, &encoder, ctx)?;
    ctx.interrupt.immediate();
    let request = request(settings, &plan, &encoder, vec![])?;
    if encoder.template.is_none() {
        ctx.console.info("this model has no chat template: it continues what you type as plain text");
    }
    ctx.console.info("/help shows the commands");
    let transcript = Transcript::new(settings, &encoder);
    Chat { drafter, sequence, transcript, encoder: &encoder, request, context: context_length(&plan, args) }.run(ctx)
}

/// A conversation in progress.
struct Chat<'e> {
    drafter: DraftSource,
    sequence: SingleSequence<OrtBackend>,
    transcript: Transcript,
    encoder: &'e PromptEncoder,
    /// The settings of every answer; the prompt changes.
    request: Request,
    context: u64,
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

    /// The tokens of the conversation, if they fit the context.
    fn tokens(&self, encoder: &PromptEncoder, context: u64) -> Result<Vec<u32>, GenerateError> {
        let tokens = match self {
            Transcript::Messages { system, messages } => {
                let all: Vec<Message> = system.iter().chain(messages).cloned().collect();
                encoder.encode_conversation(&all)?
            }
            Transcript::Text(text) => encoder.encode_text(text)?,
        };
        check_prompt(&tokens, context)?;
        Ok(tokens)
    }
}

impl Chat<'_> {
    /// Reads lines until the user leaves.
    fn run(&mut self, ctx: &mut CommandContext<'_>) -> Result<u8, ExecError> {
        // If stdout is a file, the line editor's prompt goes to the terminal itself.
        let behavior = if io::stdout().is_terminal() { Behavior::Stdio } else { Behavior::PreferTerm };
        let config = Config::builder().behavior(behavior).auto_add_history(true).build();
        let mut editor: Editor<(), _> = Editor::with_config(config).map_err(ExecError::Terminal)?;
        loop {
            let line = match editor.readline("> ") {
                Ok(line) => line,
                Err(ReadlineError::Interrupted) => {
                    ctx.console.info("to leave, press Ctrl-D or type /bye");
                    continue;
                }
                Err(ReadlineError::Eof) => return Ok(0),
                Err(error) => return Err(ExecError::Terminal(error)),
            };
            match line.trim() {
                "" => {}
                "/bye" | "/exit" | "/quit" => return Ok(0),
                "/help" => ctx.console.info(HELP),
                "/reset" => {
                    self.transcript.clear();
                    self.sequence.clear();
                }
                command if command.starts_with('/') && !command.contains(' ') => {
                    ctx.console.info(&format!("there is no command {command}; /help shows the commands"));
                }
                _ => self.answer(&line, ctx)?,
            }
        }
    }

    /// Answers one message. A message that cannot become a prompt is reported and dropped; any other error ends the conversation.
    fn answer(&mut self, line: &str, ctx: &mut CommandContext<'_>) -> Result<(), ExecError> {
        let before = self.transcript.clone();
        self.transcript.push(Role::User, line);
        let request = match self.transcript.tokens(self.encoder, self.context) {
            Ok(prompt) => Request { prompt, ..self.request.clone() },
            Err(error @ (GenerateError::Prompt(_) | GenerateError::Template(TemplateError::Template { .. }))) => {
                self.transcript = before;
                ctx.console.info(&ExecError::from(error).report());
                ctx.console.info("hint: /reset starts a new conversation");
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        ctx.interrupt.graceful();
        let watch = ctx.interrupt.cancel_on_request(&self.sequence.engine().cancel_handle());
        let tokenizer = self.encoder.tokenizer.as_ref();
        let is_cancelled = || ctx.interrupt.is_requested();
        let out = &mut *ctx.out;
        let on_event = &mut |event: Event<'_>| match event {
            Event::Text(text) => Ok(show(out, text)?),
            Event::Prompt { .. } | Event::Token { .. } => Ok::<_, ExecError>(()),
        };
        let chunk = prompt_chunk(self.sequence.engine());
        let generation = self.drafter.speculate(Generation::new(request, tokenizer.cloned(), chunk));
        let generated = generate(&mut self.sequence, generation, &is_cancelled, on_event);
        drop(watch);
        ctx.interrupt.graceful();
        let generated = generated?;
        show(ctx.out, "\n")?;
        warn_of_unknown_tokens(tokenizer, &generated, ctx.console);
        ctx.console.info(&answer_summary(&generated, &mut self.sequence));
        self.transcript.push(Role::Assistant, generated.text.as_deref().unwrap_or_default());
        Ok(())
    }
}

/// The line under an answer.
fn answer_summary(generated: &Generated, sequence: &mut SingleSequence<OrtBackend>) -> String {
    let timings = Timings::new(generated, &sequence.engine().telemetry());
    let speed = rate(timings.decode_tokens_per_second);
    let end = match generated.finish_reason {
        FinishReason::Cancelled => ", stopped",
        FinishReason::Length if sequence.room() == 0 => ", the context is full: /reset starts a new conversation",
        FinishReason::Length => ", stopped by -n/--max-new",
        FinishReason::Stop | FinishReason::Eos => "",
    };
    format!(
        "[{}, {speed} tok/s, {} of the conversation reused, {} left in the context{end}]",
        counted(generated.usage.completion_tokens as u64, "token"),
        counted(generated.usage.reused_tokens as u64, "token"),
        counted(sequence.room(), "token")
    )
}
