//! Failures on their way to Python: the message and the hint that the commands print.

use hpp_backend::OpenError;
use hpp_engine::EngineError;
use hpp_generate::sampling::SamplingError;
use hpp_generate::text::{TemplateError, TokenizerError};
use hpp_generate::{GenerateError, PlanFileError, PromptError};
use pyo3::prelude::*;
use std::error::Error;

/// Why something failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The error and its causes.
    pub message: String,
    /// What the user can do next.
    pub hint: Option<String>,
}

impl Failure {
    /// An error, with its causes as the commands print them.
    pub fn new(error: &dyn Error, hint: Option<&str>) -> Self {
        let report = hpp_schema::error_report(error, None);
        let message = report.strip_prefix("error: ").unwrap_or(&report).to_owned();
        Failure { message, hint: hint.map(str::to_owned) }
    }

    /// A failure of this module's own.
    pub fn of(message: impl Into<String>, hint: &str) -> Self {
        Failure { message: message.into(), hint: Some(hint.to_owned()) }
    }

    /// The engine's thread has ended although a job waits for it.
    pub fn engine_gone() -> Self {
        Failure::of(
            "the engine of this model has ended",
            "load the plan again; if that happens again, run it with hpp-exec",
        )
    }
}

impl From<GenerateError> for Failure {
    fn from(error: GenerateError) -> Self {
        Failure::new(&error, error.hint())
    }
}

impl From<PlanFileError> for Failure {
    fn from(error: PlanFileError) -> Self {
        Failure::new(&error, error.hint().as_deref())
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        Failure::new(&error, Some(error.hint()))
    }
}

/// Converts errors by way of [`GenerateError`].
macro_rules! as_generate_error {
    ($($error:ty),*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                GenerateError::from(error).into()
            }
        }
    )*};
}

as_generate_error!(EngineError, PromptError, TokenizerError, TemplateError, SamplingError);

impl From<Failure> for PyErr {
    /// `hpp.HppError`.
    fn from(failure: Failure) -> Self {
        let Failure { message, hint } = failure;
        Python::attach(|py| {
            let class = py.import("hpp._errors").and_then(|module| module.getattr("HppError"));
            match class.and_then(|class| class.call1((message, hint))) {
                Ok(value) => PyErr::from_value(value),
                Err(error) => error,
            }
        })
    }
}
