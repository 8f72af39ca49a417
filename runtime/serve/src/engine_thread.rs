//! The thread of an engine: takes requests from a queue, runs passes over all of them, and reports each token.
//!
//! Between two passes it takes new requests, drops those whose client has disconnected or whose time limit has passed, and starts waiting
//! requests while sequences are free. It keeps the sequence of an answered request, so that a later prompt with the same prefix starts
//! after it. If another request needs the place, the least recently used sequence is dropped. Later requests, also after a restart, restore
//! its states from the pages of the cache: a request whose pages are still on disk waits for them while others run.

use crate::error::{ApiError, ServeError};
use crate::logprobs::{TokenLogprobs, token_logprobs};
use crate::metrics::ModelMetrics;
use hpp_engine::Backend;
use hpp_generate::kv::{LoadTicket, PageLookup};
use hpp_generate::speculate::Drafts;
use hpp_generate::text::TextTokenizer;
use hpp_generate::{Batch, FinishReason, Finished, GenerateError, Generated, Generation, GenerationEvent};
use hpp_generate::{GenerationRequest, RequestId, TokenSequence};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// Without a cache: tokens of a prompt in one pass, and the grid to which a kept sequence is truncated. The rest of a prompt is computed in
/// the same chunks whether or not its start was kept, so its logits are the same.
const GRID: usize = 128;
/// How long a request can be overtaken by more important ones.
const MOST_OVERTAKEN: Duration = Duration::from_secs(60);
/// Least time between two reports of the cache's counts while requests run.
const CACHE_REPORT: Duration = Duration::from_secs(1);
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
    /// How requests draft tokens in speculative decoding.
    pub drafts: Drafts<B>,
}

/// Limits of one engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineLimits {
    /// Most requests that wait; more are refused.
    pub queue: usize,
}

/// A request for the engine.
pub struct Submission {
    /// What to generate.
    pub request: GenerationRequest,
    /// Receives its events. Dropping the receiver cancels the request.
    pub events: UnboundedSender<RequestEvent>,
    /// Its deadline.
    pub deadline: Option<Instant>,
    /// Reports the logarithms of this many most likely tokens' probabilities, and of the chosen one's.
    pub top_logprobs: Option<usize>,
    /// When it arrived.
    pub arrived: Instant,
    /// The session that it continues, and its priority.
    pub hints: CacheHints,
}

/// The client's hints about the states of its request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheHints {
    /// The conversation: the states of its answers are saved and reused too, not only those of prompts.
    pub session: Option<String>,
    /// More important requests start first, and their states are kept longer.
    pub priority: i32,
    /// No request follows soon: states are evicted from memory after the answer, to disk if there is one.
    pub park: bool,
}

/// Wakes the thread of an engine.
pub type WakeFn = Box<dyn Fn() + Send + Sync>;

enum EngineCommand {
    Submit(Box<Submission>),
    /// A page has been read or written.
    Wake,
}

/// An event of a request.
#[derive(Debug)]
pub enum RequestEvent {
    /// A token of the prompt.
    PromptToken {
        /// The token.
        id: u32,
        /// The first has none.
        logprobs: Option<TokenLogprobs>,
    },
    /// A token was chosen; its text follows when it is complete.
    Token {
        /// The token.
        id: u32,
        /// If requested.
        logprobs: Option<TokenLogprobs>,
    },
    /// More text; never part of a stop text.
    Text(String),
    /// The answer is complete.
    Finished(Box<Generated>),
    /// There is no answer.
    Failed(ApiError),
}

/// The queue of an engine's thread. Cheap to clone; the thread ends once every clone is dropped.
#[derive(Clone)]
pub struct EngineQueue {
    messages: Sender<EngineCommand>,
    /// The thread ends once all senders are dropped.
    _open: Arc<()>,
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
            if self.messages.send(EngineCommand::Submit(Box::new(submission))).is_err() {
                self.waiting.fetch_sub(count - sent, Ordering::SeqCst);
                return Err(ApiError::engine_gone());
            }
        }
        Ok(())
    }
}

/// Loads an engine on a thread of its own and serves it until every queue to it is dropped, or `stop` is set. Returns when it is loaded.
/// `load` gets the function that its cache calls whenever a page has been read or written.
///
/// # Errors
/// What `load` reports.
pub fn start<B: Backend + 'static, E: From<ServeError> + Send + 'static>(
    load: impl FnOnce(WakeFn) -> Result<LoadedEngine<B>, E> + Send + 'static,
    limits: EngineLimits,
    metrics: ModelMetrics,
    stop: Arc<AtomicBool>,
) -> Result<(EngineQueue, std::thread::JoinHandle<()>), E> {
    let (messages, inbox) = channel();
    let (waiting, open) = (Arc::new(AtomicUsize::new(0)), Arc::new(()));
    let (waker, queues) = (messages.clone(), Arc::downgrade(&open));
    let wake: WakeFn = Box::new(move || drop(waker.send(EngineCommand::Wake)));
    let queue = EngineQueue { messages, _open: open, waiting: Arc::clone(&waiting), limits, metrics: metrics.clone() };
    let (loaded, is_loaded) = channel();
    let run = move || {
        let engine = match load(wake) {
            Ok(engine) => engine,
            Err(error) => return drop(loaded.send(Err(error))),
        };
        let grid = match engine.batch.cache() {
            Some(cache) => cache.page_tokens(),
            None => engine.batch.prompt_chunk().min(GRID),
        };
        let _ = loaded.send(Ok(()));
        let LoadedEngine { batch, max_sequences, tokenizer, drafts } = engine;
        let thread = EngineThread {
            batch,
            tokenizer,
            drafts,
            grid,
            max_sequences: max_sequences.max(1),
            inbox,
            queues,
            queued: waiting,
            waiting: VecDeque::new(),
            running: HashMap::new(),
            kept: Vec::new(),
            metrics,
            reported_cache: Instant::now(),
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

/// A request that waits.
struct Waiting {
    submission: Submission,
    /// Set while its pages are being read.
    ticket: Option<Arc<LoadTicket>>,
    /// Whether it cannot start before pages have been read.
    is_loading: bool,
    /// Stored pages that were in RAM when it arrived.
    in_ram: usize,
}

/// A request in the batch.
struct Running {
    events: UnboundedSender<RequestEvent>,
    deadline: Option<Instant>,
    top_logprobs: Option<usize>,
    arrived: Instant,
    last_token: Option<Instant>,
    park: bool,
}

struct EngineThread<B: Backend> {
    batch: Batch<B>,
    tokenizer: Option<TextTokenizer>,
    drafts: Drafts<B>,
    grid: usize,
    max_sequences: usize,
    inbox: Receiver<EngineCommand>,
    queues: Weak<()>,
    /// Submitted requests that wait, in the inbox or in `waiting`.
    queued: Arc<AtomicUsize>,
    waiting: VecDeque<Waiting>,
    running: HashMap<RequestId, Running>,
    /// Sequences of answered requests, the least recently used first.
    kept: Vec<TokenSequence<B>>,
    metrics: ModelMetrics,
    reported_cache: Instant,
    stop: Arc<AtomicBool>,
}

impl<B: Backend + 'static> EngineThread<B> {
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

    /// Takes messages; waits for one if there is nothing to do. False once there will be none.
    fn receive(&mut self) -> bool {
        loop {
            while let Ok(message) = self.inbox.try_recv() {
                self.take(message);
            }
            if !self.batch.is_empty() || self.waiting.iter().any(|waiting| !waiting.is_loading) {
                return true;
            }
            self.report_cache();
            match self.inbox.recv_timeout(IDLE_CHECK) {
                Ok(message) => self.take(message),
                Err(_) if self.stop.load(Ordering::SeqCst) || !self.waiting.is_empty() => {
                    self.take(EngineCommand::Wake);
                    return true;
                }
                Err(_) if self.queues.strong_count() == 0 => return false,
                Err(_) => {}
            }
        }
    }

    fn take(&mut self, message: EngineCommand) {
        match message {
            EngineCommand::Wake => self.waiting.iter_mut().for_each(|waiting| waiting.is_loading = false),
            EngineCommand::Submit(submission) => self.enqueue(*submission),
        }
    }

    /// Puts a request behind those that are as important or have been overtaken for long. Pages of its prompt on disk are
    /// read while it waits.
    fn enqueue(&mut self, submission: Submission) {
        let mut in_ram = 0;
        if let Some(cache) = self.batch.cache() {
            let pages = cache.look_up(&submission.request.prompt, submission.hints.session.as_deref());
            in_ram = cache.in_ram(&pages);
            cache.prefetch(&pages);
        }
        let priority = submission.hints.priority;
        let stays_before = |other: &Waiting| {
            other.submission.hints.priority >= priority || other.submission.arrived.elapsed() > MOST_OVERTAKEN
        };
        let at = self.waiting.iter().rposition(stays_before).map_or(0, |last| last + 1);
        self.waiting.insert(at, Waiting { submission, ticket: None, is_loading: false, in_ram });
    }

    /// Drops requests whose client has disconnected or whose deadline has passed.
    fn drop_ended(&mut self) {
        let now = Instant::now();
        let is_late = |deadline: Option<Instant>| deadline.is_some_and(|deadline| now >= deadline);
        let ended = |gone: bool| if gone { "cancelled" } else { "timeout" };
        let before = self.waiting.len();
        self.waiting.retain(|Waiting { submission, .. }| {
            let (gone, late) = (submission.events.is_closed(), is_late(submission.deadline));
            if gone || late {
                self.metrics.ended(ended(gone));
                let _ = submission.events.send(RequestEvent::Failed(ApiError::Timeout));
            }
            !gone && !late
        });
        self.queued.fetch_sub(before - self.waiting.len(), Ordering::SeqCst);
        if self.waiting.len() < before {
            self.waiting.iter_mut().for_each(|waiting| waiting.is_loading = false);
        }
        let done: Vec<(RequestId, bool)> = (self.running.iter())
            .filter(|(_, running)| running.events.is_closed() || is_late(running.deadline))
            .map(|(id, running)| (*id, running.events.is_closed()))
            .collect();
        for (id, gone) in done {
            self.metrics.ended(ended(gone));
            let removed = self.running.remove(&id);
            let park = removed.as_ref().is_some_and(|running| running.park);
            if let Some(running) = removed {
                let _ = running.events.send(RequestEvent::Failed(ApiError::Timeout));
            }
            if let Some(finished) = self.batch.cancel(id) {
                self.keep(finished.sequence, park);
            }
        }
    }

    /// Starts requests in order while sequences are free, except those whose pages are being read.
    fn start_waiting(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        let mut still_waiting = VecDeque::new();
        while let Some(mut next) = waiting.pop_front() {
            let sequence = if self.batch.len() < self.max_sequences { self.sequence_for(&mut next) } else { None };
            match sequence {
                Some(sequence) => {
                    // Pages are read for one request at a time: now for the first one that waits.
                    if next.ticket.take().is_some() {
                        still_waiting.append(&mut waiting);
                        waiting = std::mem::take(&mut still_waiting);
                        waiting.iter_mut().for_each(|waiting| waiting.is_loading = false);
                    }
                    self.start(next.submission, sequence);
                }
                None => still_waiting.push_back(next),
            }
        }
        self.waiting = still_waiting;
    }

    fn start(&mut self, submission: Submission, sequence: TokenSequence<B>) {
        self.queued.fetch_sub(1, Ordering::SeqCst);
        let Submission { request, events, deadline, top_logprobs, arrived, hints } = submission;
        let prompt_tokens = request.prompt.len() as u64;
        let generation = Generation::new(request, self.tokenizer.clone(), self.grid);
        let generation = self.drafts.speculate(generation);
        match self.batch.add_to(sequence, generation, hints.session.as_deref(), self.grid) {
            Ok((id, kept)) => {
                self.batch.set_priority(id, hints.priority);
                self.metrics.queued.observe(arrived.elapsed().as_secs_f64());
                self.metrics.prompt_tokens.inc_by(prompt_tokens);
                self.metrics.cached_tokens.inc_by(kept as u64);
                let (last_token, park) = (None, hints.park);
                self.running.insert(id, Running { events, deadline, top_logprobs, arrived, last_token, park });
            }
            Err(error) => {
                self.metrics.ended("failed");
                let _ = events.send(RequestEvent::Failed(error.into()));
            }
        }
    }

    /// The start of a request: the kept sequence or the stored pages with the longest common prefix with its prompt, else an empty
    /// sequence. `None` while pages are being read.
    fn sequence_for(&mut self, waiting: &mut Waiting) -> Option<TokenSequence<B>> {
        if waiting.is_loading {
            return None;
        }
        let (request, hints) = (&waiting.submission.request, &waiting.submission.hints);
        // The logits of a prompt that was computed before are gone.
        let prompt: &[u32] = if request.prompt_logits { &[] } else { &request.prompt };
        let is_full = self.batch.len() + self.kept.len() >= self.max_sequences;
        let shared = |sequence: &TokenSequence<B>| sequence.shared_prefix(prompt, hints.session.as_deref());
        let best = (0..self.kept.len()).max_by_key(|index| shared(&self.kept[*index]));
        let in_best = best.map_or(0, |best| shared(&self.kept[best]));
        let length = best.map_or(0, |best| self.kept[best].tokens().len());
        let mut pages = Vec::new();
        let found = self.batch.cache().map(|cache| cache.look_up(prompt, hints.session.as_deref()));
        if let Some((cache, found)) = self.batch.cache().zip(found.as_ref()) {
            // With equally many tokens, a kept sequence needs no copy. But truncating it to a short common prefix would lose the
            // rest of another conversation, and some states cannot go back.
            let is_best = in_best >= self.grid && 2 * in_best >= length && !cache.has_snapshots();
            if !found.is_empty() && (!is_best || found.len() * self.grid > in_best) {
                match cache.load(found, hints.priority, waiting.ticket.as_ref()) {
                    PageLookup::Pages(loaded) => pages = loaded,
                    PageLookup::Loading(ticket) => {
                        waiting.ticket = ticket.or(waiting.ticket.take());
                        waiting.is_loading = true;
                        return None;
                    }
                }
            }
            if in_best < self.grid || !pages.is_empty() {
                cache.count_hits(found, pages.len(), waiting.in_ram);
            }
        }
        if pages.is_empty()
            && let Some(best) = best
            && in_best >= self.grid
            && (is_full || 2 * in_best >= length)
        {
            return Some(self.kept.remove(best));
        }
        if is_full && !self.kept.is_empty() {
            self.kept.remove(0);
        }
        let restored = found.map(|found| self.batch.restore(prompt, &found, &pages)).transpose();
        let restored = restored.inspect_err(|error| {
            tracing::warn!(
                error = hpp_schema::error_line(error),
                "cannot restore KV pages; the prompt is computed again"
            );
        });
        Some(restored.ok().flatten().unwrap_or_default())
    }

    /// Keeps the sequence of an answered request, unless its client says that no request follows soon.
    fn keep(&mut self, sequence: TokenSequence<B>, park: bool) {
        if park && let Some(cache) = self.batch.cache() {
            cache.park(&sequence);
        } else if sequence.tokens().len() >= self.grid {
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
        self.metrics.batched_rows.inc_by(last.batched_rows);
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
                    FinishReason::Stop | FinishReason::Eos | FinishReason::Grammar => "stop",
                    FinishReason::Length => "length",
                    FinishReason::Cancelled => "cancelled",
                });
                RequestEvent::Finished(Box::new(generated))
            }
            Err(error) => {
                self.metrics.ended("failed");
                RequestEvent::Failed(error.into())
            }
        };
        let _ = running.events.send(event);
        self.keep(sequence, running.park);
    }

    /// Ends every request with an error, and drops all states.
    fn end_all(&mut self, error: &ApiError) {
        self.queued.fetch_sub(self.waiting.len(), Ordering::SeqCst);
        let waiting = self.waiting.drain(..).map(|waiting| waiting.submission.events);
        let running = self.running.drain().map(|(_, running)| running.events);
        for events in waiting.chain(running) {
            self.metrics.ended("failed");
            let _ = events.send(RequestEvent::Failed(error.clone()));
        }
        self.batch.clear();
        self.kept.clear();
    }

    fn report(&mut self) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.running.set(number(self.batch.len()));
        self.metrics.waiting.set(number(self.queued.load(Ordering::SeqCst)));
        self.metrics.idle_sequences.set(number(self.kept.len()));
        let sequences = (self.batch.len() + self.kept.len()) as u64;
        let bytes = self.batch.engine().host_state_bytes().saturating_mul(sequences);
        self.metrics.state_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        if self.reported_cache.elapsed() >= CACHE_REPORT {
            self.report_cache();
        }
    }

    fn report_cache(&mut self) {
        if let Some(cache) = self.batch.cache() {
            self.metrics.cache.report(&cache.stats());
            self.reported_cache = Instant::now();
        }
    }
}

impl Running {
    fn report(&mut self, event: GenerationEvent<'_>, metrics: &ModelMetrics) {
        let event = match event {
            GenerationEvent::Prompt { .. } => return,
            GenerationEvent::PromptToken { id, logits } => {
                let logprobs = logits.zip(self.top_logprobs).map(|(logits, top)| token_logprobs(logits, id, top));
                RequestEvent::PromptToken { id, logprobs }
            }
            GenerationEvent::Token { id, logits } => {
                let now = Instant::now();
                match self.last_token {
                    None => metrics.first_token.observe((now - self.arrived).as_secs_f64()),
                    Some(last) => metrics.between_tokens.observe((now - last).as_secs_f64()),
                }
                self.last_token = Some(now);
                metrics.generated_tokens.inc();
                RequestEvent::Token { id, logprobs: self.top_logprobs.map(|top| token_logprobs(logits, id, top)) }
            }
            GenerationEvent::Text(text) => RequestEvent::Text(text.to_owned()),
        };
        // A disconnected client is noticed before the next pass.
        let _ = self.events.send(event);
    }
}
