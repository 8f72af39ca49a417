//! Reads and writes plans as YAML. A plan of another version is refused by its version, before any other error.

use crate::{PLAN_VERSION, Plan, Seal, document};
use serde::Deserialize;

/// Size limit, bytes. A plan of a thousand partitions has a hundredth of it.
const MAX_BYTES: usize = 64 << 20;

/// Why a plan could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The text exceeds the size limit.
    #[error("the plan is too large: {0} bytes, limit {MAX_BYTES}")]
    TooLong(usize),
    /// The plan has another version.
    #[error("this plan has version {found}, and this build reads version {PLAN_VERSION}")]
    Version {
        /// The version in the plan.
        found: u64,
    },
    /// The text lacks the header of a plan.
    #[error("this is not a plan: it has no line `hpp_plan: {PLAN_VERSION}`")]
    NotAPlan,
    /// The text is not valid YAML, or violates the format.
    #[error("cannot read the plan: {0}")]
    Syntax(String),
    /// The plan differs from its seal.
    #[error("the plan was changed after hpp-split wrote it, at {}", .places.join(", "))]
    Changed {
        /// The changed places, by path in the plan.
        places: Vec<String>,
    },
    /// A plan that is to be run has no seal.
    #[error("the plan has no seal, so changes to it cannot be detected")]
    NoSeal,
    /// The plan cannot be written as YAML.
    #[error("cannot write the plan as YAML: {0}")]
    Write(String),
}

impl PlanError {
    /// What the user can do, if anything.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            PlanError::Version { found } if *found > u64::from(PLAN_VERSION) => {
                Some("install a newer hpp-exec, or make the plan again with this build's hpp-split")
            }
            PlanError::Write(_) => None,
            PlanError::Syntax(_) => {
                Some("the file may be damaged: make the plan again in another directory, hpp-split MODEL --out DIR")
            }
            PlanError::Changed { .. } => Some(
                "make the plan again with hpp-split and other options; only budgets, generation, predictions, model.name and \
                 each partition's providers and reason may be edited by hand",
            ),
            _ => Some("make the plan again with hpp-split"),
        }
    }
}

/// The header field, which every version has. All other fields are ignored.
#[derive(Deserialize)]
struct Header {
    hpp_plan: Option<u64>,
}

/// The file records of a plan of any version. All other fields are ignored.
#[derive(Deserialize)]
struct Files {
    files: Vec<FilePath>,
}

#[derive(Deserialize)]
struct FilePath {
    path: String,
}

impl Plan {
    /// The paths of a plan's files, relative to the plan, even if the plan has another version. `None` if the text
    /// names none.
    pub fn file_paths(text: &str) -> Option<Vec<String>> {
        let files: Files = serde_saphyr::from_str(text).ok()?;
        Some(files.files.into_iter().map(|file| file.path).collect())
    }

    /// Parses a plan. If it has a seal, the seal must match. Does not check the plan: see [`Plan::check`].
    pub fn from_yaml(text: &str) -> Result<Plan, PlanError> {
        unsealed(text).map(|(plan, _)| plan)
    }

    /// Like [`from_yaml`](Plan::from_yaml), but requires a seal: for plans that are to be run.
    pub fn from_sealed_yaml(text: &str) -> Result<Plan, PlanError> {
        match unsealed(text)? {
            (plan, true) => Ok(plan),
            (_, false) => Err(PlanError::NoSeal),
        }
    }

    /// Writes a plan with its seal, fields in the order of the types. Equal plans give equal bytes.
    pub fn to_yaml(&self) -> Result<String, PlanError> {
        let seal = Seal::of(self).map_err(|error| PlanError::Write(error.to_string()))?;
        let sealed = Plan { seal: Some(seal), ..self.clone() };
        serde_saphyr::to_string(&sealed).map_err(|error| PlanError::Write(error.to_string()))
    }
}

/// Parses a plan and removes its seal; returns whether it had one.
fn unsealed(text: &str) -> Result<(Plan, bool), PlanError> {
    if text.len() > MAX_BYTES {
        return Err(PlanError::TooLong(text.len()));
    }
    let syntax =
        |error: serde_saphyr::Error| PlanError::Syntax(error.to_string().trim_start_matches("error: ").to_owned());
    let header: Header = serde_saphyr::from_str(text).map_err(syntax)?;
    let mut plan: Plan = match header.hpp_plan {
        None => return Err(PlanError::NotAPlan),
        Some(found) if found != u64::from(PLAN_VERSION) => return Err(PlanError::Version { found }),
        Some(_) => serde_saphyr::from_str(text).map_err(syntax)?,
    };
    let Some(seal) = plan.seal.take() else { return Ok((plan, false)) };
    let places = seal.differences(&plan).map_err(|error| PlanError::Syntax(error.to_string()))?;
    if places.is_empty() { Ok((plan, true)) } else { Err(PlanError::Changed { places }) }
}

/// The JSON Schema of a plan, as in `schemas/plan.schema.json`.
pub fn plan_json_schema() -> String {
    document::json_schema::<Plan>()
}
