//! Resolves the command line into a task. Decides everything that can be decided without reading a file.

use crate::cli::{
    AutoPlanArgs, BatchArgs, DraftArg, RowBatchingArg, SamplingArgs, SeedArg, SpeculateArg, VerifyArgs, WeightReadsArg,
};
use crate::cli::{
    BenchArgs, Cli, Command, DevicesArgs, JobsArgs, LibraryArgs, PromptArgs, RunArgs, RuntimeArgs, ServeArgs,
};
use crate::console::{Console, Level};
use crate::error::ExecError;
use crate::prompt::{PromptSource, TextSource, stdin_is_piped};
use crate::runtime::OrtBackend;
use hpp_engine::{EngineOptions, Fallback, RowBatching, Verify, WeightReads};
use hpp_generate::sampling::SamplingOverrides;
use hpp_generate::speculate::{DraftLength, DraftOrigin, Drafts};
use hpp_schema::Provider;
use std::io::IsTerminal;
use std::path::PathBuf;

/// What to do.
#[derive(Debug)]
pub enum Task {
    /// Generate text after one prompt.
    Generate(GenerateSettings),
    /// Chat in the terminal.
    Chat(GenerateSettings),
    /// Run a model once on tensors.
    Infer(InferSettings),
    /// Show the library, providers and devices.
    Devices(DevicesArgs),
    /// Compare with the unsplit model.
    Verify(VerifyArgs),
    /// Measure the plan's speed.
    Bench(BenchArgs),
    /// Run many prompts together.
    Jobs(JobsArgs),
    /// Serve models over HTTP.
    Serve(ServeArgs),
    /// Answer hpp-profile's requests.
    Probe(LibraryArgs),
}

/// How to generate text.
#[derive(Debug)]
pub struct GenerateSettings {
    /// The plan.
    pub plan: PathBuf,
    /// Where the prompt comes from.
    pub prompt: PromptSource,
    /// How tokens are drafted.
    pub draft_method: DraftMethod,
    /// All other arguments.
    pub run: RunArgs,
}

impl GenerateSettings {
    /// Sets the length of drafts that the user gave, if any. Warns if no tokens are drafted.
    pub fn with_fixed_length(&self, drafts: Drafts<OrtBackend>, console: &Console) -> Drafts<OrtBackend> {
        let Some(tokens) = self.run.draft_tokens else { return drafts };
        if matches!(drafts.origin, DraftOrigin::None) {
            console.warn("--draft-tokens has no effect: no tokens are drafted; --speculate and --draft say how");
        }
        Drafts { length: DraftLength::fixed(usize::from(tokens)), ..drafts }
    }
}

/// How speculative decoding drafts tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DraftMethod {
    /// No drafting.
    None,
    /// The text itself.
    Ngram,
    /// The model or plan at this path.
    Model(PathBuf),
    /// The draft that the plan has of its own model, and what to do if it has none.
    OfPlan(WithoutDraft),
}

/// What to do if a plan has no draft of its own model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WithoutDraft {
    /// No drafting.
    Off,
    /// Draft from the text itself.
    Ngram,
    /// An error.
    Refuse,
}

impl DraftMethod {
    /// What `--speculate` and `--draft` mean.
    pub fn resolve(how: Option<SpeculateArg>, draft: Option<&DraftArg>) -> Result<Self, ExecError> {
        match (how, draft) {
            (Some(SpeculateArg::Off | SpeculateArg::Ngram), Some(_)) => Err(ExecError::Usage {
                message: "--draft is for --speculate draft".to_owned(),
                hint: "leave --draft or --speculate out".to_owned(),
            }),
            (_, Some(DraftArg::Model(path))) => Ok(DraftMethod::Model(path.clone())),
            (_, Some(DraftArg::Own(_))) | (Some(SpeculateArg::Draft), None) => {
                Ok(DraftMethod::OfPlan(WithoutDraft::Refuse))
            }
            (Some(SpeculateArg::Auto), None) => Ok(DraftMethod::OfPlan(WithoutDraft::Ngram)),
            (None, None) => Ok(DraftMethod::OfPlan(WithoutDraft::Off)),
            (Some(SpeculateArg::Ngram), None) => Ok(DraftMethod::Ngram),
            (Some(SpeculateArg::Off), None) => Ok(DraftMethod::None),
        }
    }
}

/// How to run a model once on tensors.
#[derive(Debug)]
pub struct InferSettings {
    /// The plan.
    pub plan: PathBuf,
    /// File with the input tensors by name.
    pub inputs: PathBuf,
    /// File for the output tensors by name.
    pub outputs: PathBuf,
    /// Whether to print JSON.
    pub json: bool,
    /// How to load the plan.
    pub runtime: RuntimeArgs,
}

impl Task {
    /// The task of a command line, or why its options contradict each other.
    pub fn resolve(cli: Cli) -> Result<Self, ExecError> {
        match cli.command {
            Some(Command::Devices(args)) => Ok(Task::Devices(args)),
            Some(Command::Verify(args)) => Ok(Task::Verify(args)),
            Some(Command::Bench(args)) => Ok(Task::Bench(args)),
            Some(Command::Jobs(args)) => Ok(Task::Jobs(args)),
            Some(Command::Serve(args)) => Ok(Task::Serve(args)),
            Some(Command::Probe(args)) => Ok(Task::Probe(args)),
            None => resolve_run(cli.run),
        }
    }

    /// The paths of the plans or models that the task runs, and how to load them. `None` if it runs none.
    pub fn plans(&mut self) -> Option<(Vec<&mut PathBuf>, &RuntimeArgs)> {
        match self {
            Task::Generate(settings) | Task::Chat(settings) => Some((vec![&mut settings.plan], &settings.run.runtime)),
            Task::Infer(settings) => Some((vec![&mut settings.plan], &settings.runtime)),
            Task::Verify(args) => Some((vec![&mut args.plan], &args.runtime)),
            Task::Bench(args) => Some((vec![&mut args.plan], &args.runtime)),
            Task::Jobs(args) => Some((vec![&mut args.plan], &args.runtime)),
            Task::Serve(args) => Some((args.plans.iter_mut().map(|plan| &mut plan.path).collect(), &args.runtime)),
            Task::Devices(_) | Task::Probe(_) => None,
        }
    }

    /// The path of a second model or plan that the task runs, and how to load it. It is the draft model, which options for planning the first model
    /// do not apply to; or the model of `--against`, which is compared as it was exported.
    pub fn second(&mut self) -> Option<(&mut PathBuf, RuntimeArgs)> {
        let settings = match self {
            Task::Generate(settings) | Task::Chat(settings) => settings,
            Task::Verify(args) => {
                let planning = AutoPlanArgs { int8_activations: false, ..args.runtime.planning.clone() };
                return Some((args.against.as_mut()?, RuntimeArgs { planning, ..args.runtime.clone() }));
            }
            _ => return None,
        };
        let DraftMethod::Model(path) = &mut settings.draft_method else { return None };
        let AutoPlanArgs { cache, cache_limit, .. } = settings.run.runtime.planning.clone();
        let planning = AutoPlanArgs { cache, cache_limit, ..AutoPlanArgs::default() };
        Some((path, RuntimeArgs { planning, ..settings.run.runtime.clone() }))
    }
}

fn resolve_run(mut run: RunArgs) -> Result<Task, ExecError> {
    let usage = |message: &str, hint: &str| ExecError::Usage { message: message.to_owned(), hint: hint.to_owned() };
    let plan =
        run.plan.take().ok_or_else(|| usage("no plan and no model was given", "hpp-exec MODEL --prompt TEXT"))?;
    let source = run.prompt.source();
    if let (Some(inputs), Some(outputs)) = (&run.inputs, &run.outputs) {
        if source.is_some() {
            return Err(usage("--outputs runs a model once and reads no prompt", "leave --outputs or the prompt out"));
        }
        // The file would be an archive, but numpy.load and people expect one array under this name.
        if outputs.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("npy")) {
            let message = format!("--outputs writes an archive of named arrays (.npz), not {}", outputs.display());
            return Err(usage(&message, "give it a name that ends in .npz"));
        }
        let (inputs, outputs) = (inputs.clone(), outputs.clone());
        return Ok(Task::Infer(InferSettings { plan, inputs, outputs, json: run.json, runtime: run.runtime }));
    }
    let may_chat = !run.json && run.logits.is_none() && run.inputs.is_none();
    let prompt = match source {
        Some(PromptSource::Text(TextSource::Argument(text))) if stdin_is_piped() => {
            PromptSource::Text(TextSource::StdinThenArgument(text))
        }
        Some(source) => source,
        None if !std::io::stdin().is_terminal() => PromptSource::Text(TextSource::Stdin),
        None if may_chat => PromptSource::Terminal,
        None => {
            let hint = "give --prompt TEXT, --prompt-file FILE or --tokens 1,2,3, or send the text to stdin";
            return Err(usage("there is no prompt", hint));
        }
    };
    if run.answer.system.is_some() && !run.answer.chat && run.session.is_none() && prompt != PromptSource::Terminal {
        return Err(usage("--system needs --chat", "add --chat, or write the system message into the prompt"));
    }
    if run.answer.chat && matches!(prompt, PromptSource::Tokens(_)) {
        return Err(usage("--chat needs text, not tokens", "give --prompt TEXT, or leave --chat out"));
    }
    if run.session.is_none() && run.kv.is_given() {
        let hint = "add --session NAME to keep a conversation and its KV cache, or leave the option out";
        return Err(usage(
            "--kv-dir, --kv-ram, --kv-disk, --kv-policy and --kv-page are for --session and for hpp-exec serve",
            hint,
        ));
    }
    if run.session.is_some() {
        if !may_chat || run.embeddings.is_some() || matches!(prompt, PromptSource::Tokens(_)) {
            let hint = "leave --json, --logits, --inputs, --embeddings and --tokens out";
            return Err(usage("--session keeps a conversation of text", hint));
        }
        run.answer.chat = true;
    }
    let draft = run.draft.take();
    let draft_method = DraftMethod::resolve(run.speculate, draft.as_ref())?;
    if let Some(DraftArg::Own(bits)) = draft {
        run.runtime.planning.draft_bits = Some(bits);
    }
    let settings = GenerateSettings { plan, prompt, draft_method, run };
    let is_chat = settings.prompt == PromptSource::Terminal || settings.run.session.is_some();
    Ok(if is_chat { Task::Chat(settings) } else { Task::Generate(settings) })
}

impl PromptArgs {
    /// Where the prompt comes from. `None` if no option says.
    pub fn source(&self) -> Option<PromptSource> {
        if let Some(text) = &self.prompt {
            return Some(PromptSource::Text(TextSource::Argument(text.clone())));
        }
        if let Some(file) = &self.prompt_file {
            let is_stdin = file.as_os_str() == "-";
            let source = if is_stdin { TextSource::Stdin } else { TextSource::File(file.clone()) };
            return Some(PromptSource::Text(source));
        }
        self.tokens.clone().map(PromptSource::Tokens)
    }
}

/// The warning about settings that greedy decoding does not use.
pub const UNUSED_SAMPLING: &str =
    "--top-k, --top-p, --min-p and --seed change nothing at temperature 0; give --temperature";

impl SamplingArgs {
    /// Whether an option was given that has a meaning only if tokens are drawn at random.
    pub fn asks_for_random_choices(&self) -> bool {
        self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some() || self.seed.is_some()
    }

    /// The settings that were given, for one answer: with `--seed -1` each call gives another seed.
    pub fn overrides(&self) -> SamplingOverrides {
        SamplingOverrides {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed.map(SeedArg::seed),
        }
    }
}

impl LibraryArgs {
    /// How much to print.
    pub fn level(&self) -> Level {
        if self.quiet { Level::Quiet } else { Level::Normal }
    }
}

impl RuntimeArgs {
    /// The options for loading an engine, without a cancel handle.
    pub fn engine_options(&self) -> EngineOptions {
        // If the CPU is first in the list, running there is no fallback.
        let strict = self.strict && self.providers.first() != Some(&Provider::CPU);
        EngineOptions {
            fallback: if strict { Fallback::Refuse } else { Fallback::Report },
            context: self.context,
            verify: if self.verify_weights { Verify::Full } else { Verify::Default },
            weights: self.weight_reads(),
            pinned: self.pinned.map(|size| size.0),
            slots_on_host: self.slots_on_host,
            poison_slots: self.poison_slots,
            state_dir: self.state_dir.clone(),
            ..EngineOptions::default()
        }
    }

    /// How weights on the host that the plan streams are read.
    pub fn weight_reads(&self) -> WeightReads {
        match self.weights {
            _ if self.no_prefetch => WeightReads::OnDemand,
            WeightReadsArg::Prefetch => WeightReads::Prefetch,
            WeightReadsArg::OnDemand => WeightReads::OnDemand,
            WeightReadsArg::Mapped => WeightReads::Mapped,
        }
    }
}

impl BatchArgs {
    /// The engine's option.
    pub fn engine_option(&self) -> RowBatching {
        match self.row_batching {
            RowBatchingArg::Exact => RowBatching::Exact,
            RowBatchingArg::On => RowBatching::On,
            RowBatchingArg::Off => RowBatching::Off,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn task(line: &str) -> Result<Task, ExecError> {
        Task::resolve(Cli::try_parse_from(["hpp-exec"].into_iter().chain(line.split(' '))).unwrap())
    }

    #[test]
    fn options_that_contradict_each_other_are_errors_with_a_hint() {
        for line in [
            "p --prompt x --inputs i --outputs o",
            "p --inputs i --outputs o.npy",
            "p --inputs i --outputs o.NPY",
            "p --prompt x --system s",
            "p --tokens 1 --chat",
            "p --tokens 1 --speculate ngram --draft d",
        ] {
            let error = task(line).expect_err(line);
            assert_eq!(error.code(), 1, "{line}");
            assert!(error.hint().is_some(), "{line}");
        }
    }

    #[test]
    fn arguments_select_the_task() {
        assert!(matches!(task("p --inputs i --outputs o").unwrap(), Task::Infer(_)));
        assert!(matches!(task("p --prompt x --inputs i").unwrap(), Task::Generate(_)));
        for (line, draft_method) in [
            ("p --tokens 1", DraftMethod::OfPlan(WithoutDraft::Off)),
            ("p --tokens 1 --speculate off", DraftMethod::None),
            ("p --tokens 1 --speculate ngram", DraftMethod::Ngram),
            ("p --tokens 1 --speculate auto", DraftMethod::OfPlan(WithoutDraft::Ngram)),
            ("p --tokens 1 --speculate draft", DraftMethod::OfPlan(WithoutDraft::Refuse)),
            ("p --tokens 1 --draft int4", DraftMethod::OfPlan(WithoutDraft::Refuse)),
            ("p --tokens 1 --draft d", DraftMethod::Model("d".into())),
            ("p --tokens 1 --draft ./int4", DraftMethod::Model("./int4".into())),
        ] {
            let Task::Generate(settings) = task(line).unwrap() else { panic!() };
            assert_eq!(settings.draft_method, draft_method, "{line}");
        }
        assert!(matches!(task("devices").unwrap(), Task::Devices(_)));
        let Task::Generate(g) = task("p --prompt-file -").unwrap() else { panic!() };
        assert_eq!(g.prompt, PromptSource::Text(TextSource::Stdin));
    }
}
