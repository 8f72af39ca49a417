//! A headless Chromium that `HPP_CHROMIUM` names, driven through its pipe for debuggers.

use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A browser that takes longer than this for one command hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// The browser's program, or `None` after saying that the test is skipped.
pub fn chromium(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("HPP_CHROMIUM").map(PathBuf::from);
    if path.is_none() {
        let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
        assert!(!ci, "{test} needs a browser, and CI requires it: see tools/scripts/deps.sh chromium");
        println!("SKIPPED: {test}: HPP_CHROMIUM is not set, see tools/scripts/deps.sh chromium");
    }
    path
}

/// A page in a browser with a profile of its own. Dropping it ends the browser.
pub struct Page {
    child: Child,
    commands: File,
    messages: Receiver<Value>,
    session: Value,
    last_id: u64,
    /// What the page put on the console, and what its policy refused.
    pub console: Vec<String>,
    _dir: TempDir,
}

impl Page {
    /// Opens an address.
    pub fn open(browser: &PathBuf, url: &str) -> Self {
        let dir = TempDir::new().unwrap();
        // The browser reads commands from descriptor 3 and writes to 4.
        let script = "mkfifo to from && touch ready && exec \"$0\" \"$@\" 3<to 4>from";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .arg(browser)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-extensions"])
            .arg("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
            .arg(format!("--user-data-dir={}", dir.path().join("profile").display()))
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh starts");
        while !dir.path().join("ready").exists() {
            assert_eq!(child.try_wait().unwrap(), None, "the pipes can be made");
            std::thread::sleep(Duration::from_millis(5));
        }
        let commands = OpenOptions::new().write(true).open(dir.path().join("to")).unwrap();
        let answers = BufReader::new(File::open(dir.path().join("from")).unwrap());
        let (send, messages) = channel();
        std::thread::spawn(move || {
            for message in answers.split(0).map_while(Result::ok) {
                let _ = send.send(serde_json::from_slice(&message).unwrap());
            }
        });
        let mut page = Page { child, commands, messages, session: Value::Null, last_id: 0, console: vec![], _dir: dir };
        let target = page.call("Target.createTarget", &json!({"url": "about:blank"}));
        let attached = page.call("Target.attachToTarget", &json!({"targetId": target["targetId"], "flatten": true}));
        page.session = attached["sessionId"].clone();
        page.call("Runtime.enable", &json!({}));
        page.call("Log.enable", &json!({}));
        page.go(url);
        page
    }

    /// Loads an address and waits for it.
    pub fn go(&mut self, url: &str) {
        self.call("Page.navigate", &json!({"url": url}));
        self.wait_until("document.readyState === 'complete' && location.href !== 'about:blank'");
    }

    /// The value of an expression; promises are waited for.
    pub fn value(&mut self, expression: &str) -> Value {
        let command = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let answer = self.call("Runtime.evaluate", &command);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub fn wait_until(&mut self, expression: &str) {
        let begun = Instant::now();
        while self.value(expression) != json!(true) {
            assert!(begun.elapsed() < PATIENCE, "{expression} stays false: {}", self.value("document.body.innerText"));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The size of the window, and whether the person prefers dark pages.
    pub fn look(&mut self, width: u32, height: u32, colors: &str) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", &size);
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": colors}]});
        self.call("Emulation.setEmulatedMedia", &media);
    }

    /// A picture of the window, as PNG in base64.
    pub fn picture(&mut self) -> String {
        let picture = self.call("Page.captureScreenshot", &json!({"format": "png"}));
        picture["data"].as_str().expect("a picture").to_owned()
    }

    fn call(&mut self, method: &str, params: &Value) -> Value {
        self.last_id += 1;
        let mut command = json!({"id": self.last_id, "method": method, "params": params});
        if !self.session.is_null() {
            command["sessionId"] = self.session.clone();
        }
        self.commands.write_all(format!("{command}\0").as_bytes()).expect("the browser reads");
        loop {
            let message = self.messages.recv_timeout(PATIENCE).expect("the browser answers");
            if message["id"] == self.last_id {
                assert!(message["error"].is_null(), "{method}: {}", message["error"]);
                return message["result"].clone();
            }
            self.note(&message);
        }
    }

    fn note(&mut self, message: &Value) {
        let params = &message["params"];
        match message["method"].as_str() {
            Some("Log.entryAdded") if params["entry"]["level"] == "verbose" => {}
            Some("Log.entryAdded") => self.console.push(params["entry"]["text"].to_string()),
            Some("Runtime.consoleAPICalled") => self.console.push(params["args"].to_string()),
            Some("Runtime.exceptionThrown") => self.console.push(params["exceptionDetails"].to_string()),
            _ => {}
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
