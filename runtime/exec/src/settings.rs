//! From what was typed to what will be done: every choice that needs no file is made here, once.

use crate::cli::{BenchArgs, Cli, Command, DevicesArgs, LibraryArgs, PromptArgs, ProviderArg, RunArgs, RuntimeArgs};
use crate::cli::{SamplingArgs, VerifyArgs, WeightReadsArg};
use crate::console::Level;
use crate::error::ExecError;
use crate::prompt::stdin_is_piped;
use crate::sampling::{Choice, RandomChoice, Sampling};
use hpp_engine::{EngineOptions, Fallback, Verify, WeightReads};
use hpp_schema::{Provider, SamplingDefaults};
use std::io::IsTerminal;
use std::path::PathBuf;

/// What to do.
#[derive(Debug)]
pub enum Task {
    /// Continue a prompt.
    Generate(GenerateSettings),
    /// Talk.
    Chat(GenerateSettings),
    /// One run from tensors to tensors.
    RunOnce(RunOnceSettings),
    /// Show what is here.
    Devices(DevicesArgs),
    /// Compare with the unsplit model.
    Verify(VerifyArgs),
    /// Measure.
    Bench(BenchArgs),
    /// Answer requests to measure.
    Probe(LibraryArgs),
}

/// Where the text to continue comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptSource {
    /// The command line.
    Text(String),
    /// A file.
    File(PathBuf),
    /// Standard input.
    Stdin,
    /// Text piped to standard input, then this from the command line.
    StdinAnd(String),
    /// Token ids, from the command line.
    Tokens(Vec<u32>),
    /// A conversation in the terminal.
    Terminal,
}

/// How to continue a prompt.
#[derive(Debug)]
pub struct GenerateSettings {
    /// The plan.
    pub plan: PathBuf,
    /// What to continue.
    pub prompt: PromptSource,
    /// The rest, as typed.
    pub run: RunArgs,
}

/// How to run once.
#[derive(Debug)]
pub struct RunOnceSettings {
    /// The plan.
    pub plan: PathBuf,
    /// NamedTensors tensors in.
    pub inputs: PathBuf,
    /// NamedTensors tensors out.
    pub outputs: PathBuf,
    /// Whether to print JSON.
    pub json: bool,
    /// How to load.
    pub runtime: RuntimeArgs,
}

impl Task {
    /// Reads the task out of the command line.
    pub fn resolve(cli: Cli) -> Result<Self, ExecError> {
        match cli.command {
            Some(Command::Devices(args)) => Ok(Task::Devices(args)),
            Some(Command::Verify(args)) => Ok(Task::Verify(args)),
            Some(Command::Bench(args)) => Ok(Task::Bench(args)),
            Some(Command::Probe(args)) => Ok(Task::Probe(args)),
            None => resolve_run(cli.run),
        }
    }

    /// What the task runs, and how it is loaded; `None` where it runs no plan.
    pub fn plan(&mut self) -> Option<(&mut PathBuf, &RuntimeArgs)> {
        match self {
            Task::Generate(settings) | Task::Chat(settings) => Some((&mut settings.plan, &settings.run.runtime)),
            Task::RunOnce(settings) => Some((&mut settings.plan, &settings.runtime)),
            Task::Verify(args) => Some((&mut args.plan, &args.runtime)),
            Task::Bench(args) => Some((&mut args.plan, &args.runtime)),
            Task::Devices(_) | Task::Probe(_) => None,
        }
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
        let (inputs, outputs) = (inputs.clone(), outputs.clone());
        return Ok(Task::RunOnce(RunOnceSettings { plan, inputs, outputs, json: run.json, runtime: run.runtime }));
    }
    let talks = !run.json && run.logits.is_none() && run.inputs.is_none();
    let prompt = match source {
        Some(PromptSource::Text(text)) if stdin_is_piped() => PromptSource::StdinAnd(text),
        Some(source) => source,
        None if !std::io::stdin().is_terminal() => PromptSource::Stdin,
        None if talks => PromptSource::Terminal,
        None => {
            let hint = "give --prompt TEXT, --prompt-file FILE or --tokens 1,2,3, or send the text to stdin";
            return Err(usage("there is no prompt", hint));
        }
    };
    if run.system.is_some() && !run.chat && prompt != PromptSource::Terminal {
        return Err(usage("--system needs --chat", "add --chat, or write the system message into the prompt"));
    }
    if run.chat && matches!(prompt, PromptSource::Tokens(_)) {
        return Err(usage("--chat needs text, not tokens", "give --prompt TEXT, or leave --chat out"));
    }
    let settings = GenerateSettings { plan, prompt, run };
    Ok(if settings.prompt == PromptSource::Terminal { Task::Chat(settings) } else { Task::Generate(settings) })
}

impl PromptArgs {
    /// Where the prompt comes from, if that was said.
    pub fn source(&self) -> Option<PromptSource> {
        if let Some(text) = &self.prompt {
            return Some(PromptSource::Text(text.clone()));
        }
        if let Some(file) = &self.prompt_file {
            let stdin = file.as_os_str() == "-";
            return Some(if stdin { PromptSource::Stdin } else { PromptSource::File(file.clone()) });
        }
        self.tokens.clone().map(PromptSource::Tokens)
    }
}

impl SamplingArgs {
    /// Completes what was typed with what the model's authors recommend.
    ///
    /// Without a word about chance from either, the choice is greedy: the authors must say `do_sample`, as
    /// Hugging Face's defaults have it, or the person must ask for something only chance can give.
    pub fn resolve(&self, authors: &SamplingDefaults, fresh_seed: impl FnOnce() -> u64) -> Sampling {
        let asked = [self.top_p, self.min_p].iter().any(Option::is_some) || self.top_k.is_some() || self.seed.is_some();
        let by_chance = match self.temperature {
            Some(temperature) => temperature > 0.0,
            None => authors.temperature != Some(0.0) && (asked || authors.do_sample == Some(true)),
        };
        let repetition_penalty =
            self.repetition_penalty.or(authors.repetition_penalty.filter(|p| *p > 0.0)).unwrap_or(1.0);
        if !by_chance {
            return Sampling { choice: Choice::Greedy, repetition_penalty };
        }
        let choice = RandomChoice {
            temperature: self.temperature.or(authors.temperature.filter(|t| *t > 0.0)).unwrap_or(1.0),
            top_k: self.top_k.or(authors.top_k.map(|k| k as usize)).unwrap_or(0),
            top_p: self.top_p.or(authors.top_p).unwrap_or(1.0),
            min_p: self.min_p.or(authors.min_p).unwrap_or(0.0),
            seed: self.seed.unwrap_or_else(fresh_seed),
        };
        Sampling { choice: Choice::Random(choice), repetition_penalty }
    }
}

impl LibraryArgs {
    /// How much to say.
    pub fn level(&self) -> Level {
        match (self.quiet, self.verbose) {
            (true, _) => Level::Quiet,
            (false, 0) => Level::Normal,
            (false, _) => Level::Detailed,
        }
    }
}

impl RuntimeArgs {
    /// How the engine loads.
    pub fn engine_options(&self) -> EngineOptions {
        // Whoever puts the CPU first does not fall back by running there.
        let strict = self.strict && self.providers.first() != Some(&ProviderArg::Cpu);
        EngineOptions {
            fallback: if strict { Fallback::Refuse } else { Fallback::Report },
            context: self.context,
            verify: if self.verify_weights { Verify::Full } else { Verify::Default },
            weights: match self.weights {
                _ if self.no_prefetch => WeightReads::OnDemand,
                WeightReadsArg::Ahead => WeightReads::Prefetch,
                WeightReadsArg::OnTime => WeightReads::OnDemand,
                WeightReadsArg::Mapped => WeightReads::Mapped,
            },
            pinned: self.pinned.map(|size| size.0),
            slots_on_host: self.slots_on_host,
            poison_slots: self.poison_slots,
            // Whoever loads has the handle.
            cancel: None,
        }
    }

    /// Providers to put in place of the plan's.
    pub fn providers(&self) -> Vec<Provider> {
        self.providers.iter().map(|p| (*p).into()).collect()
    }
}

impl From<ProviderArg> for Provider {
    fn from(arg: ProviderArg) -> Self {
        match arg {
            ProviderArg::Cuda => Provider::Cuda,
            ProviderArg::Webgpu => Provider::Webgpu,
            ProviderArg::Cpu => Provider::Cpu,
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
    fn options_that_do_not_fit_together_are_errors_with_a_hint() {
        for line in ["p --prompt x --inputs i --outputs o", "p --prompt x --system s", "p --tokens 1 --chat"] {
            let error = task(line).expect_err(line);
            assert_eq!(error.code(), 1, "{line}");
            assert!(error.hint().is_some(), "{line}");
        }
    }

    #[test]
    fn tasks_are_told_apart() {
        assert!(matches!(task("p --inputs i --outputs o").unwrap(), Task::RunOnce(_)));
        assert!(matches!(task("p --prompt x --inputs i").unwrap(), Task::Generate(_)));
        assert!(matches!(task("devices").unwrap(), Task::Devices(_)));
        let Task::Generate(g) = task("p --prompt-file -").unwrap() else { panic!() };
        assert_eq!(g.prompt, PromptSource::Stdin);
    }

    fn authors(do_sample: Option<bool>) -> SamplingDefaults {
        SamplingDefaults {
            do_sample,
            temperature: Some(0.6),
            top_k: Some(50),
            top_p: Some(0.9),
            min_p: None,
            repetition_penalty: Some(1.1),
        }
    }

    #[test]
    fn greedy_unless_someone_asks_for_chance() {
        let nothing = SamplingArgs::default();
        assert_eq!(nothing.resolve(&SamplingDefaults::default(), || 1).choice, Choice::Greedy);
        assert_eq!(nothing.resolve(&authors(Some(false)), || 1).choice, Choice::Greedy);
        assert_eq!(nothing.resolve(&authors(None), || 1).choice, Choice::Greedy);
        assert!(matches!(nothing.resolve(&authors(Some(true)), || 1).choice, Choice::Random(_)));
        let zero = SamplingArgs { temperature: Some(0.0), top_p: Some(0.5), ..Default::default() };
        assert_eq!(zero.resolve(&authors(Some(true)), || 1).choice, Choice::Greedy);
    }

    #[test]
    fn what_was_typed_wins_and_the_rest_is_the_authors() {
        let typed = SamplingArgs { top_p: Some(0.5), seed: Some(9), ..Default::default() };
        let sampling = typed.resolve(&authors(None), || 1);
        let want = RandomChoice { temperature: 0.6, top_k: 50, top_p: 0.5, min_p: 0.0, seed: 9 };
        assert_eq!(sampling, Sampling { choice: Choice::Random(want), repetition_penalty: 1.1 });
    }
}
