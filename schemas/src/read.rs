//! Plans as text: YAML in and out, with a newer version named before anything else is complained about.

use crate::{PLAN_VERSION, Plan};
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
    /// Reads a plan. It is not checked: see [`Plan::check`].
    pub fn from_yaml(text: &str) -> Result<Plan, PlanError> {
        if text.len() > MOST_BYTES {
            return Err(PlanError::TooLong(text.len()));
        }
        let syntax = |error: serde_saphyr::Error| PlanError::Syntax(error.to_string());
        let header: Header = serde_saphyr::from_str(text).map_err(syntax)?;
        match header.hpp_plan {
            None => Err(PlanError::NotAPlan),
            Some(found) if found != u64::from(PLAN_VERSION) => Err(PlanError::Version { found }),
            Some(_) => serde_saphyr::from_str(text).map_err(syntax),
        }
    }

    /// Writes a plan: fields in the order of the types, the same bytes for the same plan.
    pub fn to_yaml(&self) -> Result<String, PlanError> {
        serde_saphyr::to_string(self).map_err(|error| PlanError::Write(error.to_string()))
    }
}

/// The JSON Schema of a plan, as `schemas/plan.schema.json` has it.
pub fn plan_json_schema() -> String {
    let schema = schemars::schema_for!(Plan);
    let mut text = serde_json::to_string_pretty(&schema).unwrap_or_default();
    text.push('\n');
    text
}
