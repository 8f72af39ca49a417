//! Runs the prompts of a corpus through the instrumented model, a few at a time, and merges their statistics.

use super::ProfilingRun;
use crate::corpus::{Corpus, MOST_NAMED};
use crate::error::ProfileError;
use crate::taps::{self, Tapped, Wanted};
use hpp_schema::probe::{ObserveProbe, Prompt, PromptContent, Reply, Request};
use hpp_schema::{CorpusStatistics, Statistics};

/// Most prompts in one request, and most bytes of their text: a failed request loses at most these.
const MOST_PROMPTS: usize = 8;
const MOST_BYTES: usize = 64 << 10;
/// Expected seconds of a prompt.
const SECONDS: f64 = 1.0;
/// The corpus is abandoned if this many first prompts all fail.
const MOST_FIRST_FAILURES: u64 = 3;

/// A corpus to run.
pub struct CorpusRun<'a> {
    /// The prompts.
    pub corpus: &'a Corpus,
    /// BLAKE3 of its file.
    pub hash: String,
    /// Whether the number of prompts was limited although the user did not ask for it.
    pub is_cut: bool,
    /// What to observe.
    pub wanted: Wanted,
}

impl CorpusRun<'_> {
    /// Expected seconds of the remaining prompts.
    pub fn seconds(&self, before: Option<&CorpusStatistics>) -> f64 {
        let done = before.map_or(0, |corpus| corpus.prompts_done);
        self.corpus.prompts.saturating_sub(done) as f64 * SECONDS
    }

    fn no_statistics(&self) -> CorpusStatistics {
        CorpusStatistics {
            hash: self.hash.clone(),
            prompts_hash: Some(self.corpus.prompts_hash.clone()),
            prompts_done: 0,
            prompts_in_all: Some(self.corpus.prompts),
            skipped: self.corpus.reasons.clone(),
            skipped_in_all: self.corpus.bad,
            statistics: Statistics::default(),
        }
    }
}

impl ProfilingRun<'_> {
    /// Runs the remaining prompts.
    pub fn corpus(&mut self, run: &CorpusRun) -> Result<(), ProfileError> {
        let begun = self.profile.corpus.get_or_insert_with(|| run.no_statistics());
        let (done, in_all) = (begun.prompts_done, begun.prompts_in_all);
        begun.prompts_in_all = Some(run.corpus.prompts.max(done));
        if run.corpus.prompts >= done {
            begun.prompts_hash = Some(run.corpus.prompts_hash.clone());
        } else if in_all != Some(done) {
            // The recorded hash covers more prompts than run now.
            begun.prompts_hash = None;
        }
        if done >= run.corpus.prompts {
            return Ok(());
        }
        if run.is_cut && run.corpus.has_more {
            let first = run.corpus.prompts;
            self.progress.warn(&format!("only the first {first} prompts of the corpus run: --max-prompts runs more"));
        }
        self.progress.begin("instrumenting the model");
        let dir = self.stage_dir()?;
        let tapped = taps::write(self.analysis, run.wanted, dir.path())?;
        tapped.not_observed.iter().for_each(|what| self.note(what.clone()));
        let mut prompts = run.corpus.prompts_after(done)?.peekable();
        while prompts.peek().is_some() {
            let mut batch = Vec::new();
            let mut bytes = 0;
            while let Some(prompt) = prompts.next_if(|_| batch.len() < MOST_PROMPTS && bytes < MOST_BYTES) {
                let prompt = prompt?;
                bytes += length(&prompt.content);
                batch.push(prompt);
            }
            if !self.batch(&tapped, batch)? {
                break;
            }
        }
        self.prober.restart();
        Ok(())
    }

    /// Runs a batch of prompts. If it fails, runs each prompt alone, so that one prompt cannot fail the others. False if the corpus is abandoned.
    fn batch(&mut self, tapped: &Tapped, batch: Vec<Prompt>) -> Result<bool, ProfileError> {
        match self.observe(tapped, &batch)? {
            Ok(()) => self.taken(batch.len() as u64)?,
            Err(why) if batch.len() == 1 => return self.prompt_failed(&batch[0], &why),
            Err(_) => {
                for prompt in batch {
                    if !self.batch(tapped, vec![prompt])? {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }

    /// Counts prompts as done, whether they ran or could not be used.
    fn taken(&mut self, prompts: u64) -> Result<(), ProfileError> {
        if let Some(corpus) = &mut self.profile.corpus {
            corpus.prompts_done += prompts;
        }
        self.save()?;
        self.progress.end(SECONDS * prompts as f64);
        Ok(())
    }

    /// Skips a prompt whose own request failed. False if the corpus is abandoned.
    fn prompt_failed(&mut self, prompt: &Prompt, why: &str) -> Result<bool, ProfileError> {
        self.skip(prompt.line, why);
        self.taken(1)?;
        let nothing_ran = self
            .profile
            .corpus
            .as_ref()
            .is_some_and(|corpus| corpus.statistics.prompts == 0 && corpus.prompts_done >= MOST_FIRST_FAILURES);
        if nothing_ran {
            self.note(format!(
                "the corpus was abandoned after {MOST_FIRST_FAILURES} prompts, none of which ran: {why}"
            ));
        }
        Ok(!nothing_ran)
    }

    fn skip(&mut self, line: u64, why: &str) {
        let reason = format!("line {line}: {why}");
        self.progress.warn(&format!("prompt left out, {reason}"));
        if let Some(corpus) = &mut self.profile.corpus {
            corpus.skipped_in_all += 1;
            if corpus.skipped.len() < MOST_NAMED {
                corpus.skipped.push(reason);
            }
        }
    }

    /// Observes prompts, or returns the reason why they could not be observed.
    fn observe(&mut self, tapped: &Tapped, prompts: &[Prompt]) -> Result<Result<(), String>, ProfileError> {
        let request = Request::Observe(ObserveProbe {
            plan: tapped.plan.clone(),
            prompts: prompts.to_vec(),
            decode_tokens: self.profile.settings.decode_tokens,
            taps: tapped.taps.clone(),
        });
        let mut shown = None;
        let mut unusable = Vec::new();
        let failure = self.request(&request, |measure, reply| {
            match reply {
                Reply::Progress { line, prompt_tokens } => {
                    measure.progress.begin(&format!("corpus line {line}, {prompt_tokens} tokens"));
                }
                Reply::PromptFailed { line, reason } => unusable.push((line, reason)),
                Reply::Observed { statistics } => shown = Some(statistics),
                _ => {}
            }
            Ok(())
        })?;
        if let Some(why) = failure {
            return Ok(Err(why));
        }
        let Some(shown) = shown else { return Ok(Err("hpp-exec sent no statistics".into())) };
        unusable.iter().for_each(|(line, why)| self.skip(*line, why));
        if let Some(corpus) = &mut self.profile.corpus {
            corpus.statistics.merge(&shown)?;
        }
        Ok(Ok(()))
    }
}

fn length(content: &PromptContent) -> usize {
    match content {
        PromptContent::Text(text) => text.len(),
        PromptContent::Messages(messages) => messages.iter().map(|message| message.content.len()).sum(),
        PromptContent::Tokens(tokens) => tokens.len() * 4,
    }
}
