//! Plans as text: YAML in and out, with a newer version named before anything else is complained about.

use crate::{PLAN_VERSION, Plan, Seal};
use serde::Deserialize;

/// Longest plan that is read. A plan of a thousand partitions is a hundredth of it.
const MOST_BYTES: usize = 64 << 20;

/// Why a plan could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The text is too long to be a plan.
    #[error("this is no plan: it has {0} bytes, and plans have at most {MOST_BYTES}")]
    TooLong(usize),
    /// The text says it is of a version this build does not read.
    #[error("this plan has version {found}, and this build reads version {PLAN_VERSION}")]
    Version {
        /// What it says.
        found: u64,
    },
    /// The text does not say it is a plan.
    #[error("this is no plan: it does not begin with `hpp_plan: {PLAN_VERSION}`")]
    NotAPlan,
    /// The text is not what a plan of this version looks like.
    #[error("cannot read the plan: {0}")]
    Syntax(String),
    /// The plan has a seal, and is not what was sealed.
    #[error("the plan was changed after hpp-split wrote it, at {}", .places.join(", "))]
    Changed {
        /// Where, by path in the plan.
        places: Vec<String>,
    },
    /// A plan that is to be run has no seal.
    #[error("the plan has no seal, so nothing tells whether it still is what hpp-split wrote")]
    NoSeal,
    /// The plan cannot be written as YAML.
    #[error("cannot write the plan as YAML: {0}")]
    Write(String),
}

impl PlanError {
    /// The next step for a person, where there is one.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            PlanError::Version { found } if *found > u64::from(PLAN_VERSION) => {
                Some("install a newer hpp-exec, or make the plan again with this build's hpp-split")
            }
            PlanError::Write(_) => None,
            PlanError::Changed { .. } => Some(
                "make the plan again with hpp-split, whose options decide these things; by hand only budgets, generation, \
                 predictions, model.name and each partition's providers and reason may be edited",
            ),
            _ => Some("make the plan again with hpp-split"),
        }
    }
}

/// The one field every version has. Others are ignored here and looked at afterwards.
#[derive(Deserialize)]
struct Header {
    hpp_plan: Option<u64>,
}

impl Plan {
    /// Reads a plan, whether or not it has a seal; one that it has must be right. The plan itself is not checked: see
    /// [`Plan::check`].
    pub fn from_yaml(text: &str) -> Result<Plan, PlanError> {
        unsealed(text).map(|(plan, _)| plan)
    }

    /// [`from_yaml`](Plan::from_yaml) of a plan that is to be run, which must have a seal.
    pub fn from_sealed_yaml(text: &str) -> Result<Plan, PlanError> {
        match unsealed(text)? {
            (plan, true) => Ok(plan),
            (_, false) => Err(PlanError::NoSeal),
        }
    }

    /// Writes a plan with its seal: fields in the order of the types, the same bytes for the same plan.
    pub fn to_yaml(&self) -> Result<String, PlanError> {
        let seal = Seal::of(self).map_err(|error| PlanError::Write(error.to_string()))?;
        let sealed = Plan { seal: Some(seal), ..self.clone() };
        serde_saphyr::to_string(&sealed).map_err(|error| PlanError::Write(error.to_string()))
    }
}

/// A plan without the seal it may have had, and whether it had one.
fn unsealed(text: &str) -> Result<(Plan, bool), PlanError> {
    if text.len() > MOST_BYTES {
        return Err(PlanError::TooLong(text.len()));
    }
    let syntax = |error: serde_saphyr::Error| PlanError::Syntax(error.to_string());
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

/// The JSON Schema of a plan, as `schemas/plan.schema.json` has it.
pub fn plan_json_schema() -> String {
    let schema = schemars::schema_for!(Plan);
    let mut text = serde_json::to_string_pretty(&schema).unwrap_or_default();
    text.push('\n');
    text
}
