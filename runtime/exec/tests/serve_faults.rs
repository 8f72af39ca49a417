//! `hpp-exec serve` under hostile requests and faults of the machine: bounded time and memory, and answers that stay right.

#![cfg(target_os = "linux")]

mod support;

use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use support::server::{MODEL, Server, WAIT, chat_plan, user};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn long_text(words: usize) -> String {
    (0..words).map(|word| format!("word{word} ")).collect()
}

fn cached_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

fn of_model(metric: &str, labels: &str) -> String {
    format!("{metric}{{model=\"{MODEL}\"{labels}}}")
}

impl Process {
    fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.0.join(file)).unwrap()
    }

    /// Most memory that it ever had, bytes.
    fn peak_memory(&self) -> u64 {
        let status = self.read("status");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        peak.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// Its processor time in clock ticks, hundredths of a second.
    fn ticks(&self) -> u64 {
        let stat = self.read("stat");
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(self.0.join("fd")).unwrap().count()
    }
}

/// What the system says about a server.
struct Process(PathBuf);

fn process(server: &Server) -> Process {
    Process(format!("/proc/{}", server.child.id()).into())
}

fn schema(schema: Value) -> Value {
    json!({"messages": user("x"), "max_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})
}

/// Schemas that would be large if they were written out, each in another way.
fn schema_bombs() -> Vec<Value> {
    let twice: serde_json::Map<String, Value> = (0..40)
        .map(|n| {
            let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
            let both = json!({"type": "object", "properties": {"a": next, "b": next}, "required": ["a", "b"]});
            (format!("d{n}"), both)
        })
        .chain([("d40".to_owned(), json!({"type": "integer"}))])
        .collect();
    let product = |kind: &str, count: usize| -> Value {
        let parts = (0..count).map(|n| {
            json!({kind: [{"properties": {format!("a{n}"): {"type": "string"}}}, {"properties": {format!("b{n}"): {"type": "string"}}}]})
        });
        json!({"type": "object", "allOf": parts.collect::<Vec<Value>>()})
    };
    let deep = (0..100).fold(json!({"type": "string"}), |inner, _| json!({"type": "array", "items": inner}));
    let deeper = (0..300).fold(json!({"type": "string"}), |inner, _| json!({"anyOf": [inner]}));
    let wide: serde_json::Map<String, Value> =
        (0..20_000).map(|n| (format!("p{n}"), json!({"type": "integer"}))).collect();
    let nested = json!({"type": "array", "maxItems": 100_000, "items": {"type": "array", "maxItems": 100_000, "items":
        {"type": "array", "maxItems": 100_000, "items": {"type": "integer"}}}});
    vec![
        json!({"$defs": twice, "$ref": "#/$defs/d0"}),
        product("anyOf", 18),
        product("oneOf", 18),
        deep,
        deeper,
        json!({"type": "object", "properties": wide}),
        json!({"type": "array", "items": {"type": "integer"}, "minItems": 4_000_000_000u64}),
        json!({"type": "array", "items": {"type": "integer"}, "maxItems": u64::MAX}),
        nested,
        json!({"type": "string", "maxLength": 4_000_000_000u64, "minLength": 4_000_000}),
        json!({"$ref": "#"}),
        json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        json!({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}),
        json!({"type": "string", "pattern": "^((((a{9}){99}){99}){99}){99}$"}),
        json!({"type": "string", "pattern": "(x+x+)+y".repeat(50)}),
        json!({"type": "number", "multipleOf": 1e-300, "minimum": -1e308, "maximum": 1e308}),
        json!({"enum": (0..40_000).map(|n| format!("value {n}")).collect::<Vec<String>>()}),
    ]
}

#[test]
fn schemas_that_would_be_large_cost_little() {
    let server = Server::new(&[]);
    let ask = json!({"prompt": "Once upon", "max_tokens": 3, "ignore_eos": true});
    for bomb in schema_bombs() {
        let request = schema(bomb);
        let text = request["response_format"].to_string();
        let start: String = text.chars().skip(48).take(100).collect();
        let started = Instant::now();
        let mut response = server.post(CHAT, &request);
        let (status, body) = (response.status().as_u16(), response.body_mut().read_to_string().unwrap());
        println!("{status} {:?} {} MiB {start}", started.elapsed(), process(&server).peak_memory() >> 20);
        assert!([200, 400].contains(&status), "{status} {start}: {body}");
        // The limits are 20 seconds and 1 GiB; the library's own are far below.
        assert!(started.elapsed() < Duration::from_secs(25), "{start}");
        assert_eq!(server.ok(TEXT, &ask)["usage"]["completion_tokens"], json!(3), "others go on");
    }
    let tools: Vec<Value> = schema_bombs()
        .into_iter()
        .map(|bomb| json!({"type": "function", "function": {"name": "f", "parameters": bomb, "strict": true}}))
        .take(3)
        .collect();
    let with_tools = json!({"messages": user("x"), "max_tokens": 4, "tools": tools, "tool_choice": "required"});
    assert!([200, 400].contains(&server.post(CHAT, &with_tools).status().as_u16()));
    let process = process(&server);
    assert!(process.peak_memory() < 1 << 30, "{} MiB", process.peak_memory() >> 20);
    let before = process.ticks();
    std::thread::sleep(Duration::from_millis(500));
    assert!(process.ticks() - before < 25, "work on a schema goes on after its answer");
}

/// The status and error of the answer to a large request, also where the server does not read all of it.
fn send(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let mut client = TcpStream::connect(server.url.strip_prefix("http://").unwrap()).unwrap();
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let sent = client.write_all(head.as_bytes()).and_then(|()| client.write_all(body.as_bytes()));
    let mut answer = String::new();
    let read = client.read_to_string(&mut answer);
    let json = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{sent:?} {read:?} {answer}")).1;
    let error: Value = serde_json::from_str(json).unwrap();
    (answer.split(' ').nth(1).unwrap().parse().unwrap(), error["error"].clone())
}

#[test]
fn large_requests_cost_bounded_memory() {
    let server = Server::new(&["--max-body", "16M", "--queue", "30"]);
    let before = process(&server).peak_memory();
    let text = |length: usize| "a longer text of many words ".repeat(length / 28);
    for (what, body, param) in [
        ("a prompt of 10 MB", json!({"prompt": text(10 << 20)}), "prompt"),
        ("a word of 10 MB", json!({"prompt": "x".repeat(10 << 20)}), "prompt"),
        ("a million tokens", json!({"prompt": vec![1; 1 << 20]}), "prompt"),
        ("stops of 10 MB", json!({"prompt": "x", "stop": [text(10 << 20)]}), "stop"),
        ("many answers to many prompts", json!({"prompt": vec![text(1000); 128], "n": 128}), "n"),
        ("more prompts than may wait", json!({"prompt": vec!["x"; 31]}), "prompt"),
    ] {
        let (status, error) = send(&server, TEXT, &body);
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{what}: {error}");
    }
    assert_eq!(send(&server, "/tokenize", &json!({"content": text(10 << 20)})).1["param"], json!("content"));
    let (status, error) = send(&server, CHAT, &json!({"messages": user(&text(10 << 20))}));
    assert_eq!((status, &error["param"]), (400, &json!("messages")), "{error}");
    let grown = process(&server).peak_memory().saturating_sub(before);
    assert!(grown < 700 << 20, "{} MiB", grown >> 20);
    server.ok(TEXT, &json!({"prompt": "Once upon", "max_tokens": 3}));
}

/// Threads that open connections at the same time.
const FLOODING: usize = 50;

/// Opens connections that say nothing, as many as this process may, up to `most`.
fn flood(server: &Server, most: usize) -> Vec<TcpStream> {
    let address = server.url.strip_prefix("http://").unwrap();
    // The system lets a client wait a second where more connect than the server accepts: several threads wait at the same time.
    let silent: Vec<TcpStream> = std::thread::scope(|scope| {
        let connect = || (0..most / FLOODING).map_while(|_| TcpStream::connect(address).ok()).collect::<Vec<_>>();
        let threads: Vec<_> = (0..FLOODING).map(|_| scope.spawn(connect)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(silent.len() > 550, "{} connections are too few to test anything", silent.len());
    // The answers need some.
    let keep = silent.len() - 20;
    silent.into_iter().take(keep).collect()
}

#[test]
fn thousands_of_connections_leave_room_for_others() {
    let server = Server::new(&[]);
    let before = process(&server).descriptors();
    let silent = flood(&server, 5000);
    assert!(silent.len() > 4900, "{} connections: raise the limit of descriptors (ulimit -n)", silent.len());
    let answer = server.ok(TEXT, &json!({"prompt": "Once upon", "max_tokens": 3, "ignore_eos": true}));
    assert_eq!(answer["usage"]["completion_tokens"], json!(3));
    let now = process(&server).descriptors();
    assert!(now <= before + 512 + 8, "{now} descriptors after {before}");
    assert!(process(&server).peak_memory() < 1 << 30);
    drop(silent);

    // A limit of descriptors below that of connections; the model is loaded.
    let server = Server::after("ulimit -n 128", chat_plan(MODEL), &[]);
    let silent = flood(&server, 700);
    let started = Instant::now();
    while !server.agent.get(format!("{}/health", server.url)).call().is_ok_and(|answer| answer.status() == 200) {
        assert!(started.elapsed() < WAIT, "nobody is answered any more");
    }
    let answer = server.ok(TEXT, &json!({"prompt": "Once upon", "max_tokens": 3, "ignore_eos": true}));
    assert_eq!(answer["usage"]["completion_tokens"], json!(3));
    drop(silent);
}

#[test]
fn clients_that_close_their_side_or_never_read_keep_no_place_of_others() {
    let server = Server::new(&["--max-sequences", "2"]);
    let address = server.url.strip_prefix("http://").unwrap();
    let stream = || {
        let body =
            json!({"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": true, "stream": true}).to_string();
        let mut client = TcpStream::connect(address).unwrap();
        let head = format!(
            "POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        client.write_all(head.as_bytes()).unwrap();
        client
    };
    let generated = of_model("hpp_generated_tokens_total", "");
    let half_closed: Vec<TcpStream> = (0..8).map(|_| stream()).collect();
    half_closed.iter().for_each(|client| client.shutdown(Shutdown::Write).unwrap());
    server.wait_for(&of_model("hpp_requests_running", ""), 0.0);
    server.wait_for(&of_model("hpp_requests_waiting", ""), 0.0);
    assert!(server.metric(&generated) < 8.0 * 400.0, "all eight were answered, and nobody listens");
    let never_read: Vec<TcpStream> = (0..4).map(|_| stream()).collect();
    let answer = server.ok(TEXT, &json!({"prompt": "Once upon", "max_tokens": 3, "ignore_eos": true}));
    assert_eq!(answer["usage"]["completion_tokens"], json!(3));
    server.wait_for(&of_model("hpp_requests_running", ""), 0.0);
    drop((half_closed, never_read));
}

#[test]
fn a_full_disk_costs_pages_and_no_answer() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--kv-dir", dir.path().to_str().unwrap(), "--kv-page", "16", "--max-sequences", "2"];
    let request = json!({"prompt": long_text(60), "max_tokens": 12, "logprobs": 3});
    let expected = Server::new(&[]).ok(TEXT, &request)["choices"].clone();
    // Files may have 128 KiB, and more is an error as on a full disk: room for a few of the pages.
    let mut server = Server::after("trap '' XFSZ; ulimit -f 256", chat_plan(MODEL), &args);
    assert_eq!(server.ok(TEXT, &request)["choices"], expected);
    server.wait_until(&of_model("hpp_kv_errors_total", ""), |errors| errors >= 1.0);
    let again = server.ok(TEXT, &request);
    assert!(cached_tokens(&again) >= 128, "they are in RAM: {again}");
    assert_eq!(again["choices"], expected);
    let file_bytes = || {
        let mut files = std::fs::read_dir(dir.path()).unwrap().flatten().map(|model| model.path().join("pages.kv"));
        files.find_map(|pages| pages.metadata().ok()).unwrap().len()
    };
    server.restart(&args);
    let limited = file_bytes();
    let restored = server.ok(TEXT, &request);
    assert_eq!(restored["choices"], expected);
    assert!(cached_tokens(&restored) < 128, "{restored}");
    // There is room again, so that all pages are written.
    let whole = (restored["usage"]["prompt_tokens"].as_u64().unwrap() / 16) as f64;
    server.wait_for(&of_model("hpp_kv_pages", ",tier=\"disk\""), whole);
    let page = file_bytes() / whole as u64;
    assert!(limited > 0 && limited % page == 0, "{limited} bytes of pages of {page}: a part of one was left");
}

/// A library that moves the clock of the day by the seconds in a file, when it is loaded before others.
const JUMPING_CLOCK: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*system_clock)(clockid_t, struct timespec *);
    if (!system_clock) system_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = system_clock(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) {
        long seconds = 0;
        FILE *file = fopen(getenv("CLOCK_JUMP"), "r");
        if (file) {
            if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
            fclose(file);
        }
        now->tv_sec += seconds;
    }
    return result;
}
"#;

#[test]
fn jumps_of_the_clock_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (source, library, jump, kv) = (file("clock.c"), file("clock.so"), file("jump"), file("kv"));
    std::fs::write(&source, JUMPING_CLOCK).unwrap();
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o", &library, &source, "-ldl"]).status().unwrap();
    assert!(compiled.success());
    let year = 365 * 86_400i64;
    std::fs::write(&jump, "0").unwrap();
    let setup = format!("export CLOCK_JUMP={jump} LD_PRELOAD={library}");
    let args = ["--kv-dir", &kv, "--kv-page", "16", "--timeout", "60"];
    let mut server = Server::after(&setup, chat_plan(MODEL), &args);
    let request = json!({"prompt": long_text(60), "max_tokens": 12, "logprobs": 3});
    let first = server.ok(TEXT, &request);
    let now = first["created"].as_i64().unwrap();
    for years in [30, -20, 0] {
        std::fs::write(&jump, (years * year).to_string()).unwrap();
        let answer = server.ok(TEXT, &request);
        let moved = answer["created"].as_i64().unwrap() - now;
        assert!((moved - years * year).abs() < 600, "the server's clock did not jump: {moved}");
        assert_eq!(answer["choices"], first["choices"]);
        assert!(cached_tokens(&answer) >= 128, "{answer}");
    }
    // A running answer has its time limit from the clock that does not jump.
    let streams = json!({"prompt": "Once upon", "max_tokens": 300, "ignore_eos": true, "stream": true});
    let mut running = server.post(TEXT, &streams);
    std::fs::write(&jump, (40 * year).to_string()).unwrap();
    let text = running.body_mut().read_to_string().unwrap();
    assert!(text.trim_end().ends_with("[DONE]") && text.contains("\"finish_reason\":\"length\""), "{text}");
    // Pages that were written in another year.
    server.wait_until(&of_model("hpp_kv_pages", ",tier=\"disk\""), |pages| pages >= 8.0);
    drop(running);
    server.restart(&args);
    let restored = server.ok(TEXT, &request);
    assert_eq!(restored["choices"], first["choices"]);
    assert!(cached_tokens(&restored) >= 128, "{restored}");
}
