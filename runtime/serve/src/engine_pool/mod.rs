//! The engines of all models: loads one when a request needs it, and unloads idle ones to make room.
//!
//! A request for a loaded engine goes into that engine's queue. A request for an unloaded one waits here until it is loaded, and counts toward the
//! same limit; then all requests that wait for it are sent on in order of arrival. One thread decides what is loaded and unloaded ([`decide`]);
//! requests and the threads of the engines wake it. Another thread asks the system every second how much memory it allows ([`HostLimit`]). If that
//! falls, loaded engines release KV pages in RAM, sequences and locked weights ([`shares`]).

mod decide;
mod memory;
#[cfg(test)]
mod tests;

pub use memory::MemoryNeeds;

use crate::engine_thread::{
    EngineEvents, EngineQueue, EngineSetup, LoadError, LoadFn, LoadReport, Occupancy, QueuePlace, Queued, Submission,
    start,
};
use crate::error::ApiError;
use crate::metrics::ModelMetrics;
use crate::weight_placement::WeightPlacement;
use decide::{Decision, EngineFacts, EngineStatus, MemoryRoom, decide};
use hpp_engine::{Backend, CancelHandle};
use hpp_generate::adapt::{AllowedMemoryFn, EngineShare, HostLimit, MEMORY_INTERVAL, Reclaimable, shares};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Interval between two checks: whether clients of waiting requests have disconnected, and whether a load must end for a shutdown.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// How often a request that waits for a place in the queue looks for one.
const QUEUE_CHECK: Duration = Duration::from_millis(10);

/// How engines share memory.
#[derive(Clone)]
pub struct PoolSettings {
    /// Memory for all engines together.
    pub budget: MemoryNeeds,
    /// Asks the system, every second, how much host memory all engines together may take now. Without it, the limit never changes.
    pub allowed: Option<Arc<AllowedMemoryFn>>,
    /// An engine that had no request for this long is unloaded.
    pub idle_timeout: Option<Duration>,
    /// Most requests of one model that wait.
    pub queue: usize,
}

/// Whether a model's engine is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// It is loaded when a request needs it.
    Unloaded,
    /// It is being loaded.
    Loading,
    /// It answers requests.
    Loaded,
    /// It is being unloaded.
    Unloading,
}

impl EngineState {
    /// The name in `/v1/models`.
    pub fn name(self) -> &'static str {
        match self {
            EngineState::Unloaded => "unloaded",
            EngineState::Loading => "loading",
            EngineState::Loaded => "loaded",
            EngineState::Unloading => "unloading",
        }
    }
}

/// The engine of a model as its users see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineReport {
    /// Whether it is loaded.
    pub state: EngineState,
    /// What it needs.
    pub needs: MemoryNeeds,
    /// Why the last load failed, if it did.
    pub error: Option<String>,
    /// Where its weights lie, or, if it is not loaded, where they lay before.
    pub placement: Option<Vec<WeightPlacement>>,
}

/// Starts the thread of an engine with these events.
type Launch = dyn Fn(EngineSetup, PoolEvents) -> io::Result<(EngineQueue, JoinHandle<()>)> + Send + Sync;

/// One engine of a pool.
pub struct EngineSource {
    /// The model's name, for errors and logs.
    pub name: String,
    /// What it needs of each memory.
    pub needs: MemoryNeeds,
    /// Its metrics.
    pub metrics: ModelMetrics,
    launch: Box<Launch>,
}

impl EngineSource {
    /// An engine that `load` loads, each time it is needed, on a thread of its own.
    pub fn new<B: Backend + 'static>(
        name: String,
        needs: MemoryNeeds,
        metrics: ModelMetrics,
        load: Arc<LoadFn<B>>,
    ) -> Self {
        let launch = Box::new(move |setup, events| start(Arc::clone(&load), setup, events));
        EngineSource { name, needs, metrics, launch }
    }
}

/// The engines of all models of a server. Cheap to clone.
#[derive(Clone)]
pub struct EnginePool(Arc<Shared>);

struct Shared {
    sources: Vec<EngineSource>,
    settings: PoolSettings,
    /// Set when all requests must end.
    stop: Arc<AtomicBool>,
    /// For each model, the number of its waiting requests, here and in its engine, and of its free sequences.
    occupancy: Vec<Arc<Occupancy>>,
    state: Mutex<PoolState>,
    changed: Condvar,
    supervisor: Mutex<Option<JoinHandle<()>>>,
}

struct PoolState {
    engines: Vec<PoolEntry>,
    /// The host memory for all engines together, now.
    limit: HostLimit,
    /// Set when the server ends: nothing is loaded any more.
    is_closed: bool,
}

/// The place of one engine.
#[derive(Default)]
struct PoolEntry {
    status: EntryStatus,
    thread: Option<JoinHandle<()>>,
    /// Requests that wait until it is loaded.
    pending: VecDeque<PendingRequest>,
    /// Callers of `load`, who are told whether it was loaded.
    load_callers: Vec<LoadCaller>,
    error: Option<String>,
    /// Where the weights of the engine loaded last lie or lay.
    placement: Option<Vec<WeightPlacement>>,
}

/// A caller of [`EnginePool::load`].
struct LoadCaller {
    since: Instant,
    result: std::sync::mpsc::Sender<Result<(), LoadError>>,
}

#[derive(Default)]
enum EntryStatus {
    #[default]
    Unloaded,
    Loading {
        queue: EngineQueue,
        cancel: CancelHandle,
        since: Instant,
    },
    Loaded {
        queue: EngineQueue,
        last_used: Instant,
        is_draining: bool,
        /// The part of its memory that can be reclaimed.
        reclaimable: Reclaimable,
        /// What the engine was last told that it may take.
        share: EngineShare,
    },
    Unloading,
}

/// Submissions of one request that wait for an engine.
struct PendingRequest {
    queued: Vec<Queued>,
    arrived: Instant,
    /// Told that the submissions are in the engine's queue, or why not.
    accepted: oneshot::Sender<Result<(), ApiError>>,
}

impl EnginePool {
    /// A pool of engines that are not loaded yet, and the thread that loads them. `stop` ends all requests.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn start(sources: Vec<EngineSource>, settings: PoolSettings, stop: Arc<AtomicBool>) -> io::Result<Self> {
        let occupancy = sources.iter().map(|_| Arc::default()).collect();
        let engines = sources.iter().map(|_| PoolEntry::default()).collect();
        let limit = HostLimit::new(settings.budget.host);
        let state = Mutex::new(PoolState { engines, limit, is_closed: false });
        let (changed, supervisor) = (Condvar::new(), Mutex::default());
        let pool = EnginePool(Arc::new(Shared { sources, settings, stop, occupancy, state, changed, supervisor }));
        let supervised = Arc::clone(&pool.0);
        let thread =
            std::thread::Builder::new().name("hpp-engines".to_owned()).spawn(move || supervise(&supervised))?;
        *pool.0.supervisor.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        if let Some(allowed) = pool.0.settings.allowed.clone() {
            let watched = Arc::downgrade(&pool.0);
            std::thread::Builder::new().name("hpp-memory".to_owned()).spawn(move || watch_limit(&watched, &allowed))?;
        }
        Ok(pool)
    }

    /// Loads an engine before a request needs it.
    ///
    /// # Errors
    /// What its load function reports.
    pub fn load(&self, engine: usize) -> Result<(), LoadError> {
        let (result, loaded) = std::sync::mpsc::channel();
        let mut state = self.0.state();
        if matches!(state.engines[engine].status, EntryStatus::Loaded { .. }) {
            return Ok(());
        }
        state.engines[engine].load_callers.push(LoadCaller { since: Instant::now(), result });
        drop(state);
        self.0.changed.notify_all();
        loaded.recv().unwrap_or_else(|_| Err("the engine's thread ended while it loaded".into()))
    }

    /// Whether an engine could be loaded beside those that are loaded.
    pub fn has_room_for(&self, engine: usize) -> bool {
        let state = self.0.state();
        let loaded = state.engines.iter().zip(&self.0.sources);
        let loaded = loaded.filter(|(entry, _)| !matches!(entry.status, EntryStatus::Unloaded));
        let needs = self.0.sources[engine].needs.clone();
        loaded.fold(needs, |sum, (_, source)| sum.plus(&source.needs)).fits(&self.0.room(&state).budget)
    }

    /// Puts submissions into the queue of an engine, all of them or none. Waits while the engine is being loaded for them.
    ///
    /// # Errors
    /// There is no room for all of them in the queue now ([`ApiError::Busy`]) or ever, or the engine cannot be loaded.
    pub async fn submit(&self, engine: usize, submissions: Vec<Submission>) -> Result<(), ApiError> {
        accepted(self.0.submit(engine, submissions)?).await
    }

    /// Like [`submit`](Self::submit) of one submission, but waits while the queue is full.
    ///
    /// # Errors
    /// Its time limit has passed, or the engine cannot be loaded.
    pub async fn submit_when_free(&self, engine: usize, submission: Submission) -> Result<(), ApiError> {
        let places = loop {
            if let Ok(places) = QueuePlace::take(&self.0.occupancy[engine], 1, self.0.settings.queue) {
                break places;
            }
            if let Some(end) = submission.client.early_end(Instant::now()) {
                self.0.sources[engine].metrics.ended(end.outcome());
                return Err(ApiError::Timeout);
            }
            tokio::time::sleep(QUEUE_CHECK).await;
        };
        accepted(self.0.enqueue(engine, vec![submission], places)?).await
    }

    /// Most requests of one model that may wait.
    pub fn queue_limit(&self) -> usize {
        self.0.settings.queue
    }

    /// Whether an engine is loaded, and what it needs.
    pub fn report(&self, engine: usize) -> EngineReport {
        let state = self.0.state();
        let entry = &state.engines[engine];
        let state = match entry.status {
            EntryStatus::Unloaded => EngineState::Unloaded,
            EntryStatus::Loading { .. } => EngineState::Loading,
            EntryStatus::Loaded { .. } => EngineState::Loaded,
            EntryStatus::Unloading => EngineState::Unloading,
        };
        let (needs, placement) = (self.0.sources[engine].needs.clone(), entry.placement.clone());
        EngineReport { state, needs, error: entry.error.clone(), placement }
    }

    /// Ends loads in progress and unloads all engines, once their requests are answered.
    pub fn close(&self) {
        self.0.state().is_closed = true;
        self.0.changed.notify_all();
        let supervisor = self.0.supervisor.lock().unwrap_or_else(PoisonError::into_inner).take();
        supervisor.into_iter().for_each(|thread| drop(thread.join()));
    }
}

/// Receives the news that submissions are in the queue of their engine. `None` if they are there already.
type Acceptance = Option<oneshot::Receiver<Result<(), ApiError>>>;

/// Waits until submissions are in the queue of their engine.
async fn accepted(acceptance: Acceptance) -> Result<(), ApiError> {
    match acceptance {
        Some(accepted) => accepted.await.unwrap_or_else(|_| Err(ApiError::engine_gone())),
        None => Ok(()),
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts submissions into the queue of an engine, if it has room for all of them.
    fn submit(&self, engine: usize, submissions: Vec<Submission>) -> Result<Acceptance, ApiError> {
        let (count, limit, metrics) = (submissions.len(), self.settings.queue, &self.sources[engine].metrics);
        if count > limit {
            return Err(ApiError::TooMany { count, limit, param: "n" });
        }
        let places = QueuePlace::take(&self.occupancy[engine], count, limit).map_err(|waiting| {
            (0..count).for_each(|_| metrics.ended("refused"));
            ApiError::Busy { waiting }
        })?;
        self.enqueue(engine, submissions, places)
    }

    /// Puts submissions into the queue of an engine if it is loaded, else among the requests that wait until it is.
    fn enqueue(
        &self,
        engine: usize,
        submissions: Vec<Submission>,
        places: Vec<QueuePlace>,
    ) -> Result<Acceptance, ApiError> {
        let mut state = self.state();
        if state.is_closed {
            return Err(ApiError::shutting_down());
        }
        let queued = submissions.into_iter().zip(places).map(|(submission, place)| Queued { submission, place });
        let entry = &mut state.engines[engine];
        if let EntryStatus::Loaded { queue, last_used, is_draining: false, .. } = &mut entry.status {
            *last_used = Instant::now();
            queued.for_each(|queued| queue.submit(queued));
            return Ok(None);
        }
        let (accepted, is_accepted) = oneshot::channel();
        entry.pending.push_back(PendingRequest { queued: queued.collect(), arrived: Instant::now(), accepted });
        self.report_waiting(engine);
        drop(state);
        self.changed.notify_all();
        Ok(Some(is_accepted))
    }

    fn report_waiting(&self, engine: usize) {
        let waiting = self.occupancy[engine].waiting.load(Ordering::SeqCst);
        self.sources[engine].metrics.waiting.set(i64::try_from(waiting).unwrap_or(i64::MAX));
    }

    fn facts<'a>(&'a self, state: &PoolState) -> Vec<EngineFacts<'a>> {
        let facts = state.engines.iter().zip(&self.sources).map(|(entry, source)| {
            let requested = entry.pending.front().map(|request| request.arrived);
            let wanted = entry.load_callers.first().map(|caller| caller.since);
            let status = match &entry.status {
                EntryStatus::Unloaded => EngineStatus::Unloaded,
                EntryStatus::Loading { .. } | EntryStatus::Unloading => EngineStatus::Changing,
                EntryStatus::Loaded { queue, last_used, is_draining, .. } => {
                    EngineStatus::Loaded { is_idle: queue.is_idle(), is_draining: *is_draining, last_used: *last_used }
                }
            };
            let kv = match &entry.status {
                EntryStatus::Loaded { reclaimable, .. } => reclaimable.kv,
                EntryStatus::Unloaded | EntryStatus::Loading { .. } | EntryStatus::Unloading => 0,
            };
            EngineFacts { status, needs: &source.needs, kv, wanted_since: requested.into_iter().chain(wanted).min() }
        });
        facts.collect()
    }

    /// The memory that engines may take now.
    fn room(&self, state: &PoolState) -> MemoryRoom {
        let loaded = state.engines.iter().zip(&self.sources);
        let loaded = loaded.filter(|(entry, _)| !matches!(entry.status, EntryStatus::Unloaded));
        let taken = loaded.map(|(_, source)| source.needs.host).fold(0, u64::saturating_add);
        let host = state.limit.bytes();
        // Counts only the excess that lowering the limit caused. An engine that exceeded the first limit is loaded alone, and that excess is the
        // user's choice.
        let excess = taken.min(state.limit.at_start()).saturating_sub(host);
        MemoryRoom { budget: MemoryNeeds { host, ..self.settings.budget.clone() }, excess }
    }

    /// Tells each loaded engine what it may take, if that has changed.
    fn share_memory(&self, state: &mut PoolState) {
        let room = self.room(state);
        let loaded =
            state.engines.iter_mut().zip(&self.sources).filter_map(|(entry, source)| match &mut entry.status {
                EntryStatus::Loaded { queue, share, reclaimable, .. } => Some((queue, share, *reclaimable, source)),
                EntryStatus::Unloaded | EntryStatus::Loading { .. } | EntryStatus::Unloading => None,
            });
        let loaded: Vec<_> = loaded.collect();
        let reclaimable: Vec<Reclaimable> = loaded.iter().map(|(_, _, reclaimable, _)| *reclaimable).collect();
        for ((queue, share, reclaimable, source), now) in loaded.into_iter().zip(shares(&reclaimable, room.excess)) {
            if *share == now {
                continue;
            }
            let (before, after) = (reclaimable.reclaimed(share), reclaimable.reclaimed(&now));
            let why = if after > before { "less memory is allowed" } else { "more memory is allowed" };
            let EngineShare { kv, sequences, locked } = now;
            tracing::warn!(
                model = source.name,
                limit = room.budget.host,
                excess = room.excess,
                kv_ram = kv,
                sequences,
                locked,
                "{why}: the model keeps so much of what it can do without"
            );
            source.metrics.memory_reclaimed.set(i64::try_from(after).unwrap_or(i64::MAX));
            *share = now;
            queue.share(now);
        }
    }

    /// Ends waiting requests whose client has disconnected or whose deadline has passed. Ends all of them if the server stops.
    fn drop_ended(&self, state: &mut PoolState) {
        let now = Instant::now();
        let stops = self.stop.load(Ordering::SeqCst) || state.is_closed;
        for (engine, entry) in state.engines.iter_mut().enumerate() {
            let before = entry.pending.len();
            for request in std::mem::take(&mut entry.pending) {
                let metrics = &self.sources[engine].metrics;
                let end = request.queued.iter().find_map(|queued| queued.submission.client.early_end(now));
                match end {
                    _ if stops => request.refuse("failed", ApiError::shutting_down(), metrics),
                    Some(end) => request.refuse(end.outcome(), ApiError::Timeout, metrics),
                    None => entry.pending.push_back(request),
                }
            }
            if entry.pending.len() < before {
                self.report_waiting(engine);
            }
        }
    }

    fn load(self: &Arc<Self>, state: &mut PoolState, engine: usize) {
        let source = &self.sources[engine];
        let cancel = CancelHandle::new();
        let setup = EngineSetup {
            metrics: source.metrics.clone(),
            occupancy: Arc::clone(&self.occupancy[engine]),
            stop: Arc::clone(&self.stop),
            cancel: cancel.clone(),
        };
        tracing::info!(model = source.name, "loading");
        match (source.launch)(setup, PoolEvents { pool: Arc::clone(self), engine }) {
            Ok((queue, thread)) => {
                let entry = &mut state.engines[engine];
                entry.status = EntryStatus::Loading { queue, cancel, since: Instant::now() };
                entry.thread = Some(thread);
            }
            Err(error) => self.load_failed(&mut state.engines[engine], engine, error.into()),
        }
    }

    /// Tells all requests and callers that wait for an engine that it was not loaded.
    fn load_failed(&self, entry: &mut PoolEntry, engine: usize, error: LoadError) {
        let source = &self.sources[engine];
        source.metrics.load_errors.inc();
        let why = hpp_schema::error_line(&*error);
        tracing::error!(model = source.name, error = why, "cannot load the model");
        let refusal = ApiError::Unavailable(format!("the model {:?} cannot be loaded: {why}", source.name));
        for request in entry.pending.drain(..) {
            request.refuse("failed", refusal.clone(), &source.metrics);
        }
        let mut callers = std::mem::take(&mut entry.load_callers).into_iter();
        let last = callers.next_back();
        callers.for_each(|caller| drop(caller.result.send(Err(why.clone().into()))));
        if let Some(last) = last {
            let _ = last.result.send(Err(error));
        }
        entry.error = Some(why);
        self.report_waiting(engine);
    }

    fn unload(&self, entry: &mut PoolEntry, engine: usize) {
        if let EntryStatus::Loaded { queue, .. } = std::mem::replace(&mut entry.status, EntryStatus::Unloading) {
            tracing::info!(model = self.sources[engine].name, "unloading");
            drop(queue);
        }
    }
}

impl PoolEntry {
    /// Sends waiting requests on to the engine, which is now loaded or resumes.
    fn send_on(&mut self) {
        let EntryStatus::Loaded { queue, last_used, is_draining, .. } = &mut self.status else { return };
        (*is_draining, *last_used) = (false, Instant::now());
        for request in self.pending.drain(..) {
            request.queued.into_iter().for_each(|queued| queue.submit(queued));
            let _ = request.accepted.send(Ok(()));
        }
    }
}

impl PendingRequest {
    fn refuse(self, outcome: &str, error: ApiError, metrics: &ModelMetrics) {
        for queued in self.queued {
            metrics.ended(outcome);
            queued.submission.client.fail(error.clone());
        }
        let _ = self.accepted.send(Err(error));
    }
}

/// Loads and unloads engines until the pool is closed and everything is unloaded.
fn supervise(shared: &Arc<Shared>) {
    let mut state = shared.state();
    loop {
        shared.drop_ended(&mut state);
        let until = if state.is_closed || shared.stop.load(Ordering::SeqCst) {
            match close(shared, &mut state) {
                Closing::Done => return,
                Closing::Waits => Some(Instant::now() + CHECK_INTERVAL),
            }
        } else {
            let facts = shared.facts(&state);
            let now = Instant::now();
            let room = shared.room(&state);
            match decide(&facts, &room, shared.settings.idle_timeout, now) {
                Decision::Load(engine) => {
                    shared.load(&mut state, engine);
                    continue;
                }
                Decision::Unload(engine) => {
                    shared.unload(&mut state.engines[engine], engine);
                    continue;
                }
                Decision::Drain(engine) => {
                    if let EntryStatus::Loaded { is_draining, .. } = &mut state.engines[engine].status {
                        *is_draining = true;
                    }
                    continue;
                }
                Decision::Resume(engine) => {
                    state.engines[engine].send_on();
                    continue;
                }
                Decision::Wait(until) => {
                    shared.share_memory(&mut state);
                    until
                }
            }
        };
        let is_loading = |entry: &PoolEntry| matches!(entry.status, EntryStatus::Loading { .. });
        let checks = state.engines.iter().any(|entry| !entry.pending.is_empty() || is_loading(entry));
        let check = checks.then(|| Instant::now() + CHECK_INTERVAL);
        state = match until.into_iter().chain(check).min() {
            None => shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now());
                shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
}

/// Follows the memory that the system allows until the pool is closed or gone.
fn watch_limit(pool: &Weak<Shared>, allowed: &Arc<AllowedMemoryFn>) {
    while let Some(shared) = pool.upgrade() {
        // The system is asked outside the lock that requests take.
        let allowed = allowed();
        let mut state = shared.state();
        if state.is_closed {
            return;
        }
        let has_changed = allowed.is_some_and(|allowed| state.limit.observe(allowed, Instant::now()));
        let limit = state.limit.bytes();
        // Set inside the lock, so that the metrics never show shares of a limit before they show the limit.
        let shown = i64::try_from(limit).unwrap_or(i64::MAX);
        for source in &shared.sources {
            source.metrics.memory_limit.set(shown);
        }
        drop(state);
        if has_changed {
            tracing::info!(limit, allowed, "the memory for all models has changed");
            shared.changed.notify_all();
        }
        drop(shared);
        std::thread::sleep(MEMORY_INTERVAL);
    }
}

/// Whether all engines are unloaded.
enum Closing {
    Done,
    Waits,
}

/// Ends loads in progress and, once the pool is closed, unloads everything.
fn close(shared: &Shared, state: &mut PoolState) -> Closing {
    let is_closed = state.is_closed;
    for (engine, entry) in state.engines.iter_mut().enumerate() {
        match &entry.status {
            EntryStatus::Loading { cancel, .. } => cancel.cancel(),
            EntryStatus::Loaded { .. } if is_closed => shared.unload(entry, engine),
            EntryStatus::Loaded { .. } | EntryStatus::Unloading | EntryStatus::Unloaded => {}
        }
    }
    let is_unloaded = |entry: &PoolEntry| matches!(entry.status, EntryStatus::Unloaded);
    if is_closed && state.engines.iter().all(is_unloaded) {
        for entry in &mut state.engines {
            // These threads have reported their end and are about to return.
            entry.thread.take().into_iter().for_each(|thread| drop(thread.join()));
        }
        return Closing::Done;
    }
    Closing::Waits
}

/// What the thread of an engine tells its pool.
pub(crate) struct PoolEvents {
    pool: Arc<Shared>,
    engine: usize,
}

impl EngineEvents for PoolEvents {
    fn loaded(&self, result: Result<LoadReport, LoadError>) {
        let metrics = &self.pool.sources[self.engine].metrics;
        let mut state = self.pool.state();
        let entry = &mut state.engines[self.engine];
        match (std::mem::take(&mut entry.status), result) {
            (EntryStatus::Loading { queue, since, .. }, Ok(LoadReport { placement, reclaimable })) => {
                metrics.loads.inc();
                metrics.load_seconds.inc_by(since.elapsed().as_secs_f64());
                metrics.loaded.set(1);
                let (last_used, share) = (Instant::now(), reclaimable.all());
                entry.status = EntryStatus::Loaded { queue, last_used, is_draining: false, reclaimable, share };
                entry.error = None;
                entry.placement = Some(placement);
                entry.send_on();
                entry.load_callers.drain(..).for_each(|caller| drop(caller.result.send(Ok(()))));
            }
            (_, Ok(_)) => {}
            (_, Err(error)) => {
                // The entry stays in this state until the thread has ended.
                entry.status = EntryStatus::Unloading;
                self.pool.load_failed(entry, self.engine, error);
            }
        }
        drop(state);
        self.pool.changed.notify_all();
    }

    fn idle(&self) {
        let mut state = self.pool.state();
        if let EntryStatus::Loaded { last_used, .. } = &mut state.engines[self.engine].status {
            *last_used = Instant::now();
        }
        drop(state);
        self.pool.changed.notify_all();
    }

    fn ending(&self) {
        // From now on, requests wait until it is loaded again.
        self.pool.state().engines[self.engine].status = EntryStatus::Unloading;
        self.pool.changed.notify_all();
    }

    fn ended(&self) {
        let mut state = self.pool.state();
        let entry = &mut state.engines[self.engine];
        self.pool.sources[self.engine].metrics.loaded.set(0);
        self.pool.sources[self.engine].metrics.memory_reclaimed.set(0);
        if let EntryStatus::Loading { .. } = entry.status {
            // The thread ended without reporting a result: it panicked.
            self.pool.load_failed(entry, self.engine, "the engine's thread ended while it loaded".into());
        }
        entry.status = EntryStatus::Unloaded;
        self.pool.report_waiting(self.engine);
        drop(state);
        self.pool.changed.notify_all();
    }
}
