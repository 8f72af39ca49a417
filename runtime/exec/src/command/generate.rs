//! `hpp-exec PLAN --prompt ...`: continues one prompt, streaming the text or ending with one JSON object.

use super::{Around, Feeds, context, load_session, needs_language_model};
use crate::busy::Busy;
use crate::console::Console;
use crate::disk;
use crate::error::ExecError;
use crate::generate::{FinishReason, Generated, Request, Sink, generate};
use crate::inputs::{Wanted, fit};
use crate::interrupt::INTERRUPTED;
use crate::machine::OrtBackend;
use crate::numbers::counted;
use crate::plan_file::PlanFile;
use crate::prompt::{self, Chat, TextFiles};
use crate::report::{Bytes, RunReport, Timings, account};
use crate::sampling::{Choice, Sampling};
use crate::session::Session;
use crate::settings::{GenerateSettings, PromptSource};
use crate::tensors::{ScoreFile, read_npz};
use crate::text::TextTokenizer;
use hpp_io::{show, show_json};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, IsTerminal, Write};

/// Reads the prompt, loads, generates, reports.
pub fn run(settings: &GenerateSettings, around: &mut Around<'_>) -> Result<u8, ExecError> {
    let plan = PlanFile::open(&settings.plan)?;
    needs_language_model(&plan.plan)?;
    // To stop at a text takes a tokenizer, whatever the prompt is.
    let files = match &settings.prompt {
        PromptSource::Tokens(_) if settings.run.stop.is_empty() => TextFiles::open_for_tokens(&plan, around.console),
        _ => TextFiles::open(&plan, settings.run.chat)?,
    };
    let chat = settings.run.chat.then(|| Chat { system: settings.run.system.clone() });
    let prompt = prompt::tokens(&settings.prompt, &files, chat.as_ref())?;
    prompt::check(&prompt, context(&plan.plan, &settings.run.runtime))?;
    let request = request(settings, &plan, &files, prompt)?;
    let feeds = feeds(settings, &plan)?;
    let scores = settings.run.logits.as_deref().map(ScoreFile::create).transpose()?;

    let busy = Busy::begin();
    // A load leaves nothing half written when it is cancelled.
    around.interrupt.gentle();
    let (dir, args) = (&plan.dir, &settings.run.runtime);
    let mut session = load_session(&plan.plan, dir, args, feeds, around.console, around.interrupt)?;
    let shown = Shown::of(settings.run.json, files.tokenizer.is_some());
    around.console.working(format!("reading the prompt, {}", counted(request.prompt.len() as u64, "token")));
    let mut sink = Results { out: around.out, shown, scores, first: true, console: around.console };
    let generated = generate(&mut session, files.tokenizer.as_ref(), &request, &mut sink, around.interrupt)?;
    sink.end(plan.plan.model.vocab_size)?;
    warn_of_unknown_tokens(files.tokenizer.as_ref(), &generated, around.console);
    around.console.idle();
    let note = busy.note();
    let code = report(settings, &request, &generated, &mut session, around)?;
    // Behind the account: text on a terminal need not end its line.
    if let Some(note) = note {
        around.console.say(&format!("note: {note}"));
    }
    Ok(code)
}

/// What to generate, from what was typed and what the model's authors recommend.
pub fn request(
    settings: &GenerateSettings,
    plan: &PlanFile,
    files: &TextFiles,
    prompt: Vec<u32>,
) -> Result<Request, ExecError> {
    let generation = plan.plan.generation.clone().unwrap_or_default();
    if !settings.run.stop.is_empty() && files.tokenizer.is_none() {
        let message = "--stop needs a tokenizer, and this plan has none".to_owned();
        return Err(ExecError::Usage { message, hint: "leave --stop out".to_owned() });
    }
    Ok(Request {
        prompt,
        max_new: settings.run.max_new.unwrap_or(u64::MAX),
        eos: if settings.run.ignore_eos { vec![] } else { generation.eos_token_ids },
        stop: settings.run.stop.clone(),
        sampling: settings.run.sampling.resolve(&generation.sampling, fresh_seed),
    })
}

fn fresh_seed() -> u64 {
    // The standard library's hash keys are random; JSON readers keep whole numbers exact up to 53 bits.
    RandomState::new().build_hasher().finish() >> 11
}

fn feeds(settings: &GenerateSettings, plan: &PlanFile) -> Result<Feeds, ExecError> {
    let mut feeds = Feeds::open(plan, settings.run.embeddings.as_deref())?;
    let given = settings.run.inputs.as_deref().map(read_npz).transpose()?.unwrap_or_default();
    let path = settings.run.inputs.clone().unwrap_or_else(|| "(no --inputs)".into());
    feeds.extra = fit(given, &plan.plan.model, Wanted::Free, path)?;
    Ok(feeds)
}

/// What goes to stdout while generating.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shown {
    Text,
    Tokens,
    Nothing,
}

impl Shown {
    fn of(json: bool, has_text: bool) -> Self {
        match (json, has_text) {
            (true, _) => Shown::Nothing,
            (false, true) => Shown::Text,
            (false, false) => Shown::Tokens,
        }
    }
}

/// Text to stdout, scores to their file.
struct Results<'o> {
    out: &'o mut dyn Write,
    shown: Shown,
    scores: Option<ScoreFile>,
    first: bool,
    console: &'o Console,
}

impl Sink for Results<'_> {
    fn text(&mut self, text: &str) -> Result<(), ExecError> {
        if self.shown == Shown::Text {
            show(self.out, text)?;
        }
        Ok(())
    }

    fn token(&mut self, token: u32, scores: &[f32]) -> Result<(), ExecError> {
        let first = std::mem::take(&mut self.first);
        if first {
            // From here on the text itself shows progress; with --json there is none before the end.
            self.console.idle();
            if self.shown == Shown::Nothing {
                self.console.working("generating tokens");
            }
        }
        if let Some(file) = &mut self.scores {
            file.push(scores)?;
        }
        if self.shown == Shown::Tokens {
            let comma = if first { "" } else { "," };
            show(self.out, &format!("{comma}{token}"))?;
        }
        Ok(())
    }
}

impl Results<'_> {
    fn end(self, vocab: Option<u64>) -> Result<(), ExecError> {
        if let Some(file) = self.scores {
            file.finish(vocab.unwrap_or(0) as usize)?;
        }
        // Text is written as it is; only a person's next prompt deserves a line of its own.
        if self.shown == Shown::Tokens || (self.shown == Shown::Text && io::stdout().is_terminal()) {
            show(self.out, "\n")?;
        }
        Ok(())
    }
}

fn report(
    settings: &GenerateSettings,
    request: &Request,
    generated: &Generated,
    session: &mut Session<OrtBackend>,
    around: &mut Around<'_>,
) -> Result<u8, ExecError> {
    let telemetry = session.engine().telemetry();
    if settings.run.json {
        show_json(
            around.out,
            &RunReport {
                prompt_tokens: request.prompt.len(),
                prompt_token_ids: &request.prompt,
                tokens: &generated.tokens,
                text: generated.text.as_deref(),
                finish_reason: generated.finish,
                seed: seed(&request.sampling),
                timings: Timings::new(generated, &telemetry),
                bytes: Bytes::new(&telemetry, session.state_bytes()),
            },
        )?;
    }
    if let Some(seed) = seed(&request.sampling) {
        around.console.detail(&format!("seed {seed}"));
    }
    if generated.finish == FinishReason::Length && session.room() == 0 {
        around.console.warn("the context is full; --context asks for more");
    }
    if let Some(slower) = disk::slower(&session.engine().plan().predictions, generated, &telemetry) {
        around.console.warn(&slower);
    }
    around.console.say(&account(generated, request.prompt.len(), &telemetry, session.state_bytes()));
    Ok(if generated.finish == FinishReason::Cancelled { INTERRUPTED } else { 0 })
}

/// Text that misses words, or is empty, has a reason that the person should hear.
pub fn warn_of_unknown_tokens(tokenizer: Option<&TextTokenizer>, generated: &Generated, console: &Console) {
    let unknown = tokenizer.map_or(0, |tokenizer| tokenizer.count_unknown(&generated.tokens));
    if unknown > 0 {
        let new = counted(generated.tokens.len() as u64, "new token");
        console.warn(&format!("the tokenizer does not know {unknown} of {new}: the text leaves them out"));
    }
}

fn seed(sampling: &Sampling) -> Option<u64> {
    match sampling.choice {
        Choice::Greedy => None,
        Choice::Random(choice) => Some(choice.seed),
    }
}
