//! The thread of an engine: takes requests from a queue, runs passes over all of them, and reports each token.
//!
//! Between two passes it takes new requests, drops those whose client has disconnected or whose time limit has passed, and starts waiting
//! requests while sequences are free. It keeps the sequence of an answered request, so that a later prompt with the same prefix starts
//! after it. If another request needs the place, the least recently used sequence is dropped. Later requests, also after a restart, restore
//! its states from the pages of the cache: a request whose pages are still on disk waits for them while others run.

mod embed;
mod sequences;
mod submission;

use crate::error::ApiError;
use crate::logprobs::token_logprobs;
use crate::metrics::ModelMetrics;
use crate::weight_placement::WeightPlacement;
use embed::Embedding;
use hpp_engine::{Backend, CancelHandle};
use hpp_generate::adapt::{Adaptation, EngineShare, Reclaimable};
use hpp_generate::kv::LoadTicket;
use hpp_generate::speculate::Drafts;
use hpp_generate::text::TextTokenizer;
use hpp_generate::{Batch, FinishReason, Finished, GenerateError, Generated, Generation, GenerationEvent};
use hpp_generate::{GenerationTimings, RequestId, TokenSequence, TokenUsage};
use sequences::Start;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
pub use submission::CacheHints;
pub(crate) use submission::{
    Client, EngineTask, GenerateTask, Occupancy, QueuePlace, Queued, RequestEvent, Submission,
};

/// If there is no cache: tokens of a prompt in one pass, and the multiple to which a kept sequence is truncated. The rest of a prompt is then
/// computed in the same chunks whether or not its start was kept, so its logits are the same.
const DEFAULT_CHUNK_TOKENS: usize = 128;
/// How long more important requests may overtake a waiting one.
const MOST_OVERTAKEN: Duration = Duration::from_secs(60);
/// Least time between two reports of the cache's counts while requests run.
const CACHE_REPORT: Duration = Duration::from_secs(1);
/// How often an idle thread looks for a shutdown.
const IDLE_CHECK: Duration = Duration::from_millis(200);

/// An engine that is loaded.
pub struct LoadedEngine<B: Backend> {
    /// The engine, without requests.
    pub batch: Batch<B>,
    /// The host memory that can be reclaimed from it. Its sequences are the most with states, running and kept.
    pub reclaimable: Reclaimable,
    /// Turns tokens into text.
    pub tokenizer: Option<TextTokenizer>,
    /// How requests draft tokens in speculative decoding.
    pub drafts: Drafts<B>,
    /// Where its weights lie.
    pub placement: Vec<WeightPlacement>,
}

/// What a pool learns of an engine once it is loaded.
pub(crate) struct LoadReport {
    /// Where its weights lie.
    pub placement: Vec<WeightPlacement>,
    /// The host memory that can be reclaimed from it.
    pub reclaimable: Reclaimable,
}

/// Wakes the thread of an engine.
pub type WakeFn = Box<dyn Fn() + Send + Sync>;

enum EngineCommand {
    Submit(Box<Queued>, Unanswered),
    /// A page has been read or written.
    Wake,
    /// What the engine may take, from the next pass on.
    Share(EngineShare),
    /// There will be no more requests.
    Close,
}

/// Exists as long as a request is not answered.
type Unanswered = Arc<()>;

/// The queue of an engine's thread. The thread ends once the queue is dropped and its requests are answered.
pub(crate) struct EngineQueue {
    messages: Sender<EngineCommand>,
    /// Each request that is not answered yet has a clone.
    unanswered: Unanswered,
}

impl EngineQueue {
    /// Puts a request into the queue. If the thread has ended, the request's channel closes.
    pub fn submit(&self, request: Queued) {
        let _ = self.messages.send(EngineCommand::Submit(Box::new(request), Arc::clone(&self.unanswered)));
    }

    /// Tells the engine what it may take from the next pass on.
    pub fn share(&self, share: EngineShare) {
        let _ = self.messages.send(EngineCommand::Share(share));
    }

    /// Whether every request is answered.
    pub fn is_idle(&self) -> bool {
        Arc::strong_count(&self.unanswered) == 1
    }
}

impl Drop for EngineQueue {
    fn drop(&mut self) {
        let _ = self.messages.send(EngineCommand::Close);
    }
}

/// Receives the events of an engine's thread. The thread itself calls every method.
pub(crate) trait EngineEvents: Send + 'static {
    /// The engine is loaded, or why it is not.
    fn loaded(&self, result: Result<LoadReport, LoadError>);
    /// Every request is answered.
    fn idle(&self);
    /// The engine cannot go on. The thread takes no more requests, ends those it has, and frees the engine.
    fn ending(&self);
    /// The thread has freed the engine and is about to end.
    fn ended(&self);
}

/// What loading an engine needs.
pub struct LoadContext {
    /// Its cache calls this whenever a page has been read or written.
    pub wake: WakeFn,
    /// Ends the load.
    pub cancel: CancelHandle,
}

/// Why an engine was not loaded.
pub type LoadError = Box<dyn std::error::Error + Send + Sync>;

/// Loads an engine on the thread that will run it.
pub type LoadFn<B> = dyn Fn(LoadContext) -> Result<LoadedEngine<B>, LoadError> + Send + Sync;

/// What the thread of an engine works with.
pub(crate) struct EngineSetup {
    pub metrics: ModelMetrics,
    /// The waiting requests of the model and its free sequences.
    pub occupancy: Arc<Occupancy>,
    /// Set when all requests must end.
    pub stop: Arc<AtomicBool>,
    pub cancel: CancelHandle,
}

/// Reports that the engine is gone, also after a panic.
struct EndGuard<E: EngineEvents> {
    events: E,
    metrics: ModelMetrics,
    occupancy: Arc<Occupancy>,
}

impl<E: EngineEvents> Drop for EndGuard<E> {
    fn drop(&mut self) {
        self.occupancy.free.store(0, Ordering::SeqCst);
        self.metrics.unloaded();
        self.events.ended();
    }
}

/// Starts the thread of an engine: it loads the engine, then serves it until the queue is dropped or `stop` is set.
///
/// # Errors
/// The system starts no thread.
pub(crate) fn start<B: Backend + 'static>(
    load: Arc<LoadFn<B>>,
    setup: EngineSetup,
    events: impl EngineEvents,
) -> std::io::Result<(EngineQueue, std::thread::JoinHandle<()>)> {
    let (messages, inbox) = channel();
    let waker = messages.clone();
    let wake: WakeFn = Box::new(move || drop(waker.send(EngineCommand::Wake)));
    let queue = EngineQueue { messages, unanswered: Arc::default() };
    let run = move || {
        let EngineSetup { metrics, occupancy, stop, cancel } = setup;
        let guard = EndGuard { events, metrics: metrics.clone(), occupancy: Arc::clone(&occupancy) };
        let engine = match load(LoadContext { wake, cancel }) {
            Ok(engine) => engine,
            Err(error) => return guard.events.loaded(Err(error)),
        };
        let chunk_tokens = match engine.batch.cache() {
            Some(cache) => cache.page_tokens(),
            None => engine.batch.prompt_chunk().min(DEFAULT_CHUNK_TOKENS),
        };
        let LoadedEngine { batch, reclaimable, tokenizer, drafts, placement } = engine;
        guard.events.loaded(Ok(LoadReport { placement, reclaimable }));
        let max_sequences = usize::try_from(reclaimable.sequences).unwrap_or(usize::MAX).max(1);
        let thread = EngineThread {
            batch,
            tokenizer,
            drafts,
            chunk_tokens,
            max_sequences,
            most_sequences: max_sequences,
            kv_ram: None,
            inbox,
            is_closed: false,
            failure: None,
            occupancy,
            waiting: VecDeque::new(),
            running: HashMap::new(),
            embeddings: VecDeque::new(),
            embedded_last: false,
            is_turn_of_embedding: false,
            kept: Vec::new(),
            metrics,
            reported_cache: Instant::now(),
            stop,
        };
        thread.run(&guard.events);
    };
    let thread = std::thread::Builder::new().name("hpp-engine".to_owned()).spawn(run)?;
    Ok((queue, thread))
}

/// A request that waits.
struct Waiting {
    task: GenerateTask,
    client: Client,
    place: QueuePlace,
    unanswered: Unanswered,
    /// The ticket of the read, while pages of this request are being read.
    ticket: Option<Arc<LoadTicket>>,
    /// Whether it cannot start before pages have been read.
    is_loading: bool,
    /// Stored pages that were in RAM when it arrived.
    in_ram: usize,
    /// When the request first had to wait for pages from disk.
    loads_since: Option<Instant>,
}

/// A request in the batch.
struct Running {
    client: Client,
    top_logprobs: Option<usize>,
    last_token: Option<Instant>,
    park: bool,
    _unanswered: Unanswered,
}

struct EngineThread<B: Backend> {
    batch: Batch<B>,
    tokenizer: Option<TextTokenizer>,
    drafts: Drafts<B>,
    /// Tokens of a chunk of a prompt and of a KV page; kept sequences are truncated to multiples of it.
    chunk_tokens: usize,
    /// Most sequences with states, running and kept, that the current share allows.
    max_sequences: usize,
    /// The most sequences when the engine was loaded.
    most_sequences: usize,
    /// RAM for pages, if the share has changed it since loading.
    kv_ram: Option<u64>,
    inbox: Receiver<EngineCommand>,
    /// Whether there will be no more requests.
    is_closed: bool,
    /// The error that ends this engine although more requests may come.
    failure: Option<ApiError>,
    /// The number of waiting requests (here, in the inbox or in the pool) and of free sequences.
    occupancy: Arc<Occupancy>,
    waiting: VecDeque<Waiting>,
    running: HashMap<RequestId, Running>,
    embeddings: VecDeque<Embedding<B>>,
    /// Whether the last pass was followed by a chunk of an embedding.
    embedded_last: bool,
    /// Whether an answer has started since the last embedding was computed.
    is_turn_of_embedding: bool,
    /// Sequences of answered requests, the least recently used first.
    kept: Vec<TokenSequence<B>>,
    metrics: ModelMetrics,
    reported_cache: Instant,
    stop: Arc<AtomicBool>,
}

impl<B: Backend + 'static> EngineThread<B> {
    fn run(mut self, events: &dyn EngineEvents) {
        self.count_free();
        while self.receive(&|| events.idle()) {
            if self.stop.load(Ordering::SeqCst) {
                self.failure = Some(ApiError::shutting_down());
                break;
            }
            self.drop_ended();
            self.start_waiting();
            self.count_free();
            let embeds = self.embeds_next();
            self.pass(if embeds { 0 } else { self.chunk_tokens });
            if embeds && self.failure.is_none() {
                self.embed();
            }
            self.embedded_last = embeds;
            self.count_free();
            self.report();
        }
        if let Some(error) = self.failure.take() {
            // Reported first, so that clients that ask again are not sent to this engine.
            events.ending();
            self.end_all(&error);
            self.end_submitted(&error);
        }
        self.report_cache();
    }

    /// Takes messages; waits for one if there is nothing to do. Returns false if there will be no more, or if the engine cannot go on.
    fn receive(&mut self, on_idle: &dyn Fn()) -> bool {
        let mut was_idle = false;
        loop {
            while self.failure.is_none()
                && let Ok(message) = self.inbox.try_recv()
            {
                self.take(message);
            }
            if self.failure.is_some() {
                return false;
            }
            let can_start = || self.waiting.iter().any(|waiting| !waiting.is_loading);
            if !self.batch.is_empty() || !self.embeddings.is_empty() || can_start() {
                return true;
            }
            if self.is_closed && self.waiting.is_empty() {
                return false;
            }
            self.report_cache();
            if self.waiting.is_empty() && !std::mem::replace(&mut was_idle, true) {
                on_idle();
            }
            match self.inbox.recv_timeout(IDLE_CHECK) {
                Ok(message) => self.take(message),
                Err(_) if self.stop.load(Ordering::SeqCst) || !self.waiting.is_empty() => {
                    self.take(EngineCommand::Wake);
                    return true;
                }
                Err(_) => {}
            }
        }
    }

    fn take(&mut self, message: EngineCommand) {
        match message {
            EngineCommand::Wake => self.waiting.iter_mut().for_each(|waiting| waiting.is_loading = false),
            EngineCommand::Submit(queued, unanswered) => self.enqueue(*queued, unanswered),
            EngineCommand::Share(share) => self.apply_share(share),
            EngineCommand::Close => self.is_closed = true,
        }
    }

    /// Keeps to a share from now on. Kept sequences are dropped at once. Running sequences go on, so that no answer changes.
    fn apply_share(&mut self, share: EngineShare) {
        self.kv_ram = Some(share.kv);
        self.apply_kv_ram_limit();
        self.max_sequences = usize::try_from(share.sequences).unwrap_or(usize::MAX).clamp(1, self.most_sequences);
        self.drop_kept();
        if let Err(error) = self.batch.set_locked(share.locked) {
            tracing::error!(error = hpp_schema::error_line(&error), "cannot lock another part of the weights");
            // The failure ends this engine. The next request loads it again.
            self.failure = Some(GenerateError::from(error).into());
        }
        // With less RAM, the pages that a request waits for may no longer fit: all waiting requests look up pages again.
        self.waiting.iter_mut().for_each(|waiting| waiting.is_loading = false);
    }

    /// Evicts pages from RAM down to the limit of the share, as far as they can be evicted now.
    fn apply_kv_ram_limit(&self) {
        if let (Some(cache), Some(bytes)) = (self.batch.cache(), self.kv_ram) {
            cache.set_ram(bytes);
        }
    }

    /// Puts a request behind all that are at least as important or have waited for longer than [`MOST_OVERTAKEN`]. Starts reading its prompt's pages
    /// from disk.
    fn enqueue(&mut self, Queued { submission: Submission { task, client }, place }: Queued, unanswered: Unanswered) {
        let task = match task {
            EngineTask::Generate(task) => *task,
            EngineTask::Embed(tokens) => {
                return self.embeddings.push_back(Embedding::new(tokens, self.chunk_tokens, client, place, unanswered));
            }
        };
        let (mut in_ram, mut stored) = (0, 0);
        if let Some(cache) = self.batch.cache() {
            let pages = cache.look_up(&task.request.prompt, task.hints.session.as_deref());
            (in_ram, stored) = (cache.in_ram(&pages), pages.len());
            cache.prefetch(&pages, task.hints.priority);
        }
        if task.hints.prefetch {
            return self.answer_prefetch(&task, &client, stored * self.chunk_tokens);
        }
        let priority = task.hints.priority;
        let stays_before =
            |other: &Waiting| other.task.hints.priority >= priority || other.client.arrived.elapsed() > MOST_OVERTAKEN;
        let at = self.waiting.iter().rposition(stays_before).map_or(0, |last| last + 1);
        let (ticket, is_loading, loads_since) = (None, false, None);
        let waiting = Waiting { task, client, place, unanswered, ticket, is_loading, in_ram, loads_since };
        self.waiting.insert(at, waiting);
    }

    /// Answers a request that only prefetches: no tokens, and how many tokens of its prompt are stored or in a kept sequence.
    fn answer_prefetch(&self, GenerateTask { request, hints, .. }: &GenerateTask, client: &Client, stored: usize) {
        let prompt = &request.prompt;
        let most = prompt.len().saturating_sub(2) / self.chunk_tokens * self.chunk_tokens;
        let kept = self.kept.iter().map(|sequence| sequence.shared_prefix(prompt, hints.session.as_deref()));
        let in_kept = kept.max().unwrap_or(0).min(most) / self.chunk_tokens * self.chunk_tokens;
        let (prompt_tokens, reused_tokens) = (prompt.len(), stored.max(in_kept));
        let generated = Generated {
            tokens: vec![],
            text: self.tokenizer.as_ref().map(|_| String::new()),
            finish_reason: FinishReason::Length,
            usage: TokenUsage { prompt_tokens, reused_tokens, completion_tokens: 0 },
            timings: GenerationTimings::default(),
            speculation: None,
        };
        self.metrics.ended("prefetch");
        let _ = client.events.send(RequestEvent::Finished(Box::new(generated)));
    }

    /// Drops requests whose client has disconnected or whose deadline has passed.
    fn drop_ended(&mut self) {
        let (now, metrics) = (Instant::now(), &self.metrics);
        let stays = |client: &Client| {
            let end = client.early_end(now);
            if let Some(end) = end {
                metrics.ended(end.outcome());
                client.fail(ApiError::Timeout);
            }
            end.is_none()
        };
        let before = self.waiting.len();
        self.waiting.retain(|waiting| stays(&waiting.client));
        self.embeddings.retain(|embedding| stays(&embedding.client));
        if self.waiting.len() < before {
            self.waiting.iter_mut().for_each(|waiting| waiting.is_loading = false);
        }
        let done: Vec<RequestId> =
            self.running.iter().filter(|(_, running)| !stays(&running.client)).map(|(id, _)| *id).collect();
        for id in done {
            let park = self.running.remove(&id).is_some_and(|running| running.park);
            if let Some(finished) = self.batch.cancel(id) {
                self.keep(finished.sequence, park);
            }
        }
    }

    /// Starts waiting requests in order while sequences are free. Skips requests whose pages are being read.
    fn start_waiting(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        let mut still_waiting = VecDeque::new();
        while let Some(mut next) = waiting.pop_front() {
            let start = if self.batch.len() < self.answer_places() { self.sequence_for(&mut next) } else { None };
            match start {
                Some(start) => {
                    // Pages are read for one request at a time. This one has its pages, so the next can be read: starts again with the first that
                    // waits.
                    if next.ticket.take().is_some() {
                        still_waiting.append(&mut waiting);
                        waiting = std::mem::take(&mut still_waiting);
                        waiting.iter_mut().for_each(|waiting| waiting.is_loading = false);
                    }
                    self.start(next, start);
                }
                None => still_waiting.push_back(next),
            }
        }
        self.waiting = still_waiting;
    }

    fn start(&mut self, Waiting { task, client, place, unanswered, .. }: Waiting, start: Start<B>) {
        drop(place);
        let Start { sequence, is_kept } = start;
        let GenerateTask { request, top_logprobs, hints } = task;
        let prompt_tokens = request.prompt.len();
        // A request for the logits of its prompt cannot reuse states.
        let usable_tokens = if request.prompt_logits { 0 } else { prompt_tokens };
        let generation = Generation::new(request, self.tokenizer.clone(), self.chunk_tokens);
        let generation = self.drafts.speculate(generation);
        match self.batch.add_to(sequence, generation, hints.session.as_deref(), self.chunk_tokens) {
            Ok((id, kept)) => {
                self.batch.set_priority(id, hints.priority);
                self.metrics.queued.observe(client.arrived.elapsed().as_secs_f64());
                self.metrics.prompt_tokens.inc_by(prompt_tokens as u64);
                self.metrics.cached_tokens.inc_by(kept as u64);
                self.count_in_sequence(usable_tokens, kept, is_kept);
                let (last_token, park, _unanswered) = (None, hints.park, unanswered);
                let usage = TokenUsage { prompt_tokens, reused_tokens: kept, completion_tokens: 0 };
                let _ = client.events.send(RequestEvent::Started(usage));
                let running = Running { client, top_logprobs, last_token, park, _unanswered };
                self.running.insert(id, running);
                self.is_turn_of_embedding = true;
            }
            Err(error) => {
                self.metrics.ended("failed");
                client.fail(error.into());
            }
        }
    }

    /// Runs one pass over all requests. While answers go on, the pass takes at most `prompt_tokens` tokens of prompts: a chunk, or none. If weights
    /// are moved for each pass, all prompts share the pass, because moving weights takes longer than computing the prompts.
    fn pass(&mut self, prompt_tokens: usize) {
        if self.batch.is_empty() {
            return;
        }
        let last = self.batch.engine().last_pass();
        let moves_weights = last.read_bytes + last.uploaded_bytes > 0;
        self.batch.limit_prompts((!moves_weights).then_some(prompt_tokens));
        let (running, metrics) = (&mut self.running, &self.metrics);
        let finished = self.batch.pass::<GenerateError>(&mut |id, event| {
            if let Some(running) = running.get_mut(&id) {
                running.report(event, metrics);
            }
            Ok(())
        });
        if self.batch.items() > 0 {
            self.metrics.passes.inc();
            self.metrics.items.observe(self.batch.items() as f64);
            let last = self.batch.engine().last_pass();
            self.metrics.weight_bytes.inc_by(last.read_bytes + last.uploaded_bytes);
            self.metrics.batched_rows.inc_by(last.batched_rows);
        }
        self.metrics.slowdown.set(self.batch.adaptation().map_or(1.0, Adaptation::slowdown));
        match finished {
            Ok(finished) => finished.into_iter().for_each(|finished| self.finish(finished)),
            Err(error) => {
                tracing::error!(error = hpp_schema::error_line(&error), "a pass failed");
                if error.needs_reload() {
                    // The failure ends this engine. The next request loads it again.
                    self.failure = Some(error.into());
                } else {
                    self.end_all(&error.into());
                }
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
        let _ = running.client.events.send(event);
        self.keep(sequence, running.park);
    }

    /// Ends every request with an error, and drops all states.
    fn end_all(&mut self, error: &ApiError) {
        let waiting = self.waiting.drain(..).map(|waiting| waiting.client);
        let running = self.running.drain().map(|(_, running)| running.client);
        let embeddings = self.embeddings.drain(..).map(|embedding| embedding.client);
        for client in waiting.chain(running).chain(embeddings) {
            self.metrics.ended("failed");
            client.fail(error.clone());
        }
        self.batch.clear();
        self.kept.clear();
    }

    /// Ends every request in the inbox.
    fn end_submitted(&mut self, error: &ApiError) {
        while let Ok(message) = self.inbox.try_recv() {
            if let EngineCommand::Submit(queued, _) = message {
                self.metrics.ended("failed");
                queued.submission.client.fail(error.clone());
            }
        }
    }

    /// Tells the pool how many requests can start before the next pass.
    fn count_free(&self) {
        self.occupancy.free.store(self.max_sequences.saturating_sub(self.batch.len()), Ordering::SeqCst);
    }

    fn report(&mut self) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.running.set(number(self.batch.len()));
        self.metrics.waiting.set(number(self.occupancy.waiting.load(Ordering::SeqCst)));
        self.metrics.idle_sequences.set(number(self.kept.len()));
        self.report_states();
        if self.reported_cache.elapsed() >= CACHE_REPORT {
            self.report_cache();
        }
    }

    /// Reports the bytes of states by tier.
    fn report_states(&self) {
        let (engine, sequences) = (self.batch.engine(), self.with_states() as u64);
        let bytes = |each: u64| i64::try_from(each.saturating_mul(sequences)).unwrap_or(i64::MAX);
        self.metrics.states.device.set(bytes(engine.device_state_bytes()));
        self.metrics.states.ram.set(bytes(engine.host_state_bytes()));
        self.metrics.states.disk.set(bytes(engine.disk_state_bytes()));
    }

    fn report_cache(&mut self) {
        self.apply_kv_ram_limit();
        if let Some(cache) = self.batch.cache() {
            self.metrics.cache.report(&cache.stats(), cache.prompt_end_bytes());
            self.reported_cache = Instant::now();
        }
    }
}

/// After a panic, counts the requests that end with the thread as failed. Their channels close, and nothing else counts them.
impl<B: Backend> Drop for EngineThread<B> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let submitted = self.inbox.try_iter().filter(|message| matches!(message, EngineCommand::Submit(..))).count();
        let ended = self.waiting.len() + self.running.len() + self.embeddings.len() + submitted;
        (0..ended).for_each(|_| self.metrics.ended("failed"));
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
                    None => metrics.first_token.observe((now - self.client.arrived).as_secs_f64()),
                    Some(last) => metrics.between_tokens.observe((now - last).as_secs_f64()),
                }
                self.last_token = Some(now);
                metrics.generated_tokens.inc();
                RequestEvent::Token { id, logprobs: self.top_logprobs.map(|top| token_logprobs(logits, id, top)) }
            }
            GenerationEvent::Text(text) => RequestEvent::Text(text.to_owned()),
        };
        // A disconnected client is noticed by `drop_ended` before the next pass.
        let _ = self.client.events.send(event);
    }
}

#[cfg(test)]
pub(crate) mod tests;
