//! Jobs of an engine's thread, and how they are cancelled from other threads.

use crate::failure::Failure;
use hpp_engine::{CancelHandle, Logits};
use hpp_generate::{Generated, GenerationRequest};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What an engine can be asked for.
pub enum Work {
    /// Tokens and text after a prompt.
    Generate(Box<GenerateWork>),
    /// The logits after each of these tokens, or after the last of them only.
    Logits { tokens: Vec<u32>, only_last: bool, answer: Sender<Result<Logits, Failure>> },
}

/// One request.
pub struct GenerateWork {
    /// What to generate.
    pub request: GenerationRequest,
    /// Which states of the sequence's previous text the prompt may start from.
    pub reuse: Reuse,
    /// Whether to keep the logits that tokens are chosen from.
    pub keep_logits: bool,
    /// Takes what happens.
    pub events: Sender<Event>,
}

/// Which states a prompt starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// All states of the sequence, if the prompt continues its text: the next turn of a conversation.
    Continuation,
    /// The states of the longest common prefix.
    Prefix,
    /// None.
    Nothing,
}

/// What happens to a request.
pub enum Event {
    /// More text.
    Text(String),
    /// It is complete, or failed.
    Ended(Result<Box<Answer>, Failure>),
}

/// A complete answer.
pub struct Answer {
    /// Tokens, text, finish reason and times.
    pub generated: Generated,
    /// The seed that reproduces the text; `None` for greedy choices.
    pub seed: Option<u64>,
    /// The logits that each token was chosen from, if they were asked for.
    pub logits: Option<Logits>,
}

/// Work on its way to the engine's thread.
pub struct Job {
    /// What to do.
    pub work: Work,
    /// How it is cancelled.
    pub handle: Arc<JobHandle>,
}

/// The engine's cancel handle, and the job that it would cancel now.
#[derive(Clone)]
pub struct Running {
    job: Arc<Mutex<Option<u64>>>,
    cancel: CancelHandle,
}

impl Running {
    /// The handle of an engine that runs no job yet.
    pub fn new(cancel: CancelHandle) -> Self {
        Self { job: Arc::default(), cancel }
    }

    fn job(&self) -> MutexGuard<'_, Option<u64>> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cancels one job, before it starts or within a pass.
pub struct JobHandle {
    id: u64,
    cancelled: AtomicBool,
    running: Running,
}

impl JobHandle {
    /// The handle of a job that waits. Ids are unique within an engine.
    pub fn new(id: u64, running: Running) -> Self {
        Self { id, cancelled: AtomicBool::new(false), running }
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    /// Cancels the job. A pass that computes for it stops after the operator that runs now. A pass for another job goes on.
    pub fn cancel(&self) {
        // The lock is held so that no other job starts between the comparison and the cancellation.
        let job = self.running.job();
        self.cancelled.store(true, Ordering::SeqCst);
        if *job == Some(self.id) {
            self.running.cancel.cancel();
        }
    }

    /// Runs the job on the engine's thread.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        *self.running.job() = Some(self.id);
        let done = work();
        let mut job = self.running.job();
        *job = None;
        self.running.cancel.reset();
        done
    }
}
