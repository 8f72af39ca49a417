//! The connections of the server: how many there may be, and how long they may take.
//!
//! A connection is *idle* until a request has arrived whole, and again once the system has taken the last byte of its answer; in between it
//! is *answering*. Where there are
//! too many, the one that has been idle longest is closed for a new one, so that clients that say nothing cannot keep others out. One that
//! is answering is never closed for another.

mod stalled;

use crate::error::ApiError;
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use stalled::StallLimit;
use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Wait after the system refused a connection for lack of descriptors or memory.
const REFUSED_BY_SYSTEM: Duration = Duration::from_millis(50);
/// Closed connections whose descriptors may not be free yet when the next is accepted.
const MOST_CLOSING: usize = 32;

/// Limits of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Most at a time.
    pub most: usize,
    /// Time for the headers of a request, from the end of the one before.
    pub headers: Duration,
    /// Time for the body of a request.
    pub body: Duration,
    /// Longest time in which a client takes nothing of an answer that is ready.
    pub stall: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        ConnectionLimits {
            most: 512,
            headers: Duration::from_secs(30),
            body: Duration::from_secs(60),
            stall: Duration::from_secs(60),
        }
    }
}

/// No request has arrived whole since the last answer.
const IDLE: u8 = 0;
/// A request has arrived whole, and the end of its answer is not known.
const ANSWERING: u8 = 1;
/// The answer has ended, and the system may not have taken all of it.
const FLUSHING: u8 = 2;

/// What a connection does. Only its own task changes it.
pub(crate) struct Activity {
    state: AtomicU8,
    /// Larger for connections that became idle later.
    idle_since: AtomicU64,
    /// Counts what happens on all connections: those that open, and ends of answers.
    clock: Arc<AtomicU64>,
}

impl Activity {
    /// A connection that opens now.
    fn new(clock: Arc<AtomicU64>) -> Self {
        let now = clock.fetch_add(1, Ordering::SeqCst);
        Activity { state: AtomicU8::new(IDLE), idle_since: AtomicU64::new(now), clock }
    }

    /// A request has arrived whole.
    pub fn answers(&self) {
        self.state.store(ANSWERING, Ordering::SeqCst);
    }

    /// The answer has ended; its last bytes may wait to be written.
    fn ends(&self) {
        self.state.store(FLUSHING, Ordering::SeqCst);
    }

    /// The system has taken all that was written.
    fn flushed(&self) {
        if self.is_flushing() {
            self.idle_since.store(self.clock.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
            self.state.store(IDLE, Ordering::SeqCst);
        }
    }

    fn is_idle(&self) -> bool {
        self.state.load(Ordering::SeqCst) == IDLE
    }

    fn is_flushing(&self) -> bool {
        self.state.load(Ordering::SeqCst) == FLUSHING
    }
}

/// Where the client of a request is, unless it has left already.
#[derive(Clone, Copy)]
pub(crate) struct PeerAddress(pub Option<IpAddr>);

/// The open connections.
#[derive(Default)]
struct Registry {
    open: Mutex<BTreeMap<u64, OpenConnection>>,
    clock: Arc<AtomicU64>,
}

struct OpenConnection {
    activity: Arc<Activity>,
    task: JoinHandle<()>,
}

impl Registry {
    fn open(&self) -> MutexGuard<'_, BTreeMap<u64, OpenConnection>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Closes the connection that has been idle longest, once the task that is returned has ended. `None` if all are answering.
fn close_longest_idle(open: &mut BTreeMap<u64, OpenConnection>) -> Option<JoinHandle<()>> {
    let idle = open.iter().filter(|(_, connection)| connection.activity.is_idle());
    let longest = idle.min_by_key(|(_, connection)| connection.activity.idle_since.load(Ordering::SeqCst));
    let id = longest.map(|(id, _)| *id)?;
    let task = open.remove(&id)?.task;
    task.abort();
    Some(task)
}

/// Closes idle connections, those that have been idle longest first, until at most `most` are open.
fn close_idle(registry: &Registry, most: usize) {
    let mut open = registry.open();
    while open.len() > most && close_longest_idle(&mut open).is_some() {}
}

/// Removes a connection from the registry when its task ends.
struct Registered {
    registry: Arc<Registry>,
    id: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.registry.open().remove(&self.id);
    }
}

/// Serves connections until `shutdown` completes, then lets answers in progress finish. Idle connections are closed then.
pub(crate) async fn serve_connections(
    listener: TcpListener,
    router: Router,
    limits: ConnectionLimits,
    shutdown: impl Future<Output = ()>,
) {
    let (registry, (stop, _)) = (Arc::new(Registry::default()), watch::channel(()));
    let accept = async {
        // Fewer than `limits.most` while the system has descriptors or memory for fewer.
        let mut most = limits.most;
        let mut closing = VecDeque::new();
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let limits = ConnectionLimits { most, ..limits };
                    closing.extend(admit(&registry, stream, &router, limits, stop.subscribe()));
                    if closing.len() > MOST_CLOSING
                        && let Some(closed) = closing.pop_front()
                    {
                        let _ = closed.await;
                    }
                    most = if registry.open().len() <= most / 2 { limits.most } else { most };
                }
                Err(error) if is_of_the_client(&error) => {}
                Err(error) => {
                    let open = registry.open().len();
                    most = (open - open / 4).clamp(1, most);
                    tracing::warn!(%error, open, most, "cannot accept a connection: idle ones are closed");
                    close_idle(&registry, most);
                    tokio::time::sleep(REFUSED_BY_SYSTEM).await;
                }
            }
        }
    };
    futures_util::future::select(pin!(accept), pin!(shutdown)).await;
    drop(listener);
    close_idle(&registry, 0);
    let _ = stop.send(());
    // Each connection has a receiver until it ends.
    stop.closed().await;
}

/// Whether a connection ended before it was accepted.
fn is_of_the_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// The answer to a connection that finds no place, because all others are answering.
fn no_place() -> String {
    let what = "all connections of this server are answering requests; try again later (--max-connections)";
    let body = ApiError::Unavailable(what.to_owned()).to_json().to_string();
    format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Serves a new connection in a task of its own, if there is a place for it. Returns the task of the one that is closed for it, if any.
fn admit(
    registry: &Arc<Registry>,
    stream: TcpStream,
    router: &Router,
    limits: ConnectionLimits,
    stop: watch::Receiver<()>,
) -> Option<JoinHandle<()>> {
    let mut open = registry.open();
    let closed = if open.len() >= limits.most { close_longest_idle(&mut open) } else { None };
    if open.len() >= limits.most {
        // It is new, so its buffer has room; if it is gone already, nobody needs the answer.
        let _ = stream.try_write(no_place().as_bytes());
        return None;
    }
    let activity = Arc::new(Activity::new(Arc::clone(&registry.clock)));
    let id = activity.idle_since.load(Ordering::SeqCst);
    let registered = Registered { registry: Arc::clone(registry), id };
    let serving = serve_connection(stream, router.clone(), limits, Arc::clone(&activity), stop, registered);
    let task = tokio::spawn(serving);
    open.insert(id, OpenConnection { activity, task });
    closed
}

async fn serve_connection(
    stream: TcpStream,
    router: Router,
    limits: ConnectionLimits,
    activity: Arc<Activity>,
    mut stop: watch::Receiver<()>,
    _registered: Registered,
) {
    // Tokens are sent as they come.
    let _ = stream.set_nodelay(true);
    let peer = PeerAddress(stream.peer_addr().ok().map(|address| address.ip()));
    let service = TowerToHyperService::new(router);
    let service = service_fn(|mut request: Request<Incoming>| {
        if request.body().is_end_stream() {
            activity.answers();
        }
        request.extensions_mut().insert(Arc::clone(&activity));
        request.extensions_mut().insert(peer);
        let ended = AnswerEnd(Arc::clone(&activity));
        let answer = service.call(request);
        async move {
            let Ok(response) = answer.await;
            Ok::<_, Infallible>(response.map(|body| Body::new(WatchedBody { body, _ended: ended })))
        }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.headers);
    let stream = StallLimit::new(stream, limits.stall, Arc::clone(&activity));
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut stops = pin!(stop.changed());
    let (mut is_stopping, mut is_told) = (false, false);
    let ended = poll_fn(|context| {
        is_stopping = is_stopping || stops.as_mut().poll(context).is_ready();
        loop {
            if let Poll::Ready(ended) = connection.as_mut().poll(context) {
                return Poll::Ready(ended);
            }
            // A connection that is told while it flushes may close before it has written everything.
            if is_told || !is_stopping || activity.is_flushing() {
                return Poll::Pending;
            }
            is_told = true;
            connection.as_mut().graceful_shutdown();
        }
    });
    if let Err(error) = ended.await {
        tracing::debug!(%error, "a connection ended");
    }
}

/// Notes the end of an answer when it is dropped, with the last of it.
struct AnswerEnd(Arc<Activity>);

impl Drop for AnswerEnd {
    fn drop(&mut self) {
        self.0.ends();
    }
}

/// The body of an answer.
struct WatchedBody {
    body: Body,
    _ended: AnswerEnd,
}

impl HttpBody for WatchedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests;
