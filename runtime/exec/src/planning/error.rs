//! The errors of planning a model.

use hpp_schema::ByteSize;
use std::io;
use std::path::PathBuf;

/// Why there is no plan for a model.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum PlanningError {
    #[error("{} is a model, and hpp-split, which plans it, is neither beside hpp-exec nor on PATH", model.display())]
    NoPlanner { model: PathBuf },
    #[error("cannot run {}", path.display())]
    Planner { path: PathBuf, source: io::Error },
    /// hpp-split failed and has printed why, unless a signal ended it.
    #[error("hpp-split made no plan")]
    NotPlanned { code: Option<u8> },
    #[error("planning was interrupted")]
    Interrupted { code: u8 },
    #[error("{option} is for planning, and {} is a plan already", path.display())]
    AlreadyPlanned { option: &'static str, path: PathBuf },
    #[error("{} is a part of the plan {}, not a model", path.display(), plan.display())]
    PartOfPlan { path: PathBuf, plan: PathBuf },
    #[error("there is no directory for cached plans: no HPP_CACHE, no XDG_CACHE_HOME and no home directory")]
    NoCacheDirectory,
    #[error("HPP_CACHE_LIMIT is not a size")]
    CacheLimit(#[source] <ByteSize as std::str::FromStr>::Err),
    #[error("cannot use the plan cache {}", path.display())]
    Cache { path: PathBuf, source: io::Error },
    #[error("cannot read the model {}", path.display())]
    Model { path: PathBuf, source: io::Error },
    /// The plan's file is missing although another process holds the plan's lock.
    #[error("the cached plan {} is damaged, and another hpp-exec uses it", path.display())]
    InUse { path: PathBuf },
}

impl PlanningError {
    /// The exit code of the process: hpp-split's own, that of a signal, else 1.
    pub fn code(&self) -> u8 {
        match self {
            PlanningError::NotPlanned { code } => code.unwrap_or(1),
            PlanningError::Interrupted { code } => *code,
            _ => 1,
        }
    }

    /// Whether the error has been printed.
    pub fn is_quiet(&self) -> bool {
        matches!(self, PlanningError::NotPlanned { code: Some(_) } | PlanningError::Interrupted { .. })
    }

    /// What the user can do next.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            PlanningError::NoPlanner { .. } => {
                "install hpp-split beside hpp-exec, or make the plan where it is: hpp-split MODEL --pack --out DIR"
            }
            PlanningError::AlreadyPlanned { .. } => "leave the option out, or give the model instead of the plan",
            PlanningError::PartOfPlan { .. } => "give the plan or its directory, not one of its files: hpp-exec plan/",
            PlanningError::Cache { source, .. } if hpp_io::is_full_disk(source) => {
                "free space there, or give a directory on another disk with --cache or HPP_CACHE"
            }
            PlanningError::NoCacheDirectory | PlanningError::Cache { .. } => {
                "give a directory on a local disk with --cache or HPP_CACHE"
            }
            PlanningError::InUse { .. } => "wait until it has ended, or give another directory with --cache",
            PlanningError::Planner { .. }
            | PlanningError::NotPlanned { .. }
            | PlanningError::Interrupted { .. }
            | PlanningError::CacheLimit(_)
            | PlanningError::Model { .. } => return None,
        })
    }
}
