//! The errors of this command, and the function that prints them.

use crate::child::ChildError;
use crate::corpus::CorpusError;
use crate::pieces::PieceError;
use crate::store::StoreError;
use hpp_io::{LogFilterError, StdoutError};
use hpp_model::ModelError;
use std::process::ExitCode;

/// Exit status after Ctrl-C.
const INTERRUPTED: u8 = 130;

/// Why profiling ended early.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The model cannot be understood.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model's files cannot be hashed.
    #[error("cannot tell which model this is")]
    Hash(#[from] hpp_onnx::hash::HashError),
    /// The corpus cannot be used.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    /// The profile cannot be read, continued or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Nothing can be measured because the child does not start.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// The model cannot be cut into pieces.
    #[error(transparent)]
    Piece(#[from] PieceError),
    /// The model cannot be instrumented.
    #[error(transparent)]
    Tap(#[from] crate::taps::TapError),
    /// The model cannot be rounded.
    #[error(transparent)]
    Sensitivity(#[from] crate::sensitivity::SensitivityError),
    /// The report cannot be drawn.
    #[error(transparent)]
    Report(#[from] crate::report::ReportError),
    /// Two statistics have different shapes.
    #[error("cannot merge the statistics of the corpus")]
    Statistics(#[from] hpp_schema::StatisticsMismatch),
    /// `HPP_LOG` is invalid.
    #[error(transparent)]
    LogFilter(#[from] LogFilterError),
    /// A setting makes no sense for this model.
    #[error("{message}")]
    Setting {
        /// What is wrong.
        message: String,
        /// What the user can do.
        hint: String,
    },
    /// Stdout cannot be written.
    #[error(transparent)]
    Stdout(#[from] StdoutError),
    /// A file could not be read or written.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The failed action, a verb.
        action: &'static str,
        /// The file or directory.
        path: std::path::PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
    /// Ctrl-C. The measurements so far are saved.
    #[error("interrupted")]
    Interrupted,
}

impl ProfileError {
    /// An invalid setting.
    pub fn setting(message: impl Into<String>, hint: impl Into<String>) -> Self {
        ProfileError::Setting { message: message.into(), hint: hint.into() }
    }

    /// Prints the error, its causes and its hint; returns the exit status.
    pub fn report(&self) -> ExitCode {
        match self {
            ProfileError::Interrupted => return ExitCode::from(INTERRUPTED),
            ProfileError::Stdout(error) if error.is_closed() => return ExitCode::SUCCESS,
            _ => {}
        }
        eprintln!("{}", hpp_schema::error_report(self, self.hint().as_deref()));
        ExitCode::from(1)
    }

    fn hint(&self) -> Option<String> {
        match self {
            ProfileError::Model(error) => error.hint(),
            ProfileError::Corpus(error) => error.hint().map(str::to_owned),
            ProfileError::Store(error) => error.hint().map(str::to_owned),
            ProfileError::Child(error) => error.hint().map(str::to_owned),
            ProfileError::Piece(error) => error.hint().map(str::to_owned),
            ProfileError::Tap(error) => error.hint().map(str::to_owned),
            ProfileError::Sensitivity(error) => error.hint().map(str::to_owned),
            ProfileError::LogFilter(error) => Some(error.hint().to_owned()),
            ProfileError::Setting { hint, .. } => Some(hint.clone()),
            ProfileError::Stdout(_) => Some("free space where stdout goes, or send it elsewhere".to_owned()),
            _ => None,
        }
    }
}
