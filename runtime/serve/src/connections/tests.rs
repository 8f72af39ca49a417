//! Clients that are slow, silent or too many, with short limits.

use super::*;
use axum::response::IntoResponse;
use axum::routing::get;
use futures_util::stream::unfold;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream as Client};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;
use tokio::sync::Notify;

/// Longer than anything in these tests takes, unless it never ends.
const WAIT: Duration = Duration::from_secs(20);
const LIMITS: ConnectionLimits = ConnectionLimits {
    most: 8,
    headers: Duration::from_millis(300),
    body: Duration::from_millis(300),
    stall: Duration::from_millis(300),
};

/// Bytes of an answer that is larger than the system's socket buffers.
const LARGE: usize = 64 << 20;

/// A server with four paths: `/` answers at once, `/large` with [`LARGE`] bytes, `/held` after `release`, and `/endless` tells `ended` when its
/// answer is dropped.
struct TestServer {
    address: SocketAddr,
    /// Receives a message for each request for `/held`.
    arrived: Receiver<()>,
    release: Arc<Notify>,
    ended: Receiver<()>,
    shutdown: Arc<Notify>,
    runtime: tokio::runtime::Runtime,
    served: tokio::task::JoinHandle<()>,
}

struct TellsEnd(Sender<()>);

impl Drop for TellsEnd {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

impl TestServer {
    fn start(limits: ConnectionLimits) -> Self {
        let (release, shutdown) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let ((ends, ended), (arrives, arrived)) = (channel(), channel());
        let released = Arc::clone(&release);
        let held = move |request: Request| async move {
            request.extensions().get::<Arc<ConnectionState>>().unwrap().request_arrived();
            let is_released = released.notified();
            let _ = arrives.send(());
            is_released.await;
            "held"
        };
        let endless = move || async move {
            let parts = unfold(TellsEnd(ends), |end| async move {
                Some((Ok::<_, Infallible>(Bytes::from_static(&[b'x'; 1 << 16])), end))
            });
            Body::from_stream(parts).into_response()
        };
        let router = Router::new()
            .route("/", get(|| async { "ok" }))
            .route("/large", get(|| async { "x".repeat(LARGE) }))
            .route("/held", get(held))
            .route("/endless", get(endless));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let stop = Arc::clone(&shutdown);
        let served = runtime.spawn(async move { serve_connections(listener, router, limits, stop.notified()).await });
        TestServer { address, arrived, release, ended, shutdown, runtime, served }
    }

    fn connect(&self) -> Client {
        let client = Client::connect(self.address).unwrap();
        client.set_read_timeout(Some(WAIT)).unwrap();
        client
    }

    /// Opens a connection and sends a request for a path.
    fn ask(&self, path: &str) -> Client {
        let mut client = self.connect();
        write!(client, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        client
    }

    /// Opens connections whose answers wait for `release`.
    fn hold(&self, count: usize) -> Vec<Client> {
        let held = (0..count).map(|_| self.ask("/held")).collect();
        (0..count).for_each(|_| self.arrived.recv_timeout(WAIT).unwrap());
        held
    }

    /// Whether a request is answered.
    fn answers(&self) -> bool {
        rest(self.ask("/")).ends_with("ok")
    }

    /// Whether the server ends soon after a shutdown is requested.
    fn ends(self) -> bool {
        self.shutdown.notify_one();
        self.runtime.block_on(async { tokio::time::timeout(WAIT / 2, self.served).await }).is_ok()
    }
}

/// Everything that the server sends until the connection ends.
fn rest(mut client: Client) -> String {
    let mut text = Vec::new();
    // A connection that the server closes with unread bytes is reset.
    let _ = client.read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

/// How long the server keeps a connection whose client sends `bytes` one by one.
fn kept(server: &TestServer, bytes: &[u8]) -> Duration {
    let mut client = server.connect();
    client.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let started = Instant::now();
    for byte in bytes.iter().cycle() {
        assert!(started.elapsed() < WAIT, "it is never closed");
        let sent = client.write_all(&[*byte]);
        match client.read(&mut [0; 512]) {
            Err(error)
                if sent.is_ok() && matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            _ => return started.elapsed(),
        }
    }
    unreachable!("the bytes are repeated")
}

#[test]
fn headers_that_never_end_are_not_waited_for() {
    let server = TestServer::start(LIMITS);
    let limits = LIMITS.headers..WAIT;
    assert!(limits.contains(&kept(&server, b"GET / HTTP/1.1\r\nx: ")));
    let silent = server.connect();
    let started = Instant::now();
    assert_eq!(rest(silent), "");
    assert!(limits.contains(&started.elapsed()));
    assert!(server.answers() && server.ends());
}

#[test]
fn an_answer_that_its_client_does_not_take_is_dropped() {
    let server = TestServer::start(LIMITS);
    let started = Instant::now();
    let client = server.ask("/endless");
    server.ended.recv_timeout(WAIT).expect("it is dropped");
    assert!(started.elapsed() >= LIMITS.stall);
    drop(client);
    assert!(server.answers() && server.ends());
}

#[test]
fn a_slow_client_that_takes_its_answer_goes_on() {
    let server = TestServer::start(LIMITS);
    let mut client = server.ask("/endless");
    let (started, mut part) = (Instant::now(), vec![0; 1 << 20]);
    while started.elapsed() < LIMITS.stall * 3 {
        client.read_exact(&mut part).unwrap();
        std::thread::sleep(LIMITS.stall / 5);
    }
    assert!(server.ended.try_recv().is_err());
    client.shutdown(Shutdown::Write).unwrap();
    server.ended.recv_timeout(WAIT).expect("a client that has closed its side has left");
    assert!(server.ends());
}

#[test]
fn silent_connections_give_way_and_answers_do_not() {
    let patient = Duration::from_secs(3600);
    let server = TestServer::start(ConnectionLimits { headers: patient, ..LIMITS });
    let held = server.hold(4);
    let silent: Vec<Client> = (0..100).map(|_| server.connect()).collect();
    assert!(server.answers());
    silent.iter().for_each(|client| client.set_read_timeout(Some(Duration::from_millis(1))).unwrap());
    let is_open = |mut client: &Client| match client.read(&mut [0]) {
        Err(error) => matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut),
        Ok(read) => read > 0,
    };
    let started = Instant::now();
    while silent.iter().filter(|client| is_open(client)).count() > 4 {
        assert!(started.elapsed() < WAIT, "at most eight connections, of which four are answering");
    }
    server.release.notify_waiters();
    let answers: Vec<String> = held.into_iter().map(rest).collect();
    assert!(answers.iter().all(|answer| answer.ends_with("held")), "{answers:?}");
    assert!(server.ends());
}

#[test]
fn where_all_are_answering_the_next_is_refused_with_a_reason() {
    let server = TestServer::start(LIMITS);
    let held = server.hold(LIMITS.most);
    let refused = rest(server.connect());
    assert!(refused.starts_with("HTTP/1.1 503 ") && refused.contains("--max-connections"), "{refused}");
    let (head, body) = refused.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(&format!("content-length: {}", body.len())), "{refused}");
    assert!(serde_json::from_str::<serde_json::Value>(body).unwrap()["error"]["message"].is_string());
    drop(held);
    let started = Instant::now();
    while !server.answers() {
        assert!(started.elapsed() < WAIT, "clients that left keep their places");
    }
    assert!(server.ends());
}

#[test]
fn a_shutdown_waits_for_answers_and_not_for_silence() {
    let server = TestServer::start(ConnectionLimits { headers: Duration::from_secs(3600), ..LIMITS });
    let silent = server.connect();
    let mut half = server.connect();
    half.write_all(b"GET / HT").unwrap();
    let mut held = server.hold(1);
    let release = Arc::clone(&server.release);
    let releases = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        release.notify_one();
        held.pop().map(rest)
    });
    assert!(server.ends());
    assert!(releases.join().unwrap().unwrap().ends_with("held"));
    drop((silent, half));
}

#[test]
fn an_answer_that_is_not_taken_yet_is_sent_whole_though_the_server_stops() {
    for keeps in ["close", "keep-alive"] {
        let server = TestServer::start(ConnectionLimits { headers: Duration::from_secs(3600), stall: WAIT, ..LIMITS });
        let mut client = server.connect();
        write!(client, "GET /large HTTP/1.1\r\nhost: x\r\nconnection: {keeps}\r\n\r\n").unwrap();
        // All of it is ready.
        let mut head = [0; 64];
        client.read_exact(&mut head).unwrap();
        let address = server.address;
        let reads = std::thread::spawn(move || {
            let started = Instant::now();
            while Client::connect(address).is_ok() {
                assert!(started.elapsed() < WAIT, "it goes on");
                std::thread::sleep(Duration::from_millis(5));
            }
            rest(client).len()
        });
        assert!(server.ends(), "{keeps}");
        assert!(reads.join().unwrap() > LARGE, "{keeps}");
    }
}

#[test]
fn an_answer_that_is_not_taken_yet_does_not_give_way() {
    let server = TestServer::start(ConnectionLimits { most: 1, stall: WAIT, ..LIMITS });
    let mut client = server.ask("/large");
    client.read_exact(&mut [0; 64]).unwrap();
    assert!(rest(server.connect()).starts_with("HTTP/1.1 503 "));
    assert!(rest(client).len() > LARGE);
    assert!(server.ends());
}
