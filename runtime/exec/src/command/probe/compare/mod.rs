//! Compares two models by their logits over the same prompts: the divergence of the distributions, and how often the most likely token
//! changes.
//!
//! Loads one model after the other. Keeps the reference's logits on disk for the next request with the same prompts, so that the reference runs once,
//! however many variants are compared with it.

mod divergence;
mod logits_store;

pub(in crate::command) use divergence::kl;
pub(in crate::command) use logits_store::LogitsStore;

use super::observe::{corpus::CorpusEncoder, load};
use super::{ProbeSession, Replies};
use crate::error::ExecError;
use crate::runtime::OrtBackend;
use divergence::Divergence;
use hpp_engine::{Engine, EngineError, LogitRows, Logits, StepInput};
use hpp_generate::{PlanFile, check_language_model};
use hpp_schema::Plan;
use hpp_schema::probe::{CompareProbe, Prompt, Reply};

/// Bytes of logits that one step returns at most.
const STEP_BYTES: u64 = 64 << 20;

/// The reference of the last request.
#[derive(Default)]
pub(crate) struct CachedReference(Option<Reference>);

/// The logits of the reference model.
struct Reference {
    plan: Plan,
    prompts: Vec<Prompt>,
    positions: u64,
    texts: Vec<Text>,
    logits: LogitsStore,
}

/// A prompt of the corpus.
struct Text {
    line: u64,
    /// Its tokens, or why it cannot be used.
    tokens: Result<Vec<u32>, String>,
}

/// Compares and replies with the means over all positions.
pub(crate) fn run(
    session: &mut ProbeSession<'_>,
    probe: &CompareProbe,
    replies: &mut Replies<'_>,
) -> Result<(), ExecError> {
    let (plan, other) = (PlanFile::open(&probe.reference)?, PlanFile::open(&probe.other)?);
    check_language_model(&plan.plan)?;
    check_language_model(&other.plan)?;
    let mut reference = match session.compared.0.take().filter(|cached| cached.is_for(&plan.plan, probe)) {
        Some(reference) => reference,
        None => Reference::run(session, &plan, probe)?,
    };
    let divergence = reference.compare(session, &other, replies);
    session.compared.0 = Some(reference);
    let divergence = divergence?;
    if divergence.positions() == 0 {
        return Err(unusable("no prompt could be compared"));
    }
    let (kl, top1_changed) = divergence.means().ok_or_else(|| unusable("some logits are NaN"))?;
    replies(Reply::Compared { positions: divergence.positions(), kl, top1_changed })?;
    Ok(())
}

fn unusable(why: &str) -> ExecError {
    EngineError::WrongOutput { name: "the logits".into(), why: why.to_owned() }.into()
}

impl Reference {
    fn is_for(&self, plan: &Plan, probe: &CompareProbe) -> bool {
        self.plan == *plan && self.prompts == probe.prompts && self.positions == probe.positions
    }

    fn run(session: &mut ProbeSession<'_>, plan: &PlanFile, probe: &CompareProbe) -> Result<Self, ExecError> {
        let corpus = CorpusEncoder::open(plan, &probe.prompts)?;
        let mut engine = load(session, plan)?;
        let mut logits = LogitsStore::new()?;
        let mut texts = Vec::new();
        for prompt in &probe.prompts {
            let mark = logits.len();
            let run = corpus.tokens(prompt, 0, engine.context()).map(|tokens| {
                let stored = each_row(&mut engine, &tokens, probe.positions, |row| logits.push(row));
                stored.map(|()| tokens)
            });
            let tokens = match run {
                Ok(Ok(tokens)) => Ok(tokens),
                // A full disk ends the request; other errors concern this prompt only.
                Ok(Err(error @ ExecError::Write(_))) => return Err(error),
                Ok(Err(error)) => {
                    logits.truncate(mark)?;
                    Err(hpp_schema::error_line(&error))
                }
                Err(reason) => Err(reason),
            };
            texts.push(Text { line: prompt.line, tokens });
        }
        let (plan, prompts, positions) = (plan.plan.clone(), probe.prompts.clone(), probe.positions);
        Ok(Reference { plan, prompts, positions, texts, logits })
    }

    fn compare(
        &mut self,
        session: &mut ProbeSession<'_>,
        other: &PlanFile,
        replies: &mut Replies<'_>,
    ) -> Result<Divergence, ExecError> {
        let mut divergence = Divergence::default();
        let mut engine = load(session, other)?;
        let mut stored = self.logits.read()?;
        for text in &self.texts {
            match &text.tokens {
                Ok(tokens) => {
                    each_row(&mut engine, tokens, self.positions, |row| {
                        divergence.add(stored.next()?, row);
                        Ok(())
                    })?;
                    replies(Reply::Progress { line: text.line, prompt_tokens: tokens.len() as u64 })?;
                }
                Err(reason) => replies(Reply::PromptFailed { line: text.line, reason: reason.clone() })?,
            }
        }
        Ok(divergence)
    }
}

/// Calls `each` with the logits after each of the last `positions` tokens of a text, in order.
pub(in crate::command) fn each_row(
    engine: &mut Engine<OrtBackend>,
    tokens: &[u32],
    positions: u64,
    mut each: impl FnMut(&[f32]) -> Result<(), ExecError>,
) -> Result<(), ExecError> {
    let mut sequence = engine.new_sequence()?;
    let mut logits = Logits::default();
    let compared = usize::try_from(positions).unwrap_or(usize::MAX).min(tokens.len());
    let (before, compared) = tokens.split_at(tokens.len() - compared);
    if !before.is_empty() {
        engine.step_into(&mut sequence, StepInput::Tokens(before), LogitRows::Last, &mut logits)?;
    }
    let vocab = engine.plan().model.vocab_size.unwrap_or(1 << 17).max(1);
    let rows = usize::try_from(STEP_BYTES / 4 / vocab).unwrap_or(usize::MAX).max(1);
    for chunk in compared.chunks(rows) {
        engine.step_into(&mut sequence, StepInput::Tokens(chunk), LogitRows::All, &mut logits)?;
        (0..logits.rows).try_for_each(|row| each(logits.row(row)))?;
    }
    Ok(())
}
