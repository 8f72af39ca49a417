//! `hpp-exec PLAN --prompt ...`: generates text after one prompt. Prints the text as it comes, or one JSON object at the end.

use super::adaptation::{BesideEngine, adaptation};
use super::drafts::DraftChoice;
use super::{
    BLANK_PROMPT, CommandContext, PromptFormat, context_length, load_engine, open_embeddings, open_extra_inputs,
    prompt_tokens, refuse_same_file,
};
use crate::cli::AnswerArgs;
use crate::console::Console;
use crate::error::ExecError;
use crate::interrupt::INTERRUPTED;
use crate::json_schema::read_schema;
use crate::numbers::counted;
use crate::other_load::OtherLoad;
use crate::prompt::PromptSource;
use crate::report::disk::slow_disk_warning;
use crate::report::{Bytes, RunReport, Timings, summary};
use crate::runtime::OrtBackend;
use crate::settings::{GenerateSettings, UNUSED_SAMPLING};
use crate::tensors::LogitsFile;
use hpp_engine::EngineOptions;
use hpp_generate::adapt::Adaptation;
use hpp_generate::grammar::Grammar;
use hpp_generate::sampling::SamplingMethod;
use hpp_generate::text::TextTokenizer;
use hpp_generate::{
    FinishReason, GenerateError, Generated, Generation, GenerationEvent, GenerationRequest, ModelInputs, PlanFile,
    PromptEncoder, PromptError, SingleSequence, check_language_model, check_prompt, generate, prompt_chunk,
};
use hpp_io::{show, show_json};
use hpp_schema::{SourceModel, error_line};
use std::io::{self, IsTerminal, Write};

/// Reads the prompt, loads the plan, generates and reports.
pub fn run(settings: &GenerateSettings, ctx: &mut CommandContext<'_>) -> Result<u8, ExecError> {
    let plan = PlanFile::open(&settings.plan)?;
    check_language_model(&plan.plan)?;
    // Inputs are read before the prompt, which may wait for stdin.
    let extra = open_extra_inputs(&plan.plan, settings.run.inputs.as_deref())?;
    let encoder = open_encoder(settings, &plan, ctx.console)?;
    let format = match settings.run.answer.chat {
        true => PromptFormat::Chat { system: settings.run.answer.system.as_deref() },
        false => PromptFormat::Plain,
    };
    let context = context_length(&plan, &settings.run.runtime);
    if let Some(note) = settings.prompt.file_note() {
        ctx.console.info(&note);
    }
    if settings.prompt.reads_stdin() {
        ctx.console.working("reading stdin to its end, for the prompt");
    }
    let prompt = prompt_tokens(&settings.prompt, &encoder, &format, context, &|| ctx.console.warn(BLANK_PROMPT));
    let prompt = prompt.map_err(|error| beside_inputs(error, settings))?;
    ctx.console.idle();
    check_prompt(&prompt, context).map_err(|error| error.of_model_for(plan.plan.model.context_length))?;
    let request = request(settings, &plan, &encoder, prompt)?;
    if request.sampling.choice == SamplingMethod::Greedy && settings.run.answer.sampling.asks_for_random_choices() {
        ctx.console.warn(UNUSED_SAMPLING);
    }
    let inputs = ModelInputs { embeddings: open_embeddings(&plan.plan, settings.run.embeddings.as_deref())?, extra };
    if let Some(logits) = &settings.run.logits {
        refuse_same_file(("--logits", logits), ("--embeddings", settings.run.embeddings.as_deref()))?;
    }
    let logits = settings.run.logits.as_deref().map(LogitsFile::create).transpose()?;

    let other_load = OtherLoad::start();
    // A cancelled load leaves no half-written files, so Ctrl-C may end it gracefully.
    ctx.interrupt.request_stop_on_signal();
    let args = &settings.run.runtime;
    let draft = DraftChoice::open(&settings.draft_method, &plan, &encoder, ctx.console)?;
    let options = EngineOptions { reserved: draft.memory(), ..args.engine_options() };
    let engine = load_engine(&plan.plan, &plan.dir, args, options, ctx.console, ctx.interrupt)?;
    let beside = BesideEngine::new(&draft, &plan.plan, 1, 0, args)?;
    let adaptation = adaptation(&engine, beside, args, ctx.console)?;
    let mut sequence = SingleSequence::new(engine, inputs);
    adaptation.into_iter().for_each(|adaptation| sequence.adapt(adaptation));
    let drafts = draft.load(&plan.plan, 1, args, ctx.console, ctx.interrupt)?;
    let drafts = settings.with_fixed_length(drafts, ctx.console);
    let format = OutputFormat::new(settings.run.json, encoder.tokenizer.is_some());
    ctx.console.working(format!("reading the prompt, {}", counted(request.prompt.len() as u64, "token")));
    let mut output = Output { out: ctx.out, format, logits, any_token: false, console: ctx.console };
    let watch = ctx.interrupt.cancel_on_request(&sequence.engine().cancel_handle());
    let is_cancelled = || ctx.interrupt.is_requested();
    let on_event = &mut |event: GenerationEvent<'_>| output.write(event);
    let chunk = prompt_chunk(sequence.engine());
    let generation = drafts.speculate(Generation::new(request.clone(), encoder.tokenizer.clone(), chunk));
    let generated = generate(&mut sequence, generation, &is_cancelled, on_event)?;
    drop(watch);
    output.finish(plan.plan.model.vocab_size)?;
    warn_of_unknown_tokens(encoder.tokenizer.as_ref(), &generated, ctx.console);
    ctx.console.idle();
    let note = other_load.note();
    let code = report(settings, &request, &generated, &mut sequence, ctx)?;
    // The note comes after the summary, which starts a new line: text on a terminal may end without a line break.
    if let Some(note) = note {
        ctx.console.info(&format!("note: {note}"));
    }
    let has_template = plan.plan.generation.as_ref().is_some_and(|generation| generation.chat_template.is_some());
    let is_empty = generated.finish_reason == FinishReason::Eos && generated.text.as_deref().is_some_and(str::is_empty);
    if is_empty && has_template && !settings.run.answer.chat {
        ctx.console.info("hint: the model ended the text at once; --chat formats the prompt with its chat template");
    }
    Ok(code)
}

/// The error of a prompt. If the prompt is empty and `--inputs` was given, it says that `--inputs` does not replace the prompt.
fn beside_inputs(error: ExecError, settings: &GenerateSettings) -> ExecError {
    match error {
        ExecError::Generate(GenerateError::Prompt(PromptError::Empty)) if settings.run.inputs.is_some() => {
            ExecError::Usage {
                message: "the prompt is empty, and this model generates text: it needs one beside --inputs".to_owned(),
                hint: "give --prompt TEXT, --prompt-file FILE or --tokens 1,2,3".to_owned(),
            }
        }
        other => other,
    }
}

/// Opens the tokenizer and, for a chat, the template. If neither the prompt nor an option needs a tokenizer, a broken one is only a warning.
fn open_encoder(settings: &GenerateSettings, plan: &PlanFile, console: &Console) -> Result<PromptEncoder, ExecError> {
    let needs_tokenizer = !matches!(settings.prompt, PromptSource::Tokens(_))
        || !settings.run.answer.stop.is_empty()
        || settings.run.answer.json_schema.is_some();
    match PromptEncoder::open(plan, settings.run.answer.chat) {
        Err(error) if !needs_tokenizer => {
            console.warn(&format!("{}: printing token ids instead of text", error_line(&error)));
            Ok(PromptEncoder::default())
        }
        encoder => Ok(encoder?),
    }
}

/// The request that the arguments and the model's generation settings describe.
pub fn request(
    settings: &GenerateSettings,
    plan: &PlanFile,
    encoder: &PromptEncoder,
    prompt: Vec<u32>,
) -> Result<GenerationRequest, ExecError> {
    let generation = plan.plan.generation.clone().unwrap_or_default();
    if !settings.run.answer.stop.is_empty() && encoder.tokenizer.is_none() {
        let message = "--stop needs a tokenizer, and this plan has none".to_owned();
        return Err(ExecError::Usage { message, hint: "leave --stop out".to_owned() });
    }
    let grammar = grammar(&settings.run.answer, encoder, &generation.eos_token_ids)?;
    Ok(GenerationRequest {
        prompt,
        max_new_tokens: settings.run.answer.max_new.unwrap_or(u64::MAX),
        eos_token_ids: if settings.run.answer.ignore_eos { vec![] } else { generation.eos_token_ids },
        stop: settings.run.answer.stop.clone(),
        sampling: settings.run.answer.sampling.overrides().resolve(&generation.sampling),
        grammar,
        visible_tokens: vec![],
        prompt_logits: false,
    })
}

/// The grammar that answers follow, if the command line gives one.
fn grammar(args: &AnswerArgs, encoder: &PromptEncoder, ends: &[u32]) -> Result<Option<Grammar>, ExecError> {
    let Some(source) = read_schema(args.json_schema.as_deref())? else { return Ok(None) };
    let compiler = encoder.grammars(ends).ok_or(PromptError::NoTokenizer)?;
    Ok(Some(compiler.compile(&source).map_err(GenerateError::from)?))
}

/// What goes to stdout while generating.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OutputFormat {
    Text,
    /// Token ids, without a tokenizer.
    Tokens,
    /// Nothing: the JSON object comes at the end.
    Json,
}

impl OutputFormat {
    fn new(json: bool, has_tokenizer: bool) -> Self {
        match (json, has_tokenizer) {
            (true, _) => OutputFormat::Json,
            (false, true) => OutputFormat::Text,
            (false, false) => OutputFormat::Tokens,
        }
    }
}

/// Writes text or token ids to stdout and logits to their file.
struct Output<'o> {
    out: &'o mut dyn Write,
    format: OutputFormat,
    logits: Option<LogitsFile>,
    any_token: bool,
    console: &'o Console,
}

impl Output<'_> {
    fn write(&mut self, event: GenerationEvent<'_>) -> Result<(), ExecError> {
        match event {
            GenerationEvent::Prompt { .. } | GenerationEvent::PromptToken { .. } => Ok(()),
            GenerationEvent::Token { id, logits } => self.token(id, logits),
            GenerationEvent::Text(text) if self.format == OutputFormat::Text => Ok(show(self.out, text)?),
            GenerationEvent::Text(_) => Ok(()),
        }
    }

    fn token(&mut self, token: u32, logits: &[f32]) -> Result<(), ExecError> {
        let first = !std::mem::replace(&mut self.any_token, true);
        if first {
            // From the first token on, the output itself shows progress, except with --json.
            self.console.idle();
            if self.format == OutputFormat::Json {
                self.console.working("generating tokens");
            }
        }
        if let Some(file) = &mut self.logits {
            file.push(logits)?;
        }
        if self.format == OutputFormat::Tokens {
            let comma = if first { "" } else { "," };
            show(self.out, &format!("{comma}{token}"))?;
        }
        Ok(())
    }

    fn finish(self, vocab: Option<u64>) -> Result<(), ExecError> {
        if let Some(file) = self.logits {
            file.finish(vocab.unwrap_or(0) as usize)?;
        }
        // A file or pipe gets the text alone; a terminal gets a line break for the next shell prompt.
        if self.format == OutputFormat::Tokens || (self.format == OutputFormat::Text && io::stdout().is_terminal()) {
            show(self.out, "\n")?;
        }
        Ok(())
    }
}

fn report(
    settings: &GenerateSettings,
    request: &GenerationRequest,
    generated: &Generated,
    sequence: &mut SingleSequence<OrtBackend>,
    ctx: &mut CommandContext<'_>,
) -> Result<u8, ExecError> {
    let telemetry = sequence.engine().telemetry();
    let seed = request.sampling.seed();
    if settings.run.json {
        let report = RunReport {
            prompt_tokens: request.prompt.len(),
            prompt_token_ids: &request.prompt,
            tokens: &generated.tokens,
            text: generated.text.as_deref(),
            finish_reason: generated.finish_reason,
            seed,
            timings: Timings::new(generated, &telemetry),
            bytes: Bytes::new(&telemetry, sequence.state_bytes()),
        };
        show_json(ctx.out, &report)?;
    }
    if let Some(seed) = seed {
        tracing::info!(seed, "tokens sampled");
    }
    // Begins with a line break, which ends the text in a terminal.
    ctx.console.info(&summary(generated, &telemetry, sequence.state_bytes()));
    if let Some(line) = interruption(generated) {
        ctx.console.info(&line);
    }
    if generated.finish_reason == FinishReason::Length && sequence.room() <= 1 {
        let SourceModel { context_length, positions, .. } = sequence.engine().plan().model;
        let is_most = |most: Option<u64>| most.is_some_and(|most| sequence.context() >= most);
        let hint = if is_most(context_length) {
            "the model was built for no longer context"
        } else if is_most(positions) {
            "hpp-split with a larger --context plans for more"
        } else {
            "give a larger --context"
        };
        let context = sequence.context();
        let full = match generated.usage.prompt_tokens as u64 >= context {
            true => format!("the prompt alone fills the context of {context}, so only one token follows it"),
            false => format!("prompt and answer fill the context of {context}"),
        };
        ctx.console.warn(&format!("{full}; {hint}"));
    }
    if generated.finish_reason == FinishReason::Length && request.grammar.is_some() {
        let hint = if sequence.room() > 1 { "; give a larger --max-new" } else { "" };
        ctx.console.warn(&format!("the answer ends before its JSON is complete{hint}"));
    }
    let is_said = sequence.adaptation().is_some_and(Adaptation::is_reported_slow);
    let slow_disk = slow_disk_warning(&sequence.engine().plan().predictions, generated, &telemetry);
    if let Some(warning) = slow_disk.filter(|_| !is_said) {
        ctx.console.warn(&warning);
    }
    Ok(if generated.finish_reason == FinishReason::Cancelled { INTERRUPTED } else { 0 })
}

/// The line about a generation that Ctrl-C or another signal ended.
fn interruption(generated: &Generated) -> Option<String> {
    (generated.finish_reason == FinishReason::Cancelled).then(|| match generated.tokens.len() as u64 {
        0 => "generation was interrupted before the first token".to_owned(),
        tokens => format!("generation was interrupted after {}", counted(tokens, "token")),
    })
}

/// Warns of tokens that the tokenizer does not know: the text has a gap for each.
pub fn warn_of_unknown_tokens(tokenizer: Option<&TextTokenizer>, generated: &Generated, console: &Console) {
    let unknown = tokenizer.map_or(0, |tokenizer| tokenizer.count_unknown(&generated.tokens));
    if unknown > 0 {
        let generated = counted(generated.tokens.len() as u64, "new token");
        console.warn(&format!("the tokenizer does not know {unknown} of {generated}: the text leaves them out"));
    }
}
