//! A server without models: which requests are read, and how far.

use hpp_serve::{ConnectionLimits, EnginePool, MemoryNeeds, Metrics, PoolSettings, ServeSettings, Shutdown, serve};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const WAIT: Duration = Duration::from_secs(20);
const MAX_BODY: usize = 1 << 20;
const SLOWEST_BODY: Duration = Duration::from_millis(500);

struct Server {
    address: SocketAddr,
    shutdown: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(api_keys: &[&str], allowed_hosts: &[&str]) -> Self {
        Self::with(api_keys, allowed_hosts, &[], None)
    }

    fn with(api_keys: &[&str], allowed_hosts: &[&str], cors_origins: &[&str], rate_limit: Option<u32>) -> Self {
        let list = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let shutdown = Shutdown::default();
        let settings = ServeSettings {
            address: (Ipv4Addr::LOCALHOST, 0).into(),
            api_keys: list(api_keys),
            max_body: MAX_BODY,
            timeout: None,
            cors_origins: list(cors_origins),
            allowed_hosts: list(allowed_hosts),
            connections: ConnectionLimits { body: SLOWEST_BODY, ..ConnectionLimits::default() },
            rate_limit,
            grace: Duration::ZERO,
        };
        let pool = PoolSettings { budget: MemoryNeeds::default(), allowed: None, idle_timeout: None, queue: 4 };
        let pool = EnginePool::start(vec![], pool, shutdown.stop_flag()).unwrap();
        let ((ready, address), stop) = (channel(), shutdown.clone());
        let run = move || serve(vec![], pool, Metrics::new(), settings, &stop, |address| ready.send(address).unwrap());
        let thread = std::thread::spawn(move || run().unwrap());
        Server { address: address.recv_timeout(WAIT).unwrap(), shutdown, thread: Some(thread) }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        stream
    }

    /// The status and body of the answer to a request.
    fn ask(&self, request: &[u8]) -> (u16, Value) {
        let mut stream = self.connect();
        // The server may answer before it has read everything.
        let _ = stream.write_all(request);
        answer(stream)
    }

    fn get(&self, headers: &str) -> (u16, Value) {
        self.ask(format!("GET /v1/models HTTP/1.1\r\n{headers}connection: close\r\n\r\n").as_bytes())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown.request();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_some_and(|ended| ended.is_ok()));
    }
}

fn answer(mut stream: TcpStream) -> (u16, Value) {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes);
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status, serde_json::from_str(body).unwrap_or(Value::Null))
}

/// The start of a request with a body of so many bytes.
fn head(length: usize) -> String {
    format!(
        "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n\
         content-length: {length}\r\n\r\n"
    )
}

/// The origin that a browser may let read the answer.
fn allowed_origin(server: &Server, origin: &str) -> Option<String> {
    let mut stream = server.connect();
    let request =
        format!("GET /v1/models HTTP/1.1\r\nhost: localhost\r\norigin: {origin}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    let header = |line: &str| line.strip_prefix("access-control-allow-origin: ").map(str::to_owned);
    text.lines().find_map(header)
}

#[test]
fn pages_of_other_sites_read_answers_only_if_they_are_named() {
    let page = "https://app.example";
    assert_eq!(allowed_origin(&Server::start(&[], &[]), page), None);
    let one = Server::with(&[], &[], &[page], None);
    assert_eq!(allowed_origin(&one, page).as_deref(), Some(page));
    assert_eq!(allowed_origin(&one, "https://attacker.example"), None);
    assert_eq!(allowed_origin(&Server::with(&[], &[], &["*"], None), page).as_deref(), Some("*"));
}

#[test]
fn a_page_of_another_name_is_refused() {
    let server = Server::start(&[], &["box.example"]);
    for host in ["localhost", "127.0.0.1:80", "[::1]:1", "box.example:8080"] {
        assert_eq!(server.get(&format!("host: {host}\r\n")).0, 200, "{host}");
    }
    for headers in ["host: attacker.example\r\n", "host: localhost\r\nhost: attacker.example\r\n", "host: \r\n"] {
        let (status, body) = server.get(headers);
        assert_eq!((status, &body["error"]["type"]), (403, &Value::from("permission_error")), "{headers}: {body}");
        assert!(body["error"]["message"].as_str().unwrap().contains("--allowed-host"), "{body}");
    }
    for path in ["/", "/health", "/metrics", "/nothing"] {
        let request = format!("GET {path} HTTP/1.1\r\nhost: attacker.example\r\nconnection: close\r\n\r\n");
        assert_eq!(server.ask(request.as_bytes()).0, 403, "{path}");
    }
    let with_key = Server::start(&["secret"], &[]);
    assert_eq!(with_key.get("host: other.example\r\nauthorization: Bearer secret\r\n").0, 200);
    assert_eq!(with_key.get("host: other.example\r\n").0, 401);
}

#[test]
fn bodies_are_read_within_limits_of_size_and_time() {
    let server = Server::start(&[], &[]);
    let whole = br#"{"content": "x"}"#;
    assert_eq!(
        server.ask(&[head(whole.len()).as_bytes(), whole].concat()).0,
        400,
        "there is no model, and it was read"
    );
    let started = Instant::now();
    assert_eq!(server.ask(head(MAX_BODY + 1).as_bytes()).0, 413, "it is refused by its length alone");
    assert!(started.elapsed() < SLOWEST_BODY);
    // A client that reads the answer only once it has sent the whole body gets it too.
    let mut writes_all = server.connect();
    writes_all.write_all(head(4 * MAX_BODY).as_bytes()).unwrap();
    writes_all.write_all(&vec![b' '; 4 * MAX_BODY]).unwrap();
    assert_eq!(answer(writes_all).0, 413);
    let chunk = vec![b' '; 1 << 16];
    let chunked = head(0).replace("content-length: 0", "transfer-encoding: chunked");
    let chunk = [format!("{:x}\r\n", chunk.len()).as_bytes(), &chunk, b"\r\n"].concat();
    let (status, _) = server.ask(&[chunked.as_bytes(), &chunk.repeat(MAX_BODY / (1 << 16) + 1)].concat());
    assert_eq!(status, 413, "it has no length");
    let mut half = server.connect();
    half.write_all(&[head(100).as_bytes(), b"{\"con"].concat()).unwrap();
    let (status, error) = answer(half);
    assert_eq!((status, &error["error"]["type"]), (408, &Value::from("invalid_request_error")), "{error}");
    let mut ends = server.connect();
    ends.write_all(&[head(100).as_bytes(), b"{\"con"].concat()).unwrap();
    ends.shutdown(std::net::Shutdown::Write).unwrap();
    assert_ne!(answer(ends).0, 200);
}

#[test]
fn bodies_that_arrive_together_have_bounded_memory() {
    let server = Server::start(&[], &[]);
    let part = vec![b' '; MAX_BODY - 1000];
    let send = || {
        let mut stream = server.connect();
        stream.write_all(head(MAX_BODY).as_bytes()).and_then(|()| stream.write_all(&part)).unwrap();
        stream
    };
    // Two bodies of the largest size have room.
    let mut large: Vec<TcpStream> = (0..3).map(|_| send()).collect();
    let mut refused = 0;
    for stream in large.drain(..) {
        let (status, error) = answer(stream);
        assert!([408, 503].contains(&status), "{status} {error}");
        refused += usize::from(status == 503);
    }
    // Two, if the last one takes its first bytes before the second one has all of its own.
    assert!((1..=2).contains(&refused), "{refused} of three refused: the others are waited for");
    let whole = br#"{"content": "x"}"#;
    assert_eq!(server.ask(&[head(whole.len()).as_bytes(), whole].concat()).0, 400, "their room is free again");
}

#[test]
fn text_that_is_no_json_or_no_utf_8_or_too_deep_is_refused() {
    let server = Server::start(&[], &[]);
    let deep = format!("{{\"content\": {}", "[".repeat(200_000));
    let bodies: [&[u8]; 5] =
        [b"", b"{\"content\": \"\xff\"}", b"[1e999]", deep.as_bytes(), b"{\"content\": \"\\ud800\"}"];
    for body in bodies {
        let (status, error) = server.ask(&[head(body.len()).as_bytes(), body].concat());
        assert_eq!((status, &error["error"]["param"]), (400, &Value::Null), "{error}");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.starts_with("the request: ") && message.len() < 200, "{error}");
    }
}

#[test]
fn each_client_sends_so_many_requests_in_a_minute() {
    let post = |server: &Server, key: &str| {
        let key = if key.is_empty() { String::new() } else { format!("authorization: Bearer {key}\r\n") };
        let body = "{}";
        let request = format!(
            "POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{key}content-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut stream = server.connect();
        stream.write_all(request.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let wait = text.lines().find_map(|line| line.strip_prefix("retry-after: ")?.parse::<u64>().ok());
        (text.split(' ').nth(1).unwrap().to_owned(), wait, text)
    };
    let server = Server::with(&["a", "b"], &[], &[], Some(3));
    for _ in 0..3 {
        assert_eq!(post(&server, "a").0, "400", "what the request asks for is looked at");
        assert_eq!(post(&server, "wrong").0, "401");
    }
    let (status, wait, text) = post(&server, "a");
    assert_eq!(status, "429", "{text}");
    assert!(wait.is_some_and(|wait| (1..=20).contains(&wait)), "{text}");
    assert!(text.contains("rate_limit_error") && text.contains("3 requests per minute"), "{text}");
    assert_eq!(post(&server, "b").0, "400", "another key has its own requests");
    let listed = server.get("host: localhost\r\nauthorization: Bearer a\r\n");
    assert_eq!(listed.0, 200, "looking at the server is free");
    // Without keys, of each address.
    let server = Server::with(&[], &[], &[], Some(1));
    assert_eq!([post(&server, "").0, post(&server, "any").0], ["400", "429"]);
}
