//! Runs prompts through a model with taps and collects statistics: hidden states at block boundaries, experts, ReLU neurons, entropy of
//! attention.
//!
//! Each text uses the KV cache as in generation: first the prompt, in passes whose tapped tensors are small compared with
//! the model, then greedily chosen tokens one by one.

mod budget;
mod cache_hits;
mod collector;
pub(super) mod corpus;
mod experts;
mod hidden;
mod layers;
mod rows;
pub(super) mod second_moments;

use super::{ProbeSession, Replies};
use crate::cli::RuntimeArgs;
use crate::console::{Console, Level};
use crate::error::ExecError;
use crate::runtime::OrtBackend;
use collector::Collector;
use corpus::CorpusEncoder;
use hpp_engine::{Engine, EngineError, LogitRows, Logits, StepInput};
use hpp_generate::sampling::greedy;
use hpp_generate::{PlanFile, check_language_model};
use hpp_schema::probe::{ObserveProbe, Reply, Tap};
use hpp_schema::{Plan, Statistics};

/// The model of the last request, kept loaded for the next.
#[derive(Default)]
pub(crate) struct LoadedModel(Option<Engine<OrtBackend>>);

/// Runs the prompts and replies with the statistics. A prompt that fails contributes nothing.
pub(crate) fn run(
    session: &mut ProbeSession<'_>,
    probe: &ObserveProbe,
    replies: &mut Replies<'_>,
) -> Result<(), ExecError> {
    let plan = PlanFile::open(&probe.plan)?;
    check_language_model(&plan.plan)?;
    let corpus = CorpusEncoder::open(&plan, &probe.prompts)?;
    let mut engine = match session.observed.0.take().filter(|engine| *engine.plan() == plan.plan) {
        Some(engine) => engine,
        None => load(session, &plan)?,
    };
    engine.set_taps(probe.taps.iter().map(|tap| tap.name.as_str()))?;
    let mut all = Statistics::default();
    for prompt in &probe.prompts {
        let run = corpus.tokens(prompt, probe.decode_tokens, engine.context()).and_then(|tokens| {
            let statistics = observe(&mut engine, &tokens, probe.decode_tokens, &probe.taps);
            statistics.map_err(|error| hpp_schema::error_line(&error))
        });
        let merged = run.and_then(|statistics| {
            all.merge(&statistics).map_err(|error| error.to_string())?;
            Ok(statistics.prompt_tokens)
        });
        replies(match merged {
            Ok(prompt_tokens) => Reply::Progress { line: prompt.line, prompt_tokens },
            Err(reason) => Reply::PromptFailed { line: prompt.line, reason },
        })?;
    }
    session.observed.0 = Some(engine);
    replies(Reply::Observed { statistics: all })?;
    Ok(())
}

/// Loads a plan without messages, because loading warns of outputs that no partition reads, which here are the taps.
pub(super) fn load(session: &mut ProbeSession<'_>, plan: &PlanFile) -> Result<Engine<OrtBackend>, ExecError> {
    // Only one model is loaded at a time.
    session.observed.0 = None;
    let args = RuntimeArgs { library: session.library.clone(), ..RuntimeArgs::default() };
    session.runtime.load(&plan.plan, &plan.dir, &args, &Console::new(Level::Quiet))
}

/// Runs one text: the prompt and up to `new_tokens` tokens after it.
fn observe(
    engine: &mut Engine<OrtBackend>,
    prompt: &[u32],
    new_tokens: u64,
    taps: &[Tap],
) -> Result<Statistics, EngineError> {
    let mut collector = Collector::new(taps, &blocks(engine.plan()));
    let mut sequence = engine.new_sequence()?;
    let mut logits = Logits::default();
    let mut feed = |engine: &mut Engine<OrtBackend>, tokens: &[u32], logits: &mut Logits| {
        engine.step_into(&mut sequence, StepInput::Tokens(tokens), LogitRows::Last, logits)?;
        collector.add_pass(engine.taps(), tokens.len())
    };
    // A model without state would recompute the text before each chunk.
    let chunk = match engine.recomputes() {
        true => prompt.len(),
        false => budget::tokens_per_pass(engine.plan(), taps, prompt.len() as u64 + new_tokens) as usize,
    };
    for tokens in prompt.chunks(chunk) {
        feed(engine, tokens, &mut logits)?;
    }
    let eos = engine.plan().generation.as_ref().map(|g| g.eos_token_ids.clone()).unwrap_or_default();
    let mut generated = 0;
    while generated < new_tokens {
        let Some(token) = greedy(logits.last()).ok().filter(|token| !eos.contains(token)) else { break };
        feed(engine, &[token], &mut logits)?;
        generated += 1;
    }
    let statistics = collector.statistics();
    Ok(Statistics { prompt_tokens: prompt.len() as u64, generated_tokens: generated, ..statistics })
}

/// Labels of the model's blocks, in execution order.
fn blocks(plan: &Plan) -> Vec<String> {
    plan.partitions.iter().flat_map(|partition| partition.blocks.iter().cloned()).collect()
}
