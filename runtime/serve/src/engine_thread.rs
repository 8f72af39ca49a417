//! The thread of an engine: takes requests from a queue, runs passes over all of them, and reports each token.
//!
//! Between two passes it takes new requests, drops those whose client is gone or whose time is over, and starts waiting ones as long as
//! sequences are free. A sequence whose request is answered is kept: a later prompt that begins with the same tokens starts after them.
//! The sequence that was used longest ago is dropped when another needs its place.

use crate::error::{ApiError, ServeError};
use crate::logprobs::{TokenLogprobs, token_logprobs};
use crate::metrics::ModelMetrics;
use hpp_engine::Backend;
use hpp_generate::speculate::{NgramDrafter, Speculation};
use hpp_generate::text::TextTokenizer;
use hpp_generate::{Batch, Event as GenerationEvent, FinishReason, Finished, GenerateError, Generated, Generation};
use hpp_generate::{Request, RequestId, TokenSequence};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// Tokens of a prompt in one pass, and the grid on which a kept sequence is cut: the rest of a prompt is computed in the same chunks
/// whether its start was kept or not, so its logits are the same.
const GRID: usize = 128;
/// How often an idle thread looks for a shutdown.
const IDLE_CHECK: Duration = Duration::from_millis(200);

/// An engine that is loaded.
pub struct LoadedEngine<B: Backend> {
    /// The engine, without requests.
    pub batch: Batch<B>,
    /// Most sequences with states: running and kept.
    pub max_sequences: usize,
    /// Turns tokens into text.
    pub tokenizer: Option<TextTokenizer>,
    /// Whether to draft tokens that followed the last time a text ended as it does now.
    pub ngram_drafts: bool,
}

/// Limits of one engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineLimits {
    /// Most requests that wait; more are refused.
    pub queue: usize,
}

/// A request on its way to the engine.
pub struct Submission {
    /// What to generate.
    pub request: Request,
    /// Takes what happens. The request is cancelled when the receiver is dropped.
    pub events: UnboundedSender<Event>,
    /// When it ends at the latest.
    pub deadline: Option<Instant>,
    /// Reports the logarithms of this many most likely tokens' probabilities, and of the chosen one's.
    pub top_logprobs: Option<usize>,
    /// When it arrived.
    pub arrived: Instant,
}

/// What happens to a request.
#[derive(Debug)]
pub enum Event {
    /// A token was chosen; its text follows when it is complete.
    Token {
        /// The token.
        id: u32,
        /// If asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// More text; never part of a stop text.
    Text(String),
    /// The answer is complete.
    Finished(Box<Generated>),
    /// There is no answer.
    Failed(ApiError),
}

/// The way to an engine's thread. Cheap to clone; the thread ends once every clone is dropped.
#[derive(Clone)]
pub struct EngineQueue {
    submissions: Sender<Submission>,
    waiting: Arc<AtomicUsize>,
    limits: EngineLimits,
    metrics: ModelMetrics,
}

impl EngineQueue {
    /// Puts requests into the queue, all of them or none.
    ///
    /// # Errors
    /// There is no room for all of them in the queue now ([`ApiError::Busy`]) or ever, or the engine has ended.
    pub fn submit(&self, submissions: Vec<Submission>) -> Result<(), ApiError> {
        let (count, limit) = (submissions.len(), self.limits.queue);
        if count > limit {
            return Err(ApiError::TooMany { count, limit });
        }
        let has_room = |waiting: usize| Some(waiting + count).filter(|waiting| *waiting <= limit);
        if let Err(waiting) = self.waiting.fetch_update(Ordering::SeqCst, Ordering::SeqCst, has_room) {
            self.metrics.ended("refused");
            return Err(ApiError::Busy { waiting });
        }
        for (sent, submission) in submissions.into_iter().enumerate() {
            if self.submissions.send(submission).is_err() {
                self.waiting.fetch_sub(count - sent, Ordering::SeqCst);
                return Err(ApiError::engine_gone());
            }
        }
        Ok(())
    }
}

/// Loads an engine on a thread of its own and serves it until every queue to it is dropped, or `stop` is set. Returns when it is loaded.
///
/// # Errors
/// What `load` reports.
pub fn start<B: Backend + 'static, E: From<ServeError> + Send + 'static>(
    load: impl FnOnce() -> Result<LoadedEngine<B>, E> + Send + 'static,
    limits: EngineLimits,
    metrics: ModelMetrics,
    stop: Arc<AtomicBool>,
) -> Result<(EngineQueue, std::thread::JoinHandle<()>), E> {
    let (submissions, inbox) = channel();
    let waiting = Arc::new(AtomicUsize::new(0));
    let queue = EngineQueue { submissions, waiting: Arc::clone(&waiting), limits, metrics: metrics.clone() };
    let (loaded, is_loaded) = channel();
    let run = move || {
        let engine = match load() {
            Ok(engine) => engine,
            Err(error) => return drop(loaded.send(Err(error))),
        };
        let grid = engine.batch.prompt_chunk().min(GRID);
        let _ = loaded.send(Ok(()));
        let LoadedEngine { batch, max_sequences, tokenizer, ngram_drafts } = engine;
        let thread = EngineThread {
            batch,
            tokenizer,
            ngram_drafts,
            grid,
            max_sequences: max_sequences.max(1),
            inbox,
            queued: waiting,
            waiting: VecDeque::new(),
            running: HashMap::new(),
            kept: Vec::new(),
            metrics,
            stop,
        };
        thread.run();
    };
    let thread = std::thread::Builder::new().name("hpp-engine".to_owned()).spawn(run);
    let thread = thread.map_err(ServeError::from)?;
    match is_loaded.recv() {
        Ok(Ok(())) => Ok((queue, thread)),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(ServeError::EngineThread.into()),
    }
}

/// A request in the batch.
struct Running {
    events: UnboundedSender<Event>,
    deadline: Option<Instant>,
    top_logprobs: Option<usize>,
    arrived: Instant,
    last_token: Option<Instant>,
}

struct EngineThread<B: Backend> {
    batch: Batch<B>,
    tokenizer: Option<TextTokenizer>,
    ngram_drafts: bool,
    grid: usize,
    max_sequences: usize,
    inbox: Receiver<Submission>,
    /// Requests that were submitted and are not started, in the inbox or in `waiting`.
    queued: Arc<AtomicUsize>,
    waiting: VecDeque<Submission>,
    running: HashMap<RequestId, Running>,
    /// Sequences of answered requests, the one used longest ago first.
    kept: Vec<TokenSequence<B>>,
    metrics: ModelMetrics,
    stop: Arc<AtomicBool>,
}

impl<B: Backend> EngineThread<B> {
    fn run(mut self) {
        while self.receive() {
            if self.stop.load(Ordering::SeqCst) {
                return self.end_all(&ApiError::Unavailable("the server is shutting down".to_owned()));
            }
            self.drop_ended();
            self.start_waiting();
            self.pass();
            self.report();
        }
    }

    /// Takes submissions; waits for one if there is nothing to do. False once there will be none.
    fn receive(&mut self) -> bool {
        loop {
            match self.inbox.try_recv() {
                Ok(submission) => self.waiting.push_back(submission),
                Err(TryRecvError::Empty) if !self.batch.is_empty() || !self.waiting.is_empty() => return true,
                Err(TryRecvError::Empty) => match self.inbox.recv_timeout(IDLE_CHECK) {
                    Ok(submission) => self.waiting.push_back(submission),
                    Err(RecvTimeoutError::Timeout) if self.stop.load(Ordering::SeqCst) => return true,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return false,
                },
                Err(TryRecvError::Disconnected) => return !self.batch.is_empty() || !self.waiting.is_empty(),
            }
        }
    }

    /// Drops requests whose client is gone or whose time is over.
    fn drop_ended(&mut self) {
        let now = Instant::now();
        let is_late = |deadline: Option<Instant>| deadline.is_some_and(|deadline| now >= deadline);
        let ended = |gone: bool| if gone { "cancelled" } else { "timeout" };
        let before = self.waiting.len();
        self.waiting.retain(|submission| {
            let (gone, late) = (submission.events.is_closed(), is_late(submission.deadline));
            if gone || late {
                self.metrics.ended(ended(gone));
                let _ = submission.events.send(Event::Failed(ApiError::Timeout));
            }
            !gone && !late
        });
        self.queued.fetch_sub(before - self.waiting.len(), Ordering::SeqCst);
        let done: Vec<(RequestId, bool)> = (self.running.iter())
            .filter(|(_, running)| running.events.is_closed() || is_late(running.deadline))
            .map(|(id, running)| (*id, running.events.is_closed()))
            .collect();
        for (id, gone) in done {
            self.metrics.ended(ended(gone));
            if let Some(running) = self.running.remove(&id) {
                let _ = running.events.send(Event::Failed(ApiError::Timeout));
            }
            if let Some(finished) = self.batch.cancel(id) {
                self.keep(finished.sequence);
            }
        }
    }

    fn start_waiting(&mut self) {
        while self.batch.len() < self.max_sequences
            && let Some(submission) = self.waiting.pop_front()
        {
            self.queued.fetch_sub(1, Ordering::SeqCst);
            let Submission { request, events, deadline, top_logprobs, arrived } = submission;
            let sequence = self.sequence_for(&request.prompt);
            let prompt_tokens = request.prompt.len() as u64;
            let generation = Generation::new(request, self.tokenizer.clone(), self.grid);
            let generation = match self.ngram_drafts {
                true => generation.speculate(Speculation::new(Box::<NgramDrafter>::default())),
                false => generation,
            };
            match self.batch.add_to(sequence, generation, self.grid) {
                Ok((id, kept)) => {
                    self.metrics.prompt_tokens.inc_by(prompt_tokens);
                    self.metrics.cached_tokens.inc_by(kept as u64);
                    self.running.insert(id, Running { events, deadline, top_logprobs, arrived, last_token: None });
                }
                Err(error) => {
                    self.metrics.ended("failed");
                    let _ = events.send(Event::Failed(error.into()));
                }
            }
        }
    }

    /// The kept sequence that has most in common with a prompt, if that is worth its place, else an empty one.
    fn sequence_for(&mut self, prompt: &[u32]) -> TokenSequence<B> {
        let is_full = self.batch.len() + self.kept.len() >= self.max_sequences;
        let common = |sequence: &TokenSequence<B>| sequence.common_prefix(prompt);
        let best = (0..self.kept.len()).max_by_key(|index| common(&self.kept[*index]));
        if let Some(index) = best {
            let (common, length) = (common(&self.kept[index]), self.kept[index].tokens().len());
            // Going back to a short common start would lose the rest of another conversation.
            if common >= self.grid && (is_full || 2 * common >= length) {
                return self.kept.remove(index);
            }
        }
        if is_full && !self.kept.is_empty() {
            self.kept.remove(0);
        }
        TokenSequence::default()
    }

    fn keep(&mut self, sequence: TokenSequence<B>) {
        if sequence.tokens().len() >= self.grid {
            self.kept.push(sequence);
        }
    }

    /// One pass over all requests.
    fn pass(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        let (running, metrics) = (&mut self.running, &self.metrics);
        let finished = self.batch.pass::<GenerateError>(&mut |id, event| {
            if let Some(running) = running.get_mut(&id) {
                running.report(event, metrics);
            }
            Ok(())
        });
        self.metrics.passes.inc();
        let last = self.batch.engine().last_pass();
        self.metrics.weight_bytes.inc_by(last.read_bytes + last.uploaded_bytes);
        match finished {
            Ok(finished) => finished.into_iter().for_each(|finished| self.finish(finished)),
            Err(error) => {
                tracing::error!(error = hpp_schema::error_line(&error), "a pass failed");
                self.end_all(&error.into());
            }
        }
    }

    fn finish(&mut self, Finished { id, result, sequence }: Finished<B>) {
        let Some(running) = self.running.remove(&id) else { return };
        let event = match result {
            Ok(generated) => {
                self.metrics.ended(match generated.finish_reason {
                    FinishReason::Stop | FinishReason::Eos => "stop",
                    FinishReason::Length => "length",
                    FinishReason::Cancelled => "cancelled",
                });
                Event::Finished(Box::new(generated))
            }
            Err(error) => {
                self.metrics.ended("failed");
                Event::Failed(error.into())
            }
        };
        let _ = running.events.send(event);
        self.keep(sequence);
    }

    /// Ends every request with an error, and drops all states.
    fn end_all(&mut self, error: &ApiError) {
        self.queued.fetch_sub(self.waiting.len(), Ordering::SeqCst);
        let waiting = self.waiting.drain(..).map(|submission| submission.events);
        let running = self.running.drain().map(|(_, running)| running.events);
        for events in waiting.chain(running) {
            self.metrics.ended("failed");
            let _ = events.send(Event::Failed(error.clone()));
        }
        self.batch.clear();
        self.kept.clear();
    }

    fn report(&self) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.running.set(number(self.batch.len()));
        self.metrics.waiting.set(number(self.queued.load(Ordering::SeqCst)));
        self.metrics.idle_sequences.set(number(self.kept.len()));
        let sequences = (self.batch.len() + self.kept.len()) as u64;
        let bytes = self.batch.engine().host_state_bytes().saturating_mul(sequences);
        self.metrics.state_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }
}

impl Running {
    fn report(&mut self, event: GenerationEvent<'_>, metrics: &ModelMetrics) {
        let event = match event {
            GenerationEvent::Prompt { .. } => return,
            GenerationEvent::Token { id, logits } => {
                let now = Instant::now();
                match self.last_token {
                    None => metrics.first_token.observe((now - self.arrived).as_secs_f64()),
                    Some(last) => metrics.between_tokens.observe((now - last).as_secs_f64()),
                }
                self.last_token = Some(now);
                metrics.generated_tokens.inc();
                Event::Token { id, logprobs: self.top_logprobs.map(|top| token_logprobs(logits, id, top)) }
            }
            GenerationEvent::Text(text) => Event::Text(text.to_owned()),
        };
        // A client that is gone is noticed before the next pass.
        let _ = self.events.send(event);
    }
}
