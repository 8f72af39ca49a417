//! `hpp-exec PLAN` in a terminal: a conversation. What was read stays read; only what is new goes through the model.

use super::generate::{request, warn_of_unknown_tokens};
use super::{Around, Feeds, context, load_session, needs_language_model};
use crate::error::ExecError;
use crate::generate::{FinishReason, Generated, Request, Sink, generate};
use crate::machine::OrtBackend;
use crate::numbers::{counted, rate};
use crate::plan_file::PlanFile;
use crate::prompt::{TextFiles, check};
use crate::report::Timings;
use crate::session::Session;
use crate::settings::GenerateSettings;
use crate::text::{Around as Specials, Message, Role, TemplateError};
use hpp_io::show;
use rustyline::error::ReadlineError;
use rustyline::{Behavior, Config, Editor};
use std::io::{self, IsTerminal, Write};

const HELP: &str = "/reset  forget the conversation\n/help   show this\n/bye    leave (Ctrl-D and /exit do too)\n\
                    Ctrl-C  stops the answer";

/// Opens everything, then talks until the person leaves.
pub fn run(settings: &GenerateSettings, around: &mut Around<'_>) -> Result<u8, ExecError> {
    let plan = PlanFile::open(&settings.plan)?;
    needs_language_model(&plan.plan)?;
    let files = TextFiles::open(&plan, true)?;
    files.tokenizer()?;
    let feeds = Feeds::open(&plan, settings.run.embeddings.as_deref())?;
    around.interrupt.gentle();
    let (dir, args) = (&plan.dir, &settings.run.runtime);
    let session = load_session(&plan.plan, dir, args, feeds, around.console, around.interrupt)?;
    around.interrupt.abrupt();
    let request = request(settings, &plan, &files, vec![])?;
    let context = context(&plan.plan, &settings.run.runtime);
    let mut talk = Talk { session, talked: Talked::new(settings, &files), files: &files, request, context };
    if files.template.is_none() {
        around.console.say("this model has no chat template: what you type is continued as plain text");
    }
    around.console.say("/help shows the commands");
    talk.listen(around)
}

/// A conversation in progress.
struct Talk<'f> {
    session: Session<OrtBackend>,
    talked: Talked,
    files: &'f TextFiles,
    request: Request,
    context: u64,
}

/// What was said so far.
#[derive(Clone)]
enum Talked {
    /// Turns, for the chat template.
    Turns { opening: Vec<Message>, turns: Vec<Message> },
    /// One growing text.
    Text(String),
}

impl Talked {
    fn new(settings: &GenerateSettings, files: &TextFiles) -> Self {
        let system = settings.run.system.iter().map(|text| Message::new(Role::System, text.clone()));
        match files.template {
            Some(_) => Talked::Turns { opening: system.collect(), turns: vec![] },
            None => Talked::Text(String::new()),
        }
    }

    fn forget(&mut self) {
        match self {
            Talked::Turns { turns, .. } => turns.clear(),
            Talked::Text(text) => text.clear(),
        }
    }

    fn person(&mut self, line: &str) {
        match self {
            Talked::Turns { turns, .. } => turns.push(Message::new(Role::User, line)),
            Talked::Text(text) => text.push_str(line),
        }
    }

    fn model(&mut self, answer: String) {
        match self {
            Talked::Turns { turns, .. } => turns.push(Message::new(Role::Assistant, answer)),
            Talked::Text(text) => text.push_str(&answer),
        }
    }

    fn tokens(&self, files: &TextFiles) -> Result<Vec<u32>, ExecError> {
        match self {
            Talked::Turns { opening, turns } => files.conversation(&[&opening[..], &turns[..]].concat()),
            Talked::Text(text) => Ok(files.tokenizer()?.encode(text, Specials::SpecialTokens)?),
        }
    }
}

impl Talk<'_> {
    fn listen(&mut self, around: &mut Around<'_>) -> Result<u8, ExecError> {
        // Where stdout is a file, the prompt belongs on the terminal itself.
        let behavior = if io::stdout().is_terminal() { Behavior::Stdio } else { Behavior::PreferTerm };
        let config = Config::builder().behavior(behavior).auto_add_history(true).build();
        let mut editor: Editor<(), _> = Editor::with_config(config).map_err(ExecError::Terminal)?;
        loop {
            let line = match editor.readline("> ") {
                Ok(line) => line,
                Err(ReadlineError::Interrupted) => {
                    around.console.say("to leave, press Ctrl-D or type /bye");
                    continue;
                }
                Err(ReadlineError::Eof) => return Ok(0),
                Err(error) => return Err(ExecError::Terminal(error)),
            };
            match line.trim() {
                "" => {}
                "/bye" | "/exit" | "/quit" => return Ok(0),
                "/help" => around.console.say(HELP),
                "/reset" => {
                    self.talked.forget();
                    self.session.reset();
                }
                command if command.starts_with('/') && !command.contains(' ') => {
                    around.console.say(&format!("there is no command {command}; /help shows what there is"));
                }
                _ => self.answer(&line, around)?,
            }
        }
    }

    /// One turn. What goes wrong with the text is told and the turn taken back; what goes wrong with the machine ends
    /// the conversation.
    fn answer(&mut self, line: &str, around: &mut Around<'_>) -> Result<(), ExecError> {
        let before = self.talked.clone();
        self.talked.person(line);
        let prompt = self.talked.tokens(self.files).and_then(|tokens| {
            check(&tokens, self.context)?;
            Ok(tokens)
        });
        match prompt {
            Ok(prompt) => self.request.prompt = prompt,
            Err(error @ (ExecError::Prompt(_) | ExecError::Template(TemplateError::Template { .. }))) => {
                self.talked = before;
                around.console.say(&error.report());
                around.console.say("hint: /reset starts a new conversation");
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        around.interrupt.gentle();
        let mut sink = Screen { out: around.out };
        let tokenizer = self.files.tokenizer.as_ref();
        let generated = generate(&mut self.session, tokenizer, &self.request, &mut sink, around.interrupt);
        around.interrupt.gentle();
        let generated = generated?;
        show(around.out, "\n")?;
        warn_of_unknown_tokens(tokenizer, &generated, around.console);
        around.console.say(&remark(&generated, &mut self.session));
        self.talked.model(generated.text.unwrap_or_default());
        Ok(())
    }
}

/// One line under an answer.
fn remark(generated: &Generated, session: &mut Session<OrtBackend>) -> String {
    let timings = Timings::new(generated, &session.engine().telemetry());
    let speed = rate(timings.decode_tokens_per_second);
    let end = match generated.finish {
        FinishReason::Cancelled => ", stopped",
        FinishReason::Length if session.room() == 0 => ", the context is full: /reset starts anew",
        FinishReason::Length => ", stopped by -n/--max-new",
        FinishReason::Stop | FinishReason::Eos => "",
    };
    let new = counted(generated.tokens.len() as u64, "token");
    format!(
        "[{new}, {speed} tok/s, {} of the conversation reused, {} left in the context{end}]",
        counted(generated.reused as u64, "token"),
        counted(session.room(), "token")
    )
}

struct Screen<'o> {
    out: &'o mut dyn Write,
}

impl Sink for Screen<'_> {
    fn text(&mut self, text: &str) -> Result<(), ExecError> {
        Ok(show(self.out, text)?)
    }
}
