//! `hpp-exec probe` as a child, asked one thing after another.

use hpp_schema::Statistics;
use hpp_schema::probe::{CompareProbe, ObserveProbe, Prompt, PromptContent, Reply, Request, Tap};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

pub struct Probe {
    child: Child,
    requests: Option<ChildStdin>,
    replies: BufReader<ChildStdout>,
}

impl Probe {
    pub fn start() -> Self {
        let program = directory().join(format!("hpp-exec{}", std::env::consts::EXE_SUFFIX));
        let mut child = Command::new(&program)
            .args(["probe", "--threads", "2"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {}: {error}", program.display()));
        let (requests, replies) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut probe = Probe { child, requests, replies };
        let ready = probe.reply();
        assert!(matches!(ready, Reply::Ready { .. }), "{ready:?}");
        probe
    }

    fn reply(&mut self) -> Reply {
        let mut line = String::new();
        self.replies.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    /// All replies to a request, `Done` or `Failed` last.
    pub fn ask(&mut self, request: &Request) -> Vec<Reply> {
        let line = serde_json::to_string(request).unwrap();
        writeln!(self.requests.as_mut().unwrap(), "{line}").unwrap();
        let mut replies = Vec::new();
        loop {
            replies.push(self.reply());
            if matches!(replies.last(), Some(Reply::Done | Reply::Failed { .. })) {
                return replies;
            }
        }
    }

    /// What prompts show; all replies but the last two must be progress.
    pub fn observe(&mut self, plan: &Path, taps: &[Tap], prompts: &[Vec<u32>], decode_tokens: u64) -> Statistics {
        let prompts = tokens(prompts);
        let count = prompts.len();
        let probe = ObserveProbe { plan: plan.to_owned(), prompts, decode_tokens, taps: taps.to_vec() };
        let mut replies = self.ask(&Request::Observe(probe));
        assert_eq!(replies.pop(), Some(Reply::Done), "{replies:?}");
        let Some(Reply::Observed { statistics }) = replies.pop() else { panic!("{replies:?}") };
        assert!(replies.iter().all(|reply| matches!(reply, Reply::Progress { .. })), "{replies:?}");
        assert_eq!(replies.len(), count);
        assert_eq!(statistics.check("s"), []);
        statistics
    }

    /// Positions, divergence, and part of best tokens changed.
    pub fn compare(&mut self, probe: CompareProbe) -> (u64, f64, f64) {
        let mut replies = self.ask(&Request::Compare(probe));
        assert_eq!(replies.pop(), Some(Reply::Done), "{replies:?}");
        match replies.pop() {
            Some(Reply::Compared { positions, kl, top1_changed }) => (positions, kl, top1_changed),
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        drop(self.requests.take());
        let _ = self.child.wait();
    }
}

/// Prompts of token ids, numbered from line 1.
pub fn tokens(prompts: &[Vec<u32>]) -> Vec<Prompt> {
    let prompt = |(line, tokens): (u64, &Vec<u32>)| Prompt { line, content: PromptContent::Tokens(tokens.clone()) };
    (1..).zip(prompts).map(prompt).collect()
}

/// Where cargo puts the commands of this profile; builds the one needed first where only this package was asked for.
fn directory() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        let test = std::env::current_exe().expect("a test knows where it is");
        let directory = test.parent().and_then(Path::parent).expect("tests lie in target/<profile>/deps").to_owned();
        if std::env::var_os("HPP_COMMANDS_ARE_BUILT").is_none() {
            let mut cargo = Command::new(env!("CARGO"));
            cargo.args(["build", "--locked", "-q", "-p", "hpp-exec"]);
            cargo.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
            assert!(cargo.status().expect("cargo runs").success(), "hpp-exec does not build");
        }
        directory
    })
}
