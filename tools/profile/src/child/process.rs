//! One child process and its three pipes.

use super::Launcher;
use crate::interrupt::Interrupt;
use hpp_schema::probe::{Reply, Request};
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest reply, bytes: enough for the statistics of a model with many experts and neurons.
const LONGEST_REPLY: u64 = 256 << 20;
/// Last lines of stderr that are kept to explain why the child ended.
const KEPT_LINES: usize = 5;
/// Interval at which Ctrl-C is polled.
const INTERRUPT_POLL: Duration = Duration::from_millis(50);
/// Time that a child may take to exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// What the child did next.
#[derive(Debug)]
pub(super) enum ChildEvent {
    Reply(Box<Reply>),
    /// A line that is not a reply.
    Garbage(String),
    /// No reply within the timeout.
    Timeout,
    /// Stdout was closed.
    End,
    /// Ctrl-C.
    Interrupted,
}

/// A running child. Dropping it kills it.
pub(super) struct Process {
    child: Child,
    requests: Option<ChildStdin>,
    replies: Receiver<ChildEvent>,
    last_lines: Arc<Mutex<VecDeque<String>>>,
    stderr_reader: Option<JoinHandle<()>>,
}

impl Process {
    pub fn start(launcher: &Launcher) -> io::Result<Self> {
        let mut command = Command::new(&launcher.program);
        command.args(&launcher.arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        in_own_group(&mut command);
        let mut child = command.spawn()?;
        let (requests, out, err) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (send, replies) = sync_channel(16);
        let last_lines = Arc::new(Mutex::new(VecDeque::new()));
        if let Some(out) = out {
            std::thread::spawn(move || read_replies(BufReader::new(out), &send));
        }
        let kept = Arc::clone(&last_lines);
        let stderr_reader = err.map(|err| std::thread::spawn(move || keep_last_lines(BufReader::new(err), &kept)));
        Ok(Process { child, requests, replies, last_lines, stderr_reader })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn send(&mut self, request: &Request) -> io::Result<()> {
        let Some(requests) = &mut self.requests else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        requests.write_all(&line)?;
        requests.flush()
    }

    /// Waits for the next event, at most `timeout`.
    pub fn next(&mut self, timeout: Duration, interrupt: &Interrupt) -> ChildEvent {
        let begun = Instant::now();
        loop {
            if interrupt.is_requested() {
                return ChildEvent::Interrupted;
            }
            let left = timeout.saturating_sub(begun.elapsed());
            match self.replies.recv_timeout(left.min(INTERRUPT_POLL)) {
                Ok(event) => return event,
                Err(RecvTimeoutError::Disconnected) => return ChildEvent::End,
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return ChildEvent::Timeout,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Describes how a process that closed its stdout ended, with its last lines of stderr.
    pub fn describe_exit(mut self) -> String {
        self.requests = None;
        let begun = Instant::now();
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break Some(status),
                Ok(None) if begun.elapsed() < EXIT_TIMEOUT => std::thread::sleep(Duration::from_millis(5)),
                _ => break None,
            }
        };
        while self.stderr_reader.as_ref().is_some_and(|r| !r.is_finished()) && begun.elapsed() < EXIT_TIMEOUT {
            std::thread::sleep(Duration::from_millis(5));
        }
        let how = status.map_or("it closed its output and did not end".to_owned(), describe);
        let words = self.last_lines.lock().unwrap_or_else(PoisonError::into_inner);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        if words.is_empty() { how } else { format!("{how}; it last said: {}", words.join(" / ")) }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Puts the child into its own process group: a terminal sends Ctrl-C to this process only, which then stops the child.
fn in_own_group(command: &mut Command) {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    #[cfg(not(unix))]
    let _ = command;
}

fn read_replies(mut out: impl BufRead, send: &SyncSender<ChildEvent>) {
    loop {
        let mut line = Vec::new();
        match (&mut out).take(LONGEST_REPLY).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let event = match serde_json::from_slice(&line) {
            Ok(reply) => ChildEvent::Reply(Box::new(reply)),
            Err(_) => ChildEvent::Garbage(String::from_utf8_lossy(&line).trim_end().chars().take(200).collect()),
        };
        if send.send(event).is_err() {
            return;
        }
    }
}

fn keep_last_lines(mut err: impl BufRead, kept: &Mutex<VecDeque<String>>) {
    loop {
        let mut line = Vec::new();
        match (&mut err).take(1 << 16).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let line: String = String::from_utf8_lossy(&line).trim().chars().take(300).collect();
        if line.is_empty() {
            continue;
        }
        tracing::debug!("{line}");
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT_LINES {
            kept.pop_front();
        }
        kept.push_back(line);
    }
}

#[cfg(unix)]
fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    let Some(signal) = status.signal() else { return exit_code(status) };
    let name = match signal {
        4 => " (illegal instruction)",
        6 => " (abort)",
        7 => " (bus error)",
        8 => " (arithmetic error)",
        9 => ", as the system does when memory runs out",
        11 => " (segmentation fault)",
        _ => "",
    };
    match signal {
        9 => format!("it was killed{name} (signal 9)"),
        _ => format!("it crashed with signal {signal}{name}"),
    }
}

#[cfg(not(unix))]
fn describe(status: ExitStatus) -> String {
    exit_code(status)
}

fn exit_code(status: ExitStatus) -> String {
    match status.code() {
        Some(code) => format!("it ended with exit code {code}"),
        None => "it ended".to_owned(),
    }
}
