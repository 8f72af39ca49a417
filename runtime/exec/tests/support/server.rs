//! A running `hpp-exec serve`, and its answers.

use super::{PlanDir, command};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use ureq::http::Response;
use ureq::{Agent, Body};

pub const MODEL: &str = "genai/learned-llama-fp32-cpu";
pub const WAIT: Duration = Duration::from_secs(120);

/// A running server. Dropping it kills it.
pub struct Server {
    pub plan: PlanDir,
    pub child: Child,
    pub url: String,
    pub agent: Agent,
    key: Option<String>,
}

impl Server {
    pub fn new(args: &[&str]) -> Self {
        Self::start(chat_plan(MODEL), args)
    }

    pub fn start(plan: PlanDir, args: &[&str]) -> Self {
        let started = spawn(&plan, args);
        Self::of(plan, started, args)
    }

    /// A server whose process runs after these commands of the shell, which set its limits or environment.
    pub fn after(setup: &str, plan: PlanDir, args: &[&str]) -> Self {
        let serve = serve_command(&plan, args);
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{setup}; exec \"$0\" \"$@\"")]).arg(serve.get_program()).args(serve.get_args());
        let started = listening(shell);
        Self::of(plan, started, args)
    }

    fn of(plan: PlanDir, (child, url): (Child, String), args: &[&str]) -> Self {
        let agent = Agent::config_builder().http_status_as_error(false).timeout_global(Some(WAIT)).build().into();
        let key = args.iter().position(|arg| *arg == "--api-key").map(|at| args[at + 1].to_owned());
        Server { plan, child, url, agent, key }
    }

    /// Kills the server with no chance to tidy up, and starts it again.
    pub fn restart(&mut self, args: &[&str]) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        (self.child, self.url) = spawn(&self.plan, args);
    }

    /// Stops the server as an administrator does, and starts it again.
    pub fn stop_and_start(&mut self, args: &[&str]) {
        assert!(Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap().success());
        assert!(self.child.wait().unwrap().success(), "a graceful shutdown is no failure");
        (self.child, self.url) = spawn(&self.plan, args);
    }

    pub fn post(&self, path: &str, body: &Value) -> Response<Body> {
        let request = self.agent.post(format!("{}{path}", self.url));
        let request = match &self.key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        };
        request.send_json(body).unwrap()
    }

    pub fn get(&self, path: &str) -> Response<Body> {
        let request = self.agent.get(format!("{}{path}", self.url));
        let request = match &self.key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        };
        request.call().unwrap()
    }

    /// The answer to a request that succeeds.
    pub fn ok(&self, path: &str, body: &Value) -> Value {
        let mut response = self.post(path, body);
        let status = response.status();
        let answer: Value = response.body_mut().read_json().unwrap();
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// The status and error of a request that fails.
    pub fn refused(&self, path: &str, body: &Value) -> (u16, Value) {
        let mut response = self.post(path, body);
        let error: Value = response.body_mut().read_json().unwrap();
        assert!(error["error"]["message"].is_string(), "{error}");
        (response.status().as_u16(), error["error"].clone())
    }

    /// The events of a streamed answer, without `[DONE]`, which must be last.
    pub fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let mut response = self.post(path, &body);
        assert_eq!(response.status(), 200);
        let text = response.body_mut().read_to_string().unwrap();
        let mut data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{text}");
        data.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    pub fn metric(&self, line: &str) -> f64 {
        let text = self.get("/metrics").body_mut().read_to_string().unwrap();
        let value = text.lines().find_map(|found| found.strip_prefix(line));
        value.map_or(0.0, |value| value.trim().parse().unwrap())
    }

    /// Waits until a metric has a value.
    pub fn wait_for(&self, line: &str, value: f64) {
        self.wait_until(line, |found| found == value);
    }

    /// Waits until a metric is as it should be.
    pub fn wait_until(&self, line: &str, is_right: impl Fn(f64) -> bool) {
        let started = Instant::now();
        while !is_right(self.metric(line)) {
            assert!(started.elapsed() < WAIT, "{line} stays {}", self.metric(line));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A plan of a model that chats.
pub fn chat_plan(model: &str) -> PlanDir {
    let mut plan = PlanDir::new(model, 512);
    plan.plan.generation.as_mut().unwrap().chat_template = Some("chat_template.jinja".into());
    plan.save();
    plan
}

fn serve_command(plan: &PlanDir, args: &[&str]) -> Command {
    let mut serve = command(["serve", plan.path().to_str().unwrap()]);
    // A free port, unless a test needs the same one again.
    let port: &[&str] = if args.contains(&"--port") { &[] } else { &["--port", "0"] };
    serve.args(port).args(args);
    serve
}

fn spawn(plan: &PlanDir, args: &[&str]) -> (Child, String) {
    listening(serve_command(plan, args))
}

/// A started server, and where it listens.
fn listening(mut serve: Command) -> (Child, String) {
    let mut child = serve.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let (send, address) = channel();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    std::thread::spawn(move || {
        for line in stderr.lines().map_while(Result::ok) {
            if let Some((_, rest)) = line.split_once("http://") {
                let _ = send.send(rest.split(' ').next().unwrap_or_default().to_owned());
            }
        }
    });
    let address = address.recv_timeout(WAIT).expect("the server says where it listens");
    (child, format!("http://{address}"))
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}
