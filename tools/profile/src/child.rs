//! The child that measures: `hpp-exec probe`, asked and answered in JSON lines.
//!
//! Whatever happens to it (a crash, a hang, the end of memory) costs the request it was busy with. The next request finds a fresh
//! child.

mod process;

use crate::interrupt::Interrupt;
use hpp_schema::Host;
use hpp_schema::probe::{PROBE_VERSION, Reply, Request};
use process::{Event, Process};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why no child can be had.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The program is not there or cannot be run.
    #[error("cannot run {}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It ended or fell silent before it was ready.
    #[error("{} does not answer: {why}", program.display())]
    NotReady {
        /// The program.
        program: PathBuf,
        /// Why.
        why: String,
    },
    /// It is of another version.
    #[error("{} speaks version {found} of the protocol, and this build speaks version {PROBE_VERSION}", program.display())]
    Version {
        /// The program.
        program: PathBuf,
        /// What it speaks.
        found: u32,
    },
}

impl ChildError {
    /// What to do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            ChildError::Start { .. } | ChildError::Version { .. } => {
                Some("put the hpp-exec of this version beside hpp-profile, or name it in HPP_EXEC")
            }
            ChildError::NotReady { .. } => Some("`hpp-exec devices` says what stands in the way"),
        }
    }
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// The child said why; it lives on.
    #[error("{0}")]
    Refused(String),
    /// The child is lost, and how.
    #[error("{0}")]
    Lost(String),
    /// Ctrl-C. The child is ended.
    #[error("interrupted")]
    Interrupted,
    /// No child can be had any more.
    #[error(transparent)]
    Start(#[from] ChildError),
}

/// How children are started.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The program.
    pub program: PathBuf,
    /// What comes before its requests.
    pub arguments: Vec<OsString>,
    /// Longest silence: after it the child counts as hung and is ended.
    pub patience: Duration,
}

impl Launcher {
    /// `hpp-exec probe` beside this program, or what `HPP_EXEC` names.
    pub fn beside(own: &Path, named: Option<OsString>, patience: Duration) -> Self {
        let beside = || own.with_file_name(format!("hpp-exec{}", std::env::consts::EXE_SUFFIX));
        let program = named.filter(|name| !name.is_empty()).map_or_else(beside, PathBuf::from);
        Launcher { program, arguments: vec!["probe".into()], patience }
    }
}

/// A child at a time, started when there is something to ask.
pub struct Prober {
    launcher: Launcher,
    interrupt: Interrupt,
    child: Option<Process>,
}

impl Prober {
    /// Starts nothing yet.
    pub fn new(launcher: Launcher, interrupt: Interrupt) -> Self {
        Prober { launcher, interrupt, child: None }
    }

    /// Who measures. Starts the child if there is none.
    pub fn host(&mut self) -> Result<Host, Trouble> {
        let (process, host) = self.start()?;
        self.child = Some(process);
        Ok(host)
    }

    /// Asks. [`answer`](Self::answer) gives the answers, and has to be called until there are no more.
    pub fn ask(&mut self, request: &Request) -> Result<(), Trouble> {
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
    pub fn answer(&mut self) -> Result<Option<Reply>, Trouble> {
        let Some(child) = &mut self.child else { return Ok(None) };
        match child.next(self.launcher.patience, &self.interrupt) {
            Event::Reply(reply) => match *reply {
                Reply::Done => Ok(None),
                Reply::Failed { reason } => Err(Trouble::Refused(reason)),
                reply => Ok(Some(reply)),
            },
            Event::Garbage(line) => {
                self.child = None;
                Err(Trouble::Lost(format!("hpp-exec said what is no reply: {line:?}")))
            }
            Event::Silence => {
                self.child = None;
                Err(Trouble::Lost(format!("it hung: no answer for {} s", self.launcher.patience.as_secs_f64())))
            }
            Event::End => Err(self.lost()),
            Event::Interrupted => {
                self.child = None;
                Err(Trouble::Interrupted)
            }
        }
    }

    /// Ends the child, so that the next request finds a fresh one with nothing in memory.
    pub fn refresh(&mut self) {
        self.child = None;
    }

    /// The process id of the child, while there is one.
    pub fn child_id(&self) -> Option<u32> {
        self.child.as_ref().map(Process::id)
    }

    fn lost(&mut self) -> Trouble {
        let how = self.child.take().map(Process::how_it_ended);
        Trouble::Lost(how.unwrap_or_default())
    }

    fn start(&self) -> Result<(Process, Host), Trouble> {
        let program = || self.launcher.program.clone();
        let started = Process::start(&self.launcher);
        let mut child = started.map_err(|source| ChildError::Start { program: program(), source })?;
        let why = match child.next(self.launcher.patience, &self.interrupt) {
            Event::Reply(reply) => match *reply {
                Reply::Ready { version: PROBE_VERSION, host } => return Ok((child, host)),
                Reply::Ready { version, .. } => {
                    return Err(ChildError::Version { program: program(), found: version }.into());
                }
                other => format!("it began with {other:?}"),
            },
            Event::Garbage(line) => format!("it began with {line:?}"),
            Event::Silence => format!("nothing for {} s", self.launcher.patience.as_secs_f64()),
            Event::End => child.how_it_ended(),
            Event::Interrupted => return Err(Trouble::Interrupted),
        };
        Err(ChildError::NotReady { program: program(), why }.into())
    }
}

#[cfg(test)]
mod tests;
