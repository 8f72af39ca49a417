//! Every way this command fails, and the one place that says so to a person.

use crate::complaint::Complaints;
use crate::output::OutputError;
use crate::refine::RefineError;
use hpp_io::{StdoutError, WriteError};
use hpp_model::ModelError;
use hpp_partition::{AssignError, NoFit};
use hpp_schema::ByteSize;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

/// Why nothing was split.
#[derive(Debug, thiserror::Error)]
pub enum SplitError {
    /// The model cannot be understood.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model was read but cannot be cut.
    #[error("cannot cut the model")]
    Cut(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A partition cannot be made or written.
    #[error("cannot make {name}")]
    Extract {
        /// Its name.
        name: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Weight bytes cannot be reached, copied or hashed.
    #[error("cannot provide the weights")]
    Weights(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The plan cannot be written down.
    #[error("cannot write the plan as YAML")]
    Plan(#[source] hpp_schema::PlanError),
    /// The placement does not fit.
    #[error("{what}")]
    NoFit {
        /// What was tried.
        what: String,
        /// The smallest budget that would do, bytes.
        smallest: u64,
        /// The numbers.
        source: NoFit,
    },
    /// `--assign` names something that is not there.
    #[error("cannot apply --assign")]
    Assign(#[from] AssignError),
    /// A setting makes no sense for this model.
    #[error("{message}")]
    Setting {
        /// What is wrong.
        message: String,
        /// What to do.
        hint: &'static str,
    },
    /// Several things are wrong, or one.
    #[error(transparent)]
    Complaints(#[from] Complaints),
    /// Plans could not be run here.
    #[error(transparent)]
    Refine(#[from] RefineError),
    /// The output directory refuses.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// A result cannot be shown.
    #[error(transparent)]
    Stdout(#[from] StdoutError),
    /// A file named on the command line cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A file could not be read or written.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl SplitError {
    /// A setting that makes no sense.
    pub fn setting(message: impl Into<String>, hint: &'static str) -> Self {
        SplitError::Setting { message: message.into(), hint }
    }

    /// Prints the error, its causes and what to do, and gives the exit status.
    pub fn report(&self) -> ExitCode {
        match self {
            SplitError::Complaints(complaints) => return report_all(complaints),
            SplitError::Stdout(error) if error.is_closed() => return ExitCode::SUCCESS,
            _ => {}
        }
        eprintln!("{}", hpp_schema::error_report(self, self.hint().as_deref()));
        ExitCode::from(if matches!(self, SplitError::Refine(RefineError::Interrupted)) { 130 } else { 1 })
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            SplitError::NoFit { source, smallest, .. } => {
                let smallest = ByteSize(*smallest);
                let flag = if source.place == hpp_partition::Place::Cpu { "--ram" } else { "--vram" };
                let slots = if source.demand.ring > 0 { "give fewer --slots, " } else { "" };
                format!(
                    "the smallest {flag} that would do is {} ({} bytes); or {slots}lower --context, or move blocks with --assign",
                    smallest.human(),
                    smallest.0
                )
            }
            SplitError::Model(error) => error.hint()?,
            SplitError::Setting { hint, .. } => (*hint).to_owned(),
            SplitError::Output(error) => error.hint()?.to_owned(),
            SplitError::Refine(error) => error.hint()?.to_owned(),
            SplitError::Stdout(_) => "free space where stdout goes, or send it elsewhere".to_owned(),
            SplitError::Write(error) if error.source.kind() == io::ErrorKind::StorageFull => {
                "free space, or write the file on another disk".to_owned()
            }
            SplitError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                "free space, or choose another disk with --out; nothing was left half-written".to_owned()
            }
            _ => return None,
        })
    }
}

/// Each complaint with its hint; a hint that the next one shares is said once, after the last of them.
fn report_all(complaints: &Complaints) -> ExitCode {
    for (at, complaint) in complaints.0.iter().enumerate() {
        eprintln!("error: {}", complaint.message);
        let shared = complaints.0.get(at + 1).is_some_and(|next| next.hint == complaint.hint);
        if let Some(hint) = complaint.hint.filter(|_| !shared) {
            eprintln!("hint: {hint}");
        }
    }
    ExitCode::from(1)
}
