//! The connections of the server: limits of their number and of the time they may take.
//!
//! A connection is *answering* from the arrival of a whole request until the system has taken the last byte of its answer. Otherwise it is *idle*. If
//! there are too many connections, the one that has been idle longest is closed for a new one, so that clients that send nothing cannot keep others
//! out. A connection that is answering is never closed for another.

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
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);
/// Most connections that are being closed, whose descriptors may not be free yet, when the next one is accepted.
const MOST_CLOSING: usize = 32;

/// Limits of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Most connections at a time.
    pub most: usize,
    /// Time for the headers of a request, counted from the end of the previous request.
    pub headers: Duration,
    /// Time for the body of a request.
    pub body: Duration,
    /// Longest time in which a client may accept no byte of an answer that is ready.
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

/// State: no whole request has arrived since the last answer.
const IDLE: u8 = 0;
/// State: a whole request has arrived, and its answer has not ended.
const ANSWERING: u8 = 1;
/// State: the answer has ended, but the system may not have taken all of its bytes.
const FLUSHING: u8 = 2;

/// The state of a connection. Only the connection's own task changes it.
pub(crate) struct ConnectionState {
    state: AtomicU8,
    /// Larger for connections that became idle later.
    idle_since: AtomicU64,
    /// A counter for all connections: it grows when one opens and when one becomes idle.
    clock: Arc<AtomicU64>,
}

impl ConnectionState {
    /// The state of a connection that opens now.
    fn new(clock: Arc<AtomicU64>) -> Self {
        let now = clock.fetch_add(1, Ordering::SeqCst);
        ConnectionState { state: AtomicU8::new(IDLE), idle_since: AtomicU64::new(now), clock }
    }

    /// Called when a whole request has arrived.
    pub fn request_arrived(&self) {
        self.state.store(ANSWERING, Ordering::SeqCst);
    }

    /// Called when the answer has ended. Its last bytes may still wait to be written.
    fn answer_ended(&self) {
        self.state.store(FLUSHING, Ordering::SeqCst);
    }

    /// Called when the system has taken all bytes that were written.
    fn all_written(&self) {
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

/// The address of a request's client; `None` if the client had disconnected already.
#[derive(Clone, Copy)]
pub(crate) struct PeerAddress(pub Option<IpAddr>);

/// The open connections.
#[derive(Default)]
struct Registry {
    open: Mutex<BTreeMap<u64, OpenConnection>>,
    clock: Arc<AtomicU64>,
}

struct OpenConnection {
    state: Arc<ConnectionState>,
    task: JoinHandle<()>,
}

impl Registry {
    fn open(&self) -> MutexGuard<'_, BTreeMap<u64, OpenConnection>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Aborts the task of the connection that has been idle longest, and returns it: the connection is closed when it ends. `None` if none is idle.
fn close_longest_idle(open: &mut BTreeMap<u64, OpenConnection>) -> Option<JoinHandle<()>> {
    let idle = open.iter().filter(|(_, connection)| connection.state.is_idle());
    let longest = idle.min_by_key(|(_, connection)| connection.state.idle_since.load(Ordering::SeqCst));
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

/// Serves connections until `shutdown` completes. Then closes idle connections and lets answers in progress finish.
pub(crate) async fn serve_connections(
    listener: TcpListener,
    router: Router,
    limits: ConnectionLimits,
    shutdown: impl Future<Output = ()>,
) {
    let (registry, (stop, _)) = (Arc::new(Registry::default()), watch::channel(()));
    let accept = async {
        // Lower than `limits.most` while the system lacks descriptors or memory for so many.
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
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    };
    futures_util::future::select(pin!(accept), pin!(shutdown)).await;
    drop(listener);
    close_idle(&registry, 0);
    let _ = stop.send(());
    // Each connection holds a receiver until it ends, so this waits for all of them.
    stop.closed().await;
}

/// Whether a connection ended before it was accepted.
fn is_of_the_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// The response to a new connection if all others are answering.
fn no_place() -> String {
    let what = "all connections of this server are answering requests; try again later (--max-connections)";
    let body = ApiError::Unavailable(what.to_owned()).to_json().to_string();
    format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Serves a new connection in a task of its own, if there is a place for it. Returns the task of the connection that was closed for it, if any.
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
        // The connection is new, so its send buffer has room. If the client has gone already, nobody needs the response.
        let _ = stream.try_write(no_place().as_bytes());
        return None;
    }
    let state = Arc::new(ConnectionState::new(Arc::clone(&registry.clock)));
    let id = state.idle_since.load(Ordering::SeqCst);
    let registered = Registered { registry: Arc::clone(registry), id };
    let serving = serve_connection(stream, router.clone(), limits, Arc::clone(&state), stop, registered);
    let task = tokio::spawn(serving);
    open.insert(id, OpenConnection { state, task });
    closed
}

async fn serve_connection(
    stream: TcpStream,
    router: Router,
    limits: ConnectionLimits,
    state: Arc<ConnectionState>,
    mut stop: watch::Receiver<()>,
    _registered: Registered,
) {
    // Each token is sent at once.
    let _ = stream.set_nodelay(true);
    let peer = PeerAddress(stream.peer_addr().ok().map(|address| address.ip()));
    let service = TowerToHyperService::new(router);
    let service = service_fn(|mut request: Request<Incoming>| {
        if request.body().is_end_stream() {
            state.request_arrived();
        }
        request.extensions_mut().insert(Arc::clone(&state));
        request.extensions_mut().insert(peer);
        let ended = AnswerEnd(Arc::clone(&state));
        let answer = service.call(request);
        async move {
            let Ok(response) = answer.await;
            Ok::<_, Infallible>(response.map(|body| Body::new(WatchedBody { body, _ended: ended })))
        }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.headers);
    let stream = StallLimit::new(stream, limits.stall, Arc::clone(&state));
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut stops = pin!(stop.changed());
    let (mut is_stopping, mut is_told) = (false, false);
    let ended = poll_fn(|context| {
        is_stopping = is_stopping || stops.as_mut().poll(context).is_ready();
        loop {
            if let Poll::Ready(ended) = connection.as_mut().poll(context) {
                return Poll::Ready(ended);
            }
            // A connection that is told to stop while it flushes may close before it has written everything.
            if is_told || !is_stopping || state.is_flushing() {
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

/// Reports the end of an answer when it is dropped together with the answer's body.
struct AnswerEnd(Arc<ConnectionState>);

impl Drop for AnswerEnd {
    fn drop(&mut self) {
        self.0.answer_ended();
    }
}

/// The body of an answer. Dropping it reports the answer's end.
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
