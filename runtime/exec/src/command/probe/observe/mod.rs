//! Prompts through a model with taps: what passes its boundaries, which experts and neurons work, how attention spreads.
//!
//! A text goes in as in generation, through the cache: the prompt in passes small enough that what the taps leave stays
//! small beside the model, then tokens chosen greedily, one by one.

mod budget;
mod caches;
pub(super) mod corpus;
mod experts;
mod hidden;
mod layers;
mod rows;
mod watch;

use super::{Answer, ProbeSession};
use crate::cli::RuntimeArgs;
use crate::console::{Console, Level};
use crate::error::ExecError;
use crate::machine::OrtBackend;
use crate::plan_file::PlanFile;
use crate::sampling::greedy;
use corpus::Corpus;
use hpp_engine::{Engine, EngineError, LogitRows, Logits, StepInput};
use hpp_schema::probe::{ObserveProbe, Reply, Tap};
use hpp_schema::{Plan, Statistics};
use watch::Watch;

/// What one request leaves for the next: the model, loaded.
#[derive(Default)]
pub(crate) struct Kept(Option<Engine<OrtBackend>>);

/// Runs the prompts and replies with what they showed. A prompt that cannot be used or run shows nothing.
pub(crate) fn run(
    session: &mut ProbeSession<'_>,
    probe: &ObserveProbe,
    reply: &mut Answer<'_>,
) -> Result<(), ExecError> {
    let plan = PlanFile::open(&probe.plan)?;
    super::super::needs_language_model(&plan.plan)?;
    let corpus = Corpus::open(&plan, &probe.prompts)?;
    let mut engine = match session.observe.0.take().filter(|engine| *engine.plan() == plan.plan) {
        Some(engine) => engine,
        None => load(session, &plan)?,
    };
    engine.set_taps(probe.taps.iter().map(|tap| tap.name.as_str()))?;
    let mut all = Statistics::default();
    for prompt in &probe.prompts {
        let run = corpus.tokens(prompt, probe.decode_tokens, engine.context()).and_then(|tokens| {
            let shown = observe(&mut engine, &tokens, probe.decode_tokens, &probe.taps);
            shown.map_err(|error| hpp_schema::error_line(&error))
        });
        let counted = run.and_then(|shown| {
            all.merge(&shown).map_err(|error| error.to_string())?;
            Ok(shown.prompt_tokens)
        });
        reply(match counted {
            Ok(prompt_tokens) => Reply::Progress { line: prompt.line, prompt_tokens },
            Err(reason) => Reply::PromptFailed { line: prompt.line, reason },
        })?;
    }
    session.observe.0 = Some(engine);
    reply(Reply::Observed { statistics: all })?;
    Ok(())
}

/// Loads a plan quietly: that nobody in it reads the taps is the point of it.
pub(super) fn load(session: &mut ProbeSession<'_>, plan: &PlanFile) -> Result<Engine<OrtBackend>, ExecError> {
    // One model at a time.
    session.observe.0 = None;
    let args = RuntimeArgs { library: session.library.clone(), ..RuntimeArgs::default() };
    session.machine.load(&plan.plan, &plan.dir, &args, &Console::new(Level::Quiet))
}

/// Runs one text: the prompt, and up to `more` tokens after it.
fn observe(
    engine: &mut Engine<OrtBackend>,
    prompt: &[u32],
    more: u64,
    taps: &[Tap],
) -> Result<Statistics, EngineError> {
    let mut watch = Watch::new(taps, &blocks(engine.plan()));
    let mut sequence = engine.new_sequence()?;
    let mut logits = Logits::default();
    let mut feed = |engine: &mut Engine<OrtBackend>, tokens: &[u32], logits: &mut Logits| {
        engine.step_into(&mut sequence, StepInput::Tokens(tokens), LogitRows::Last, logits)?;
        watch.pass(engine.taps(), tokens.len())
    };
    // A model that keeps no state computes everything before a piece again.
    let piece = match engine.recomputes() {
        true => prompt.len(),
        false => budget::tokens_per_pass(engine.plan(), taps, prompt.len() as u64 + more) as usize,
    };
    for piece in prompt.chunks(piece) {
        feed(engine, piece, &mut logits)?;
    }
    let ends = engine.plan().generation.as_ref().map(|g| g.eos_token_ids.clone()).unwrap_or_default();
    let mut generated = 0;
    while generated < more {
        let Some(token) = greedy(logits.last()).filter(|token| !ends.contains(token)) else { break };
        feed(engine, &[token], &mut logits)?;
        generated += 1;
    }
    let shown = watch.statistics();
    Ok(Statistics { prompt_tokens: prompt.len() as u64, generated_tokens: generated, ..shown })
}

/// Labels of the model's blocks, in execution order.
fn blocks(plan: &Plan) -> Vec<String> {
    plan.partitions.iter().flat_map(|partition| partition.blocks.iter().cloned()).collect()
}
