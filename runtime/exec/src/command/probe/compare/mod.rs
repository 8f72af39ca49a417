//! Two models, compared by their scores over the same prompts: how far the distributions are apart, how often the best token
//! changes.
//!
//! The two are loaded one after the other. The reference's scores are kept on disk for the next comparison with the same
//! prompts, so that comparing many variants runs the reference once.

mod divergence;
mod score_store;

use super::observe::{corpus::Corpus, load};
use super::{Answer, ProbeSession};
use crate::error::ExecError;
use crate::machine::OrtBackend;
use crate::plan_file::PlanFile;
use divergence::Divergence;
use hpp_engine::{Engine, EngineError, LogitRows, Logits, StepInput};
use hpp_schema::Plan;
use hpp_schema::probe::{CompareProbe, Prompt, Reply};
use score_store::ScoreStore;

/// Bytes of scores read from the engine at a time.
const PIECE: u64 = 64 << 20;

/// What one request leaves for the next.
#[derive(Default)]
pub(crate) struct Kept(Option<Reference>);

/// Scores of the model as it is.
struct Reference {
    plan: Plan,
    prompts: Vec<Prompt>,
    positions: u64,
    texts: Vec<Text>,
    scores: ScoreStore,
}

/// A prompt, as far as it can be used.
struct Text {
    line: u64,
    tokens: Result<Vec<u32>, String>,
}

/// Compares, and replies with one account of all positions.
pub(crate) fn run(
    session: &mut ProbeSession<'_>,
    probe: &CompareProbe,
    reply: &mut Answer<'_>,
) -> Result<(), ExecError> {
    let (plan, other) = (PlanFile::open(&probe.reference)?, PlanFile::open(&probe.other)?);
    super::super::needs_language_model(&plan.plan)?;
    super::super::needs_language_model(&other.plan)?;
    let mut reference = match session.compare.0.take().filter(|kept| kept.is_for(&plan.plan, probe)) {
        Some(reference) => reference,
        None => Reference::run(session, &plan, probe)?,
    };
    let divergence = reference.compare(session, &other, reply);
    session.compare.0 = Some(reference);
    let divergence = divergence?;
    if divergence.positions() == 0 {
        return Err(unusable("no prompt could be compared"));
    }
    let (kl, top1_changed) = divergence.means().ok_or_else(|| unusable("some scores are no numbers"))?;
    reply(Reply::Compared { positions: divergence.positions(), kl, top1_changed })?;
    Ok(())
}

fn unusable(why: &str) -> ExecError {
    EngineError::WrongOutput { name: "the next-token scores".into(), why: why.to_owned() }.into()
}

impl Reference {
    fn is_for(&self, plan: &Plan, probe: &CompareProbe) -> bool {
        self.plan == *plan && self.prompts == probe.prompts && self.positions == probe.positions
    }

    fn run(session: &mut ProbeSession<'_>, plan: &PlanFile, probe: &CompareProbe) -> Result<Self, ExecError> {
        let corpus = Corpus::open(plan, &probe.prompts)?;
        let mut engine = load(session, plan)?;
        let mut scores = ScoreStore::new()?;
        let mut texts = Vec::new();
        for prompt in &probe.prompts {
            let mark = scores.mark();
            let run = corpus.tokens(prompt, 0, engine.context()).map(|tokens| {
                let stored = each_row(&mut engine, &tokens, probe.positions, |row| scores.push(row));
                stored.map(|()| tokens)
            });
            let tokens = match run {
                Ok(Ok(tokens)) => Ok(tokens),
                // The disk's fault, not the prompt's.
                Ok(Err(error @ ExecError::Write(_))) => return Err(error),
                Ok(Err(error)) => {
                    scores.forget_from(mark)?;
                    Err(hpp_schema::error_line(&error))
                }
                Err(reason) => Err(reason),
            };
            texts.push(Text { line: prompt.line, tokens });
        }
        let (plan, prompts, positions) = (plan.plan.clone(), probe.prompts.clone(), probe.positions);
        Ok(Reference { plan, prompts, positions, texts, scores })
    }

    fn compare(
        &mut self,
        session: &mut ProbeSession<'_>,
        other: &PlanFile,
        reply: &mut Answer<'_>,
    ) -> Result<Divergence, ExecError> {
        let mut divergence = Divergence::default();
        let mut engine = load(session, other)?;
        let mut stored = self.scores.read()?;
        for text in &self.texts {
            match &text.tokens {
                Ok(tokens) => {
                    each_row(&mut engine, tokens, self.positions, |row| {
                        divergence.add(stored.next()?, row);
                        Ok(())
                    })?;
                    reply(Reply::Progress { line: text.line, prompt_tokens: tokens.len() as u64 })?;
                }
                Err(reason) => reply(Reply::PromptFailed { line: text.line, reason: reason.clone() })?,
            }
        }
        Ok(divergence)
    }
}

/// Calls `each` with the scores at the last `positions` tokens of a text, in order.
fn each_row(
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
    let piece = usize::try_from(PIECE / 4 / vocab).unwrap_or(usize::MAX).max(1);
    for piece in compared.chunks(piece) {
        engine.step_into(&mut sequence, StepInput::Tokens(piece), LogitRows::All, &mut logits)?;
        (0..logits.rows).try_for_each(|row| each(logits.row(row)))?;
    }
    Ok(())
}
