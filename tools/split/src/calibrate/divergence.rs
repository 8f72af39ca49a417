//! The child that runs models: `hpp-exec probe`, which keeps the reference's logits between requests.

use crate::exec::{ExecNotFound, find_exec};
use crate::interrupt::{Interrupt, POLL_INTERVAL, Release};
use hpp_schema::probe::{CompareProbe, MomentsProbe, Prompt, Reply, Request};
use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

/// Positions of a prompt that are compared: all.
const ALL_POSITIONS: u64 = 1 << 32;

/// Why a divergence could not be measured.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DivergenceError {
    #[error(transparent)]
    NoExec(#[from] ExecNotFound),
    #[error("cannot run {}", path.display())]
    Run { path: PathBuf, source: io::Error },
    #[error("hpp-exec could not run the corpus: {0}")]
    Failed(String),
    #[error("interrupted; nothing was written")]
    Interrupted,
}

impl DivergenceError {
    /// Whether the child's message says that a disk is full.
    pub fn is_full_disk(&self) -> bool {
        let full = io::Error::from(io::ErrorKind::StorageFull).to_string();
        match self {
            DivergenceError::Failed(reason) => reason.contains("os error 28") || reason.contains(&full),
            DivergenceError::Run { source, .. } => source.kind() == io::ErrorKind::StorageFull,
            DivergenceError::NoExec(_) | DivergenceError::Interrupted => false,
        }
    }
}

/// How much the answers of two models differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divergence {
    /// Mean over the positions, nats.
    pub mean: f64,
    /// Positions compared.
    pub positions: u64,
}

/// A running child. Dropping it ends it.
pub struct DivergenceProbe {
    path: PathBuf,
    child: Child,
    requests: ChildStdin,
    /// Lines of the child's stdout.
    replies: Receiver<io::Result<String>>,
    interrupt: Interrupt,
    /// Lines of the corpus that cannot be used and were reported.
    left_out: BTreeSet<u64>,
}

impl DivergenceProbe {
    /// Starts hpp-exec, whose messages go to stderr.
    pub fn start() -> Result<Self, DivergenceError> {
        let path = find_exec()?;
        let failed = |source| DivergenceError::Run { path: path.clone(), source };
        let interrupt = Interrupt::install().map_err(failed)?;
        let mut command = Command::new(&path);
        command.args(["probe", "--quiet"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (requests, replies) = pipes.ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        Ok(DivergenceProbe { path, child, requests, replies: lines_of(replies), interrupt, left_out: BTreeSet::new() })
    }

    /// Makes the next signal end the process when the returned value is dropped.
    pub fn release_on_drop(&self) -> Release {
        self.interrupt.release_on_drop()
    }

    /// Compares two models at all positions of the prompts.
    pub fn compare(
        &mut self,
        reference: &Path,
        other: &Path,
        prompts: &[Prompt],
    ) -> Result<Divergence, DivergenceError> {
        let (reference, other, prompts) = (reference.to_owned(), other.to_owned(), prompts.to_vec());
        let request = Request::Compare(CompareProbe { reference, other, prompts, positions: ALL_POSITIONS });
        self.ask(&request, |reply| match reply {
            Reply::Compared { kl, positions, .. } if kl.is_finite() => {
                Some(Divergence { mean: kl.max(0.0), positions })
            }
            _ => None,
        })
    }

    /// Writes the second moments of the taps, whose rows must have these widths, and returns how many positions they have.
    pub fn sum_moments(&mut self, probe: MomentsProbe, expected: &[u64]) -> Result<u64, DivergenceError> {
        let (positions, widths) = self.ask(&Request::Moments(probe), |reply| match reply {
            Reply::Moments { positions, widths } => Some((positions, widths)),
            _ => None,
        })?;
        match widths == expected {
            true => Ok(positions),
            false => {
                Err(DivergenceError::Failed(format!("matrices read rows of {widths:?} numbers, not {expected:?}")))
            }
        }
    }

    /// Sends a request, reads its replies up to the last, and returns what `read` takes of them. Reports each prompt that cannot be
    /// used, once.
    fn ask<T>(&mut self, request: &Request, read: impl Fn(Reply) -> Option<T>) -> Result<T, DivergenceError> {
        self.fail_if_interrupted()?;
        self.send(request)?;
        let mut answer = None;
        loop {
            match self.receive()? {
                Reply::PromptFailed { line, reason } => {
                    if self.left_out.insert(line) {
                        tell!("warning: line {line} of the corpus is left out: {reason}");
                    }
                }
                Reply::Failed { reason } => return Err(DivergenceError::Failed(reason)),
                Reply::Done => break,
                reply => answer = read(reply).or(answer),
            }
        }
        self.fail_if_interrupted()?;
        answer.ok_or_else(|| DivergenceError::Failed("it answered without a number".to_owned()))
    }

    fn send(&mut self, request: &Request) -> Result<(), DivergenceError> {
        let line = serde_json::to_string(request).map_err(io::Error::from);
        let sent = line.and_then(|line| writeln!(self.requests, "{line}")).and_then(|()| self.requests.flush());
        sent.map_err(|source| self.lost(source))
    }

    fn receive(&mut self) -> Result<Reply, DivergenceError> {
        loop {
            match self.replies.recv_timeout(POLL_INTERVAL) {
                Ok(Ok(line)) => return serde_json::from_str(&line).map_err(|error| self.lost(error.into())),
                Ok(Err(source)) => return Err(self.lost(source)),
                Err(RecvTimeoutError::Timeout) => self.fail_if_interrupted()?,
                Err(RecvTimeoutError::Disconnected) => return Err(self.lost(io::ErrorKind::UnexpectedEof.into())),
            }
        }
    }

    fn fail_if_interrupted(&self) -> Result<(), DivergenceError> {
        if self.interrupt.is_requested() { Err(DivergenceError::Interrupted) } else { Ok(()) }
    }

    fn lost(&self, source: io::Error) -> DivergenceError {
        match self.interrupt.is_requested() {
            true => DivergenceError::Interrupted,
            false => DivergenceError::Run { path: self.path.clone(), source },
        }
    }
}

/// Reads lines in a thread of its own, so that waiting for one can end.
fn lines_of(stdout: ChildStdout) -> Receiver<io::Result<String>> {
    let (sender, lines) = channel();
    std::thread::spawn(move || BufReader::new(stdout).lines().try_for_each(|line| sender.send(line)));
    lines
}

impl Drop for DivergenceProbe {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
