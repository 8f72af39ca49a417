//! The thread of an engine: loads the plan, then takes jobs in order of arrival and answers through their channels.
//!
//! Knows no Python. The thread ends once the sender of its jobs is dropped.

use crate::failure::Failure;
use crate::job::{Answer, Event, GenerateWork, Job, JobHandle, Reuse, Work};
use crate::load::{LoadSettings, Loaded, load};
use crate::warnings::Warnings;
use hpp_backend::OrtBackend;
use hpp_engine::{CancelHandle, EngineError, LogitRows, Logits};
use hpp_generate::speculate::{NgramDrafter, Speculation, SuccessorTable};
use hpp_generate::text::TextTokenizer;
use hpp_generate::{
    Generation, GenerationEvent, Input, PlanFile, SingleSequence, check_prompt, chunk_length, generate, prompt_chunk,
};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// What the thread needs beside the plan.
pub struct ThreadSettings {
    /// How to load the plan.
    pub load: LoadSettings,
    /// Turns tokens into text.
    pub tokenizer: Option<TextTokenizer>,
    /// Whether to draft with n-grams: the tokens that followed the last occurrence of the text's last tokens.
    pub ngram_drafts: bool,
    /// Cancels a load or a pass.
    pub cancel: CancelHandle,
    /// Takes warnings.
    pub warnings: Arc<Warnings>,
}

/// A thread that loads an engine or runs it.
pub struct EngineThread {
    /// Takes jobs.
    pub jobs: Sender<Job>,
    /// Receives one message: the plan is loaded, or why not.
    pub loaded: Receiver<Result<Loaded, Failure>>,
    /// The thread.
    pub thread: JoinHandle<()>,
}

/// Starts the thread.
pub fn start(plan: Arc<PlanFile>, settings: ThreadSettings) -> Result<EngineThread, Failure> {
    let (jobs, inbox) = channel();
    let (sender, loaded) = channel();
    let run = move || {
        let ThreadSettings { load: how, tokenizer, ngram_drafts, cancel, warnings } = settings;
        match load(&plan, how, cancel, &warnings) {
            Ok((sequence, known)) => {
                let _ = sender.send(Ok(known));
                let successors = ngram_drafts.then(Rc::default);
                let runner = Runner { sequence, tokenizer, successors };
                runner.run(&inbox);
            }
            Err(failure) => drop(sender.send(Err(failure))),
        }
    };
    let thread = std::thread::Builder::new().name("hpp-engine".to_owned()).spawn(run);
    let thread = thread.map_err(|error| Failure::new(&error, Some("end other programs or threads")))?;
    Ok(EngineThread { jobs, loaded, thread })
}

struct Runner {
    sequence: SingleSequence<OrtBackend>,
    tokenizer: Option<TextTokenizer>,
    /// The n-gram table learned from all texts; `None` without n-gram drafts.
    successors: Option<Rc<RefCell<SuccessorTable>>>,
}

impl Runner {
    fn run(mut self, inbox: &Receiver<Job>) {
        for Job { work, handle } in inbox {
            match work {
                Work::Generate(work) => {
                    let events = work.events.clone();
                    let ended = handle.run(|| self.generate(*work, &handle));
                    // The caller may have stopped listening.
                    let _ = events.send(Event::Ended(ended.map(Box::new)));
                }
                Work::Logits { tokens, only_last, answer } => {
                    let _ = answer.send(handle.run(|| self.logits(&tokens, only_last, &handle)));
                }
            }
        }
    }

    fn generate(&mut self, work: GenerateWork, handle: &JobHandle) -> Result<Answer, Failure> {
        let GenerateWork { request, reuse, keep_logits, events } = work;
        let held = self.sequence.tokens();
        let is_kept = match reuse {
            Reuse::Continuation => request.prompt.len() > held.len() && request.prompt.starts_with(held),
            Reuse::Prefix => true,
            Reuse::Nothing => false,
        };
        if !is_kept {
            self.sequence.clear();
        }
        let seed = request.sampling.seed();
        let chunk = prompt_chunk(self.sequence.engine());
        let mut generation = Generation::new(request, self.tokenizer.clone(), chunk);
        if let Some(successors) = &self.successors {
            let drafter = NgramDrafter::new(Rc::clone(successors));
            generation = generation.speculate(Speculation::new(Box::new(drafter)));
        }
        let mut logits = keep_logits.then(Logits::default);
        let on_event = &mut |event: GenerationEvent<'_>| {
            match event {
                GenerationEvent::Text(text) => drop(events.send(Event::Text(text.to_owned()))),
                GenerationEvent::Token { logits: row, .. } => {
                    if let Some(rows) = &mut logits {
                        append(rows, 1, row.len(), row);
                    }
                }
                GenerationEvent::Prompt { .. } | GenerationEvent::PromptToken { .. } => {}
            }
            Ok::<(), Failure>(())
        };
        let generated = generate(&mut self.sequence, generation, &|| handle.is_cancelled(), on_event);
        let generated = generated.inspect_err(|_| self.sequence.clear())?;
        Ok(Answer { generated, seed, logits })
    }

    /// The logits of `tokens` as a new text, computed in chunks like a prompt. Drops the text that the sequence held.
    fn logits(&mut self, tokens: &[u32], only_last: bool, handle: &JobHandle) -> Result<Logits, Failure> {
        check_prompt(tokens, self.sequence.context())?;
        self.sequence.clear();
        let chunk = prompt_chunk(self.sequence.engine());
        let mut logits = Logits::default();
        let mut rest = tokens;
        while !rest.is_empty() {
            if handle.is_cancelled() {
                return Err(EngineError::Cancelled.into());
            }
            let (now, later) = rest.split_at(chunk_length(rest.len(), chunk));
            let rows = if only_last { LogitRows::Last } else { LogitRows::All };
            self.sequence.feed_input(Input { tokens: now, rows }).inspect_err(|_| self.sequence.clear())?;
            let fed = self.sequence.logit_rows();
            match only_last {
                true if later.is_empty() => append(&mut logits, 1, fed.vocab, fed.last()),
                true => {}
                false => append(&mut logits, fed.rows, fed.vocab, &fed.data),
            }
            rest = later;
        }
        // The chunks asked for logits of more rows than a prompt does, which may round differently: the states are not reused.
        self.sequence.clear();
        Ok(logits)
    }
}

fn append(logits: &mut Logits, rows: usize, vocab: usize, data: &[f32]) {
    logits.rows += rows;
    logits.vocab = vocab;
    logits.data.extend_from_slice(data);
}
