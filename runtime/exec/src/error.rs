//! Every error that can end a command, with its exit code and, where there is one, a hint for the user.

use crate::inputs::InputsError;
use crate::measure::MeasureError;
use crate::planning::PlanningError;
use crate::prompt::PromptReadError;
use crate::tensors::{NpyError, NpzError};
use hpp_engine::EngineError;
use hpp_generate::grammar::SCHEMA_HINT;
use hpp_generate::kv::PageStoreError;
use hpp_generate::sampling::SamplingError;
use hpp_generate::{EmbeddingError, GenerateError, PlanFileError, PromptError};
use hpp_io::{FileWriteError, LogFilterError, StdoutError};
use hpp_schema::ByteSize;
use std::io;
use std::path::PathBuf;

/// What ended a command.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ExecError {
    #[error(transparent)]
    Plan(#[from] PlanFileError),
    #[error(transparent)]
    Generate(#[from] GenerateError),
    #[error(transparent)]
    Library(#[from] hpp_backend::OpenError),
    #[error(transparent)]
    Prompt(#[from] PromptReadError),
    #[error(transparent)]
    Inputs(#[from] InputsError),
    #[error(transparent)]
    Answers(#[from] crate::job_files::AnswersError),
    #[error("cannot read prompts from {}", path.display())]
    Prompts { path: PathBuf, source: io::Error },
    #[error("cannot read {} as a JSON schema", path.display())]
    JsonSchema { path: PathBuf, source: io::Error },
    #[error("cannot use {} as a table of embeddings", path.display())]
    Embeddings { path: PathBuf, source: EmbeddingError },
    #[error(transparent)]
    Npy(#[from] NpyError),
    #[error(transparent)]
    Npz(#[from] NpzError),
    #[error(transparent)]
    Measure(#[from] MeasureError),
    #[error(transparent)]
    Write(#[from] FileWriteError),
    #[error(transparent)]
    Output(#[from] StdoutError),
    #[error(transparent)]
    Planning(#[from] PlanningError),
    #[error(transparent)]
    LogFilter(#[from] LogFilterError),
    /// The options contradict each other or do not fit the model.
    #[error("{message}")]
    Usage { message: String, hint: String },
    /// The unsplit model exceeds the memory limit.
    #[error(
        "the unsplit model takes at least {} of memory for its weights, and this process may use {}",
        ByteSize(*required).human(), ByteSize(*limit).human()
    )]
    UnsplitTooLarge { required: u64, limit: u64 },
    #[error("cannot read from the terminal")]
    Terminal(#[source] rustyline::error::ReadlineError),
    #[error(transparent)]
    Serve(#[from] hpp_serve::ServeError),
    #[error(transparent)]
    Store(#[from] PageStoreError),
    #[error("cannot use the session {}", path.display())]
    Session { path: PathBuf, source: io::Error },
    #[error("cannot identify the plan")]
    Fingerprint(#[source] serde_json::Error),
    /// The unsplit model failed on inputs that were drawn at random.
    #[error("the unsplit model failed on random inputs")]
    RandomInputs(#[source] Box<ExecError>),
    /// A signal ended the process while it loaded a plan.
    #[error("loading was interrupted")]
    LoadInterrupted {
        /// The exit code of the process.
        code: u8,
    },
    #[error("cannot watch for Ctrl-C")]
    Signal(#[source] io::Error),
}

impl From<EngineError> for ExecError {
    fn from(error: EngineError) -> Self {
        ExecError::Generate(error.into())
    }
}

impl From<PromptError> for ExecError {
    fn from(error: PromptError) -> Self {
        ExecError::Generate(error.into())
    }
}

impl From<SamplingError> for ExecError {
    fn from(error: SamplingError) -> Self {
        ExecError::Generate(error.into())
    }
}

impl ExecError {
    /// The exit code. clap exits with 2 for a command line that it does not understand; errors found later exit with 1, as in the
    /// other commands.
    pub fn code(&self) -> u8 {
        match self {
            ExecError::Planning(error) => error.code(),
            ExecError::Output(StdoutError::Closed) => 0,
            ExecError::LoadInterrupted { code } => *code,
            _ if self.is_cancelled() => crate::interrupt::INTERRUPTED,
            _ => 1,
        }
    }

    /// Whether to print nothing: the reader of stdout went away, the user pressed Ctrl-C, or hpp-split has printed its own error.
    pub fn is_quiet(&self) -> bool {
        match self {
            ExecError::Output(StdoutError::Closed) => true,
            ExecError::Planning(error) => error.is_quiet(),
            _ => self.is_cancelled(),
        }
    }

    /// Whether Ctrl-C or another signal ended it.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, ExecError::LoadInterrupted { .. }) || matches!(self.engine(), Some(EngineError::Cancelled))
    }

    /// The engine's error, if it is one.
    pub fn engine(&self) -> Option<&EngineError> {
        match self {
            ExecError::Generate(GenerateError::Engine(error)) => Some(error),
            _ => None,
        }
    }

    /// What the user can do next.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            ExecError::Plan(e) => return e.hint(),
            ExecError::Generate(e) => e.hint()?,
            ExecError::Planning(e) => e.hint()?,
            ExecError::Library(e) => e.hint(),
            ExecError::Prompt(e) => e.hint()?,
            ExecError::Inputs(e) => e.hint(),
            _ if self.failed_write().is_some_and(hpp_io::is_full_disk) => {
                "free space (or raise `ulimit -f`), or write the file on another disk"
            }
            ExecError::Npz(e) => e.hint()?,
            ExecError::Answers(e) => e.hint(),
            ExecError::Serve(e) => e.hint()?,
            ExecError::Prompts { .. } => "give a file with one JSON object a line; hpp-exec jobs --help shows one",
            ExecError::JsonSchema { source, .. } => schema_hint(source)?,
            ExecError::Embeddings { .. } => {
                "give --embeddings the table that the model was exported with, [vocab, hidden]"
            }
            ExecError::LogFilter(e) => e.hint(),
            ExecError::RandomInputs(_) => {
                "random inputs need not fit each other, such as a mask and the caches that it covers: give fitting ones with --inputs IN.npz"
            }
            ExecError::Usage { hint, .. } => hint,
            ExecError::UnsplitTooLarge { .. } => "raise the limit, or run this on a machine with more memory",
            ExecError::Session { source, .. } if source.kind() == io::ErrorKind::InvalidData => {
                "the file is damaged: remove it, or use another name"
            }
            ExecError::Session { source, .. }
                if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) =>
            {
                "free space: the files */pages.kv beside the directory sessions only save computing, and may be deleted while no \
                 program uses them"
            }
            ExecError::Store(PageStoreError::Io { .. }) | ExecError::Session { .. } => {
                "give --kv-dir a directory in which you can write"
            }
            ExecError::Output(e) => e.hint(),
            _ => return None,
        };
        Some(hint.to_owned())
    }

    /// The I/O error, if a result could not be written.
    fn failed_write(&self) -> Option<&io::Error> {
        match self {
            ExecError::Write(error) | ExecError::Npz(NpzError::Write(error)) => Some(&error.source),
            ExecError::Npz(NpzError::WriteArray { source, .. }) => Some(source),
            _ => None,
        }
    }

    /// `error: ...`, its causes, and `hint: ...`.
    pub fn report(&self) -> String {
        hpp_schema::error_report(self, self.hint().as_deref())
    }
}

/// The hint for a schema file that cannot be read.
fn schema_hint(error: &io::Error) -> Option<&'static str> {
    match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => Some(SCHEMA_HINT),
        // Other programs take the schema itself as the argument; as a path it does not exist or is too long.
        io::ErrorKind::NotFound | io::ErrorKind::InvalidFilename => {
            Some("--json-schema takes a file: save the schema in one, and give its path")
        }
        _ => None,
    }
}
