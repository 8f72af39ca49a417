//! The errors of this command, and the function that prints them.

use crate::child::ChildError;
use crate::corpus::CorpusError;
use crate::interrupt::INTERRUPTED;
use crate::pieces::PieceError;
use crate::store::ProfileStoreError;
use hpp_io::{LogFilterError, StdoutError};
use hpp_model::ModelError;
use std::process::ExitCode;

/// Why profiling ended early.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ProfileError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("cannot tell which model this is")]
    Hash(#[from] hpp_onnx::hash::HashError),
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    #[error(transparent)]
    Store(#[from] ProfileStoreError),
    #[error(transparent)]
    Child(#[from] ChildError),
    #[error(transparent)]
    Piece(#[from] PieceError),
    #[error(transparent)]
    Tap(#[from] crate::taps::TapError),
    #[error(transparent)]
    Sensitivity(#[from] crate::sensitivity::SensitivityError),
    #[error("cannot merge the statistics of the corpus")]
    Statistics(#[from] hpp_schema::StatisticsMismatch),
    /// `HPP_LOG` is invalid.
    #[error(transparent)]
    LogFilter(#[from] LogFilterError),
    /// A setting makes no sense for this model.
    #[error("{message}")]
    Setting {
        message: String,
        /// What the user can do.
        hint: String,
    },
    #[error(transparent)]
    Stdout(#[from] StdoutError),
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The failed action, a verb.
        action: &'static str,
        path: std::path::PathBuf,
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
        hpp_io::line_to_stderr(&hpp_schema::error_report(self, self.hint().as_deref()));
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
            ProfileError::Io { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => {
                Some("give --out a path in a directory that may be written".to_owned())
            }
            ProfileError::Stdout(error) => Some(error.hint().to_owned()),
            _ => None,
        }
    }
}
