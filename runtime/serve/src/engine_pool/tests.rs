//! Pools whose loads never end, fail or panic, and what their requests are told; and a pool whose memory limit is lowered.

use super::*;
use crate::engine_thread::{Client, EngineTask, LoadContext, LoadedEngine, RequestEvent};
use crate::metrics::Metrics;
use hpp_engine::mock::MockBackend;
use std::sync::Barrier;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

type Loaded = Result<LoadedEngine<MockBackend>, LoadError>;

/// A pool of one engine with two places in its queue.
fn pool(load: impl Fn(LoadContext) -> Loaded + Send + Sync + 'static) -> EnginePool {
    pool_counted_by(&Metrics::new(), load)
}

fn pool_counted_by(metrics: &Metrics, load: impl Fn(LoadContext) -> Loaded + Send + Sync + 'static) -> EnginePool {
    let metrics = metrics.model("m");
    let source = EngineSource::new("m".to_owned(), MemoryNeeds::default(), metrics, Arc::new(load));
    let settings = PoolSettings { budget: MemoryNeeds::default(), allowed: None, idle_timeout: None, queue: 2 };
    EnginePool::start(vec![source], settings, Arc::default()).unwrap()
}

/// A pool whose load ends when it is cancelled.
fn never_loaded() -> EnginePool {
    pool(until_cancelled)
}

fn until_cancelled(context: LoadContext) -> Loaded {
    while !context.cancel.is_cancelled() {
        std::thread::sleep(Duration::from_millis(1));
    }
    Err("cancelled".into())
}

fn request(deadline: Option<Duration>) -> (Submission, UnboundedReceiver<RequestEvent>) {
    let (events, receiver) = unbounded_channel();
    let arrived = Instant::now();
    let client = Client { events, deadline: deadline.map(|left| arrived + left), arrived };
    (Submission { task: EngineTask::Embed(vec![1]), client }, receiver)
}

fn outcome(waits: Result<Option<oneshot::Receiver<Result<(), ApiError>>>, ApiError>) -> Result<(), ApiError> {
    waits?.map_or(Ok(()), |accepted| accepted.blocking_recv().unwrap())
}

fn message(error: Result<(), ApiError>) -> String {
    error.unwrap_err().to_string()
}

#[test]
fn a_shutdown_ends_a_load_and_the_requests_that_wait_for_it() {
    let pool = never_loaded();
    let (submission, mut events) = request(None);
    let waits = pool.0.submit(0, vec![submission]);
    while pool.report(0).state != EngineState::Loading {
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.close();
    assert!(message(outcome(waits)).contains("shutting down"));
    assert!(matches!(events.try_recv(), Ok(RequestEvent::Failed(_))));
    assert_eq!(pool.report(0).state, EngineState::Unloaded);
    let (submission, _events) = request(None);
    assert!(message(outcome(pool.0.submit(0, vec![submission]))).contains("shutting down"));
}

#[test]
fn requests_wait_for_a_load_within_the_queue_and_their_time() {
    let pool = never_loaded();
    let (late, _late_events) = request(Some(Duration::from_millis(50)));
    let (left, left_events) = request(None);
    let (late, left) = (pool.0.submit(0, vec![late]), pool.0.submit(0, vec![left]));
    let (more, _more_events) = request(None);
    assert_eq!(pool.0.submit(0, vec![more]).map(drop), Err(ApiError::Busy { waiting: 2 }));
    let three = (0..3).map(|_| request(None).0).collect();
    assert_eq!(pool.0.submit(0, three).map(drop), Err(ApiError::TooMany { count: 3, limit: 2, param: "n" }));
    drop(left_events);
    assert_eq!(outcome(late), Err(ApiError::Timeout));
    assert_eq!(outcome(left), Err(ApiError::Timeout), "nobody hears it");
    let (again, _events) = request(None);
    assert!(pool.0.submit(0, vec![again]).is_ok(), "their places are free");
    pool.close();
}

#[test]
fn each_answer_of_a_refused_request_counts() {
    let metrics = Metrics::new();
    let pool = pool_counted_by(&metrics, until_cancelled);
    let (submission, _events) = request(None);
    assert!(pool.0.submit(0, vec![submission]).is_ok());
    let two = (0..2).map(|_| request(None).0).collect();
    assert_eq!(pool.0.submit(0, two).map(drop), Err(ApiError::Busy { waiting: 1 }));
    let text = metrics.to_text();
    assert!(text.contains("hpp_requests_total{model=\"m\",outcome=\"refused\"} 2"), "{text}");
    assert!(text.contains("# HELP hpp_requests Answers by outcome: each choice of a request"), "{text}");
    pool.close();
}

#[test]
fn a_request_waits_for_a_place_in_the_queue_within_its_time() {
    let pool = never_loaded();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let filled: Vec<_> = (0..2).map(|_| request(None)).collect();
    let (submissions, mut events): (Vec<_>, Vec<_>) = filled.into_iter().unzip();
    assert!(pool.0.submit(0, submissions).is_ok());
    let (late, _late_events) = request(Some(Duration::from_millis(50)));
    assert_eq!(runtime.block_on(pool.submit_when_free(0, late)), Err(ApiError::Timeout));
    let (next, mut next_events) = request(Some(Duration::from_millis(500)));
    let waits = async {
        let leaves = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            events.clear();
        };
        let accepted = pool.submit_when_free(0, next);
        futures_util::future::join(accepted, leaves).await.0
    };
    assert_eq!(runtime.block_on(waits), Err(ApiError::Timeout));
    assert!(matches!(next_events.try_recv(), Ok(RequestEvent::Failed(_))), "its time ended in a place of the queue");
    pool.close();
}

#[test]
fn a_load_that_fails_or_panics_fails_its_requests_and_the_next_one_loads_again() {
    let panics = AtomicBool::new(true);
    let pool = pool(move |_| {
        assert!(!panics.swap(false, Ordering::SeqCst), "a defect");
        Err("the disk is gone".into())
    });
    let ask = || {
        let (submission, _events) = request(None);
        message(outcome(pool.0.submit(0, vec![submission])))
    };
    assert!(ask().contains("the engine's thread ended while it loaded"));
    assert_eq!(ask(), "the model \"m\" cannot be loaded: the disk is gone");
    assert_eq!(pool.report(0).error.as_deref(), Some("the disk is gone"));
    assert_eq!(pool.load(0).unwrap_err().to_string(), "the disk is gone");
    pool.close();
}

/// Waits at the barrier when it is dropped.
struct WaitsAtEnd(Arc<Barrier>);

impl Drop for WaitsAtEnd {
    fn drop(&mut self) {
        self.0.wait();
    }
}

#[test]
fn a_request_that_arrives_while_a_failed_engine_is_freed_is_answered_by_the_next() {
    let (gate, is_first) = (Arc::new(Barrier::new(2)), AtomicBool::new(true));
    let meets = Arc::clone(&gate);
    let pool = pool(move |_| {
        if !is_first.swap(false, Ordering::SeqCst) {
            return Ok(crate::engine_thread::tests::load_toy());
        }
        let freed = WaitsAtEnd(Arc::clone(&meets));
        Ok(crate::engine_thread::tests::load_changing(move || {
            let _ = &freed;
        }))
    });
    let ((first, mut first_events), (second, mut second_events)) = (request(None), request(None));
    assert_eq!(outcome(pool.0.submit(0, vec![first])), Ok(()));
    assert!(matches!(first_events.blocking_recv(), Some(RequestEvent::Failed(_))));
    let waits = pool.0.submit(0, vec![second]);
    gate.wait();
    assert_eq!(outcome(waits), Ok(()));
    assert!(matches!(second_events.blocking_recv(), Some(RequestEvent::Embedding(_))));
    pool.close();
}

#[test]
fn a_lowered_limit_takes_pages_from_engines_and_then_unloads_idle_ones() {
    let allowed = Arc::new(std::sync::atomic::AtomicU64::new(u64::MAX));
    let metrics = Metrics::new();
    let source = |name: &str| {
        let needs = MemoryNeeds { host: 1000, ..MemoryNeeds::default() };
        let reclaimable = Reclaimable { kv: 300, sequences: 8, sequence: 10, locked: 0 };
        let load = move |_| Ok(LoadedEngine { reclaimable, ..crate::engine_thread::tests::load_toy() });
        EngineSource::new(name.to_owned(), needs, metrics.model(name), Arc::new(load))
    };
    let reads = Arc::clone(&allowed);
    let settings = PoolSettings {
        budget: MemoryNeeds { host: 2000, ..MemoryNeeds::default() },
        allowed: Some(Arc::new(move || Some(reads.load(Ordering::SeqCst)))),
        idle_timeout: None,
        queue: 2,
    };
    let pool = EnginePool::start(vec![source("a"), source("b")], settings, Arc::default()).unwrap();
    pool.load(0).unwrap();
    pool.load(1).unwrap();
    let reclaimed = |model: &str| metrics.model(model).memory_reclaimed.get();
    let wait = |what: &str, is_so: &dyn Fn() -> bool| {
        let started = Instant::now();
        while !is_so() {
            assert!(started.elapsed() < Duration::from_secs(60), "{what}: {} and {}", reclaimed("a"), reclaimed("b"));
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    allowed.store(1900, Ordering::SeqCst);
    wait("both release pages", &|| (reclaimed("a"), reclaimed("b")) == (50, 50));
    assert_eq!((pool.report(0).state, pool.report(1).state), (EngineState::Loaded, EngineState::Loaded));
    // The excess is more than all pages: the engine used longest ago is unloaded, and the other releases only its own part.
    allowed.store(900, Ordering::SeqCst);
    wait("a is unloaded", &|| pool.report(0).state == EngineState::Unloaded);
    wait("b releases pages", &|| (reclaimed("a"), reclaimed("b")) == (0, 100));
    assert!(!pool.has_room_for(0));
    let (submission, mut events) = request(None);
    assert_eq!(outcome(pool.0.submit(1, vec![submission])), Ok(()));
    assert!(matches!(events.blocking_recv(), Some(RequestEvent::Embedding(_))));
    assert_eq!(metrics.model("b").memory_limit.get(), 900);
    pool.close();
}
