//! The child process that measures: `hpp-exec probe`, which reads requests and writes replies as JSON lines.
//!
//! A crash, a hang or a lack of memory in the child costs the current request only: the next request starts a new child.

mod process;

use crate::interrupt::Interrupt;
use hpp_schema::Host;
use hpp_schema::probe::{PROBE_VERSION, Reply, Request};
use process::{ChildEvent, Process};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tracing::{debug, info};

/// Why a child cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    #[error("cannot run {}", program.display())]
    Start { program: PathBuf, source: io::Error },
    #[error("{} does not answer: {why}", program.display())]
    NotReady { program: PathBuf, why: String },
    #[error("{} speaks version {found} of the protocol, and this build speaks version {PROBE_VERSION}", program.display())]
    Version { program: PathBuf, found: u32 },
}

impl ChildError {
    /// What the user can do.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            ChildError::Start { .. } | ChildError::Version { .. } => {
                Some("put the hpp-exec of this version beside hpp-profile, or name it in HPP_EXEC")
            }
            ChildError::NotReady { why, .. } if why.contains("it last said: error: invalid value") => {
                Some("hpp-profile passes --threads, --ort-lib and --ep-lib on to hpp-exec: correct the value")
            }
            ChildError::NotReady { .. } => Some("`hpp-exec devices` with the same --ort-lib and --ep-lib says why"),
        }
    }
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The child refused it with this reason, and keeps running.
    #[error("{0}")]
    Refused(String),
    /// The child crashed, hung or broke the protocol.
    #[error("{0}")]
    Lost(String),
    /// Ctrl-C; the child was killed.
    #[error("interrupted")]
    Interrupted,
    #[error(transparent)]
    Start(#[from] ChildError),
}

/// How to start a child.
#[derive(Clone, Debug)]
pub struct Launcher {
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// Time without a reply after which a child counts as hung and is killed.
    pub reply_timeout: Duration,
}

impl Launcher {
    /// `hpp-exec probe` beside this program, or what `HPP_EXEC` names.
    pub fn beside(own: &Path, named: Option<OsString>, reply_timeout: Duration) -> Self {
        let beside = || own.with_file_name(format!("hpp-exec{}", std::env::consts::EXE_SUFFIX));
        let program = named.filter(|name| !name.is_empty()).map_or_else(beside, PathBuf::from);
        Launcher { program, arguments: vec!["probe".into()], reply_timeout }
    }
}

/// Sends requests to one child at a time, and starts it on demand.
pub struct Prober {
    launcher: Launcher,
    interrupt: Interrupt,
    child: Option<Process>,
}

impl Prober {
    /// Does not start a child.
    pub fn new(launcher: Launcher, interrupt: Interrupt) -> Self {
        Prober { launcher, interrupt, child: None }
    }

    /// The host and devices as the child reports them. Starts a new child.
    pub fn host(&mut self) -> Result<Host, RequestError> {
        let (process, host) = self.start()?;
        self.child = Some(process);
        Ok(host)
    }

    /// Sends a request. The caller must then call [`answer`](Self::answer) until it returns `None` or an error.
    pub fn ask(&mut self, request: &Request) -> Result<(), RequestError> {
        if self.child.is_none() {
            self.child = Some(self.start()?.0);
        }
        let sent = self.child.as_mut().map(|child| child.send(request));
        match sent {
            Some(Err(_)) => Err(self.lost()),
            _ => Ok(()),
        }
    }

    /// The next reply; `None` when the request is done.
    pub fn answer(&mut self) -> Result<Option<Reply>, RequestError> {
        let Some(child) = &mut self.child else { return Ok(None) };
        match child.next(self.launcher.reply_timeout, &self.interrupt) {
            ChildEvent::Reply(reply) => match *reply {
                Reply::Done => Ok(None),
                Reply::Failed { reason } => {
                    info!(reason, "request refused");
                    Err(RequestError::Refused(reason))
                }
                reply => {
                    log_reply(&reply);
                    Ok(Some(reply))
                }
            },
            ChildEvent::Garbage(line) => {
                self.child = None;
                Err(RequestError::Lost(format!("hpp-exec wrote a line that is not a reply: {line:?}")))
            }
            ChildEvent::Timeout => {
                self.child = None;
                let seconds = self.launcher.reply_timeout.as_secs_f64();
                info!(seconds, "child killed: no reply");
                Err(RequestError::Lost(format!("it hung: no answer for {seconds} s")))
            }
            ChildEvent::End => Err(self.lost()),
            ChildEvent::Interrupted => {
                self.child = None;
                Err(RequestError::Interrupted)
            }
        }
    }

    /// Kills the child, so that the next request starts a new one with nothing loaded.
    pub fn restart(&mut self) {
        debug!(child = self.child_id(), "child killed, to free what it has loaded");
        self.child = None;
    }

    /// The process id of the running child.
    pub fn child_id(&self) -> Option<u32> {
        self.child.as_ref().map(Process::id)
    }

    fn lost(&mut self) -> RequestError {
        let how = self.child.take().map(Process::describe_exit).unwrap_or_default();
        info!(how, "child lost");
        RequestError::Lost(how)
    }

    fn start(&self) -> Result<(Process, Host), RequestError> {
        let program = || self.launcher.program.clone();
        let started = Process::start(&self.launcher);
        let mut child = started.map_err(|source| ChildError::Start { program: program(), source })?;
        let why = match child.next(self.launcher.reply_timeout, &self.interrupt) {
            ChildEvent::Reply(reply) => match *reply {
                Reply::Ready { version: PROBE_VERSION, host } => {
                    info!(child = child.id(), program = %program().display(), "child started");
                    return Ok((child, host));
                }
                Reply::Ready { version, .. } => {
                    return Err(ChildError::Version { program: program(), found: version }.into());
                }
                other => format!("it began with {other:?}"),
            },
            ChildEvent::Garbage(line) => format!("it began with {line:?}"),
            ChildEvent::Timeout => format!("nothing for {} s", self.launcher.reply_timeout.as_secs_f64()),
            ChildEvent::End => child.describe_exit(),
            ChildEvent::Interrupted => return Err(RequestError::Interrupted),
        };
        Err(ChildError::NotReady { program: program(), why }.into())
    }
}

/// Logs a reply. Statistics are too long for a line.
fn log_reply(reply: &Reply) {
    match reply {
        Reply::Measured { case, timing, peak_resident } => info!(
            case,
            runs = timing.runs,
            median_ms = timing.median_ms,
            p10_ms = timing.p10_ms,
            p90_ms = timing.p90_ms,
            peak_resident,
            "case measured"
        ),
        Reply::CaseFailed { case, reason } => info!(case, reason, "case failed"),
        Reply::Observed { .. } => info!("statistics received"),
        other => info!(reply = ?other, "reply"),
    }
}

#[cfg(test)]
mod tests;
