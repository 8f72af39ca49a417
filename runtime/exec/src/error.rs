//! Everything that can end a command, each with the exit code it deserves and, where there is one, the next step.

use crate::embeddings::EmbeddingsError;
use crate::inputs::InputsError;
use crate::plan_file::PlanFileError;
use crate::prompt::PromptError;
use crate::sampling::SamplingError;
use crate::tensors::{NpyError, NpzError};
use crate::text::{TemplateError, TokenizerError};
use hpp_engine::EngineError;
use hpp_io::StdoutError;
use hpp_io::WriteError;
use hpp_schema::ByteSize;

/// What ended a command.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ExecError {
    #[error(transparent)]
    Plan(#[from] PlanFileError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Library(#[from] hpp_backend::OpenError),
    #[error(transparent)]
    Prompt(#[from] PromptError),
    #[error(transparent)]
    Inputs(#[from] InputsError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    #[error(transparent)]
    Embeddings(#[from] EmbeddingsError),
    #[error(transparent)]
    Npy(#[from] NpyError),
    #[error(transparent)]
    Npz(#[from] NpzError),
    #[error(transparent)]
    Measure(#[from] crate::command::MeasureError),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Output(#[from] StdoutError),
    #[error(transparent)]
    Cache(#[from] crate::one_step::CacheError),
    /// A model was given, and nothing here can plan it.
    #[error("{} is a model, and hpp-split, which plans it, is neither beside hpp-exec nor on PATH", model.display())]
    NoPlanner { model: std::path::PathBuf },
    /// hpp-split cannot be run.
    #[error("cannot run {}", path.display())]
    Planner { path: std::path::PathBuf, source: std::io::Error },
    /// hpp-split failed and has said why.
    #[error("hpp-split made no plan")]
    NotPlanned { code: Option<u8> },
    /// The options do not fit together or do not fit the model.
    #[error("{message}")]
    Usage { message: String, hint: String },
    /// The unsplit model does not fit where its plan does.
    #[error(
        "the unsplit model takes at least {} of memory for its weights, and this process may use {}",
        ByteSize(*held).human(), ByteSize(*limit).human()
    )]
    UnsplitTooLarge { held: u64, limit: u64 },
    /// The terminal does not work.
    #[error("cannot read from the terminal")]
    Terminal(#[source] rustyline::error::ReadlineError),
    /// There is no room for a small file.
    #[error("cannot write a temporary file")]
    Scratch(#[source] std::io::Error),
    /// Ctrl-C cannot be taken over.
    #[error("cannot watch for Ctrl-C")]
    Signal(#[source] std::io::Error),
}

/// How the engine reports a file that is gone.
const ABSENT: &str = "cannot be read";
/// What to do where a file that a plan names is not there.
const MOVED: &str = "a plan refers to the model's files by paths relative to itself, so neither can be moved alone: move it back, or \
                     make the plan again with hpp-split MODEL --out DIR; hpp-split --pack makes a plan that can be moved";

impl ExecError {
    /// What the process answers. 2 is clap's, for a command line it does not understand; whatever is found out later is 1, as in
    /// the other commands.
    pub fn code(&self) -> u8 {
        match self {
            ExecError::NotPlanned { code } => code.unwrap_or(1),
            ExecError::Output(StdoutError::Closed) => 0,
            _ if self.is_cancelled() => crate::interrupt::INTERRUPTED,
            _ => 1,
        }
    }

    /// Whether there is nothing to tell: a reader that went away and a Ctrl-C are no news to whoever did it, and hpp-split has
    /// said itself why it failed, unless a signal ended it.
    pub fn is_quiet(&self) -> bool {
        matches!(self, ExecError::Output(StdoutError::Closed) | ExecError::NotPlanned { code: Some(_) })
            || self.is_cancelled()
    }

    /// Whether Ctrl-C ended it.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, ExecError::Engine(EngineError::Cancelled))
    }

    /// The next step for a person.
    pub fn hint(&self) -> Option<String> {
        match self {
            ExecError::Plan(e) => e.hint(),
            ExecError::Engine(EngineError::Files { problems }) if problems.iter().any(|p| p.contains(ABSENT)) => {
                Some(MOVED.to_owned())
            }
            ExecError::Engine(e) => e.hint().map(str::to_owned),
            ExecError::Tokenizer(TokenizerError::Load { path, .. }) if !path.exists() => Some(MOVED.to_owned()),
            ExecError::Template(TemplateError::Read { path, .. }) if !path.exists() => Some(MOVED.to_owned()),
            ExecError::Cache(e) => e.hint().map(str::to_owned),
            ExecError::NoPlanner { .. } => Some(
                "install hpp-split beside hpp-exec, or make the plan where it is: hpp-split MODEL --pack --out DIR"
                    .to_owned(),
            ),
            ExecError::Library(e) => Some(e.hint().to_owned()),
            ExecError::Prompt(e) => e.hint().map(str::to_owned),
            ExecError::Inputs(e) => e.hint(),
            ExecError::Usage { hint, .. } => Some(hint.clone()),
            ExecError::UnsplitTooLarge { .. } => {
                Some("raise the limit, or run this on a machine with more memory".to_owned())
            }
            ExecError::Output(_) => Some("free space where stdout goes, or send it elsewhere".to_owned()),
            ExecError::Write(e) if e.source.kind() == std::io::ErrorKind::StorageFull => {
                Some("free space, or write the file on another disk".to_owned())
            }
            ExecError::Sampling(_) => Some("compare the plan with the unsplit model: hpp-exec verify PLAN".to_owned()),
            ExecError::Template(e) => e.hint().map(str::to_owned),
            ExecError::Tokenizer(e) => Some(e.hint().to_owned()),
            _ => None,
        }
    }

    /// `error: ...`, the causes, and `hint: ...`.
    pub fn report(&self) -> String {
        hpp_schema::error_report(self, self.hint().as_deref())
    }
}
