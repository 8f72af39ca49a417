//! Finds and reads a plan: a `plan.yaml`, or the one in a directory.

use hpp_schema::{Plan, PlanError};
use std::io;
use std::path::{Path, PathBuf};

/// File name of a plan in its directory.
pub const PLAN_NAME: &str = "plan.yaml";

/// Largest file read as a plan, the limit of `hpp-schema`'s parser too; the largest real ones have a few megabytes.
const MAX_BYTES: u64 = 64 << 20;

/// A plan and the directory its paths are relative to.
#[derive(Debug)]
pub struct PlanFile {
    /// The plan.
    pub plan: Plan,
    /// The directory that contains it.
    pub dir: PathBuf,
    /// The file.
    pub path: PathBuf,
}

/// Why a plan cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PlanFileError {
    /// The directory contains neither a plan nor a model.
    #[error("there is neither a {PLAN_NAME} nor a model in {}", dir.display())]
    NoPlan {
        /// The directory.
        dir: PathBuf,
    },
    /// There is nothing at the path.
    #[error("there is no plan or model at {}", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// The file is a model, which must be split first.
    #[error("{} is a model, not a plan", path.display())]
    IsModel {
        /// The file.
        path: PathBuf,
    },
    /// The file is something else.
    #[error("{} is neither a plan nor a model", path.display())]
    NotAPlan {
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be read.
    #[error("cannot read the plan {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system reported.
        source: io::Error,
    },
    /// The file is not a plan that this version can run.
    #[error("cannot use the plan {}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<PlanError>,
    },
}

const GIVE_PLAN: &str = "give the plan.yaml that hpp-split wrote, its directory, or a model";
/// The field that every plan has.
const VERSION_FIELD: &str = "hpp_plan:";

impl PlanFileError {
    /// What the user can do next.
    pub fn hint(&self) -> Option<String> {
        match self {
            PlanFileError::NoPlan { .. } => {
                Some("give a directory that hpp-split wrote, or a model: a directory with an .onnx file".to_owned())
            }
            PlanFileError::IsModel { .. } => Some("make a plan first: hpp-split MODEL --vram 24G --out DIR".to_owned()),
            PlanFileError::Missing { path } => Some(hpp_io::hub_hint(path).unwrap_or_else(|| GIVE_PLAN.to_owned())),
            PlanFileError::NotAPlan { .. } => Some(GIVE_PLAN.to_owned()),
            PlanFileError::Read { source, .. } => {
                (source.kind() == io::ErrorKind::PermissionDenied).then(|| crate::error::UNREADABLE.to_owned())
            }
            PlanFileError::Parse { source, .. } => source.hint().map(str::to_owned),
        }
    }
}

impl PlanFile {
    /// Reads the plan at `path`, or the `plan.yaml` in it if it is a directory.
    pub fn open(path: &Path) -> Result<Self, PlanFileError> {
        let path = find(path)?;
        let is_named_plan = path.file_name().is_some_and(|name| name == PLAN_NAME);
        let text = hpp_io::read_text(&path, MAX_BYTES).map_err(|source| match source.kind() {
            io::ErrorKind::InvalidData | io::ErrorKind::FileTooLarge if !is_named_plan => {
                PlanFileError::NotAPlan { path: path.clone() }
            }
            _ => PlanFileError::Read { path: path.clone(), source },
        })?;
        if !is_named_plan && !text.contains(VERSION_FIELD) {
            return Err(PlanFileError::NotAPlan { path });
        }
        let plan = Plan::from_sealed_yaml(&text)
            .map_err(|e| PlanFileError::Parse { path: path.clone(), source: Box::new(e) })?;
        let dir = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        Ok(Self { plan, dir, path })
    }

    /// The path of a file that the plan names.
    pub fn resolve(&self, file: &str) -> PathBuf {
        self.dir.join(file)
    }
}

fn find(path: &Path) -> Result<PathBuf, PlanFileError> {
    // An error means, for example, that this user may not search a directory of the path.
    let exists =
        |path: &Path| path.try_exists().map_err(|source| PlanFileError::Read { path: path.to_owned(), source });
    if !exists(path)? {
        return Err(PlanFileError::Missing { path: path.to_owned() });
    }
    if path.is_dir() {
        let plan = path.join(PLAN_NAME);
        return match exists(&plan)? && plan.is_file() {
            true => Ok(plan),
            false => Err(PlanFileError::NoPlan { dir: path.to_owned() }),
        };
    }
    if path.extension().is_some_and(|e| e == "onnx") {
        return Err(PlanFileError::IsModel { path: path.to_owned() });
    }
    Ok(path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_without_a_plan_are_errors_with_a_hint() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model.onnx");
        std::fs::write(&model, b"").unwrap();
        for path in [dir.path(), &model, &dir.path().join("none.yaml")] {
            let error = PlanFile::open(path).unwrap_err();
            assert!(error.hint().is_some_and(|h| h.contains("hpp-split")), "{error}");
        }
        let error = PlanFile::open(Path::new("owner-of/some-model")).unwrap_err();
        assert_eq!(error.to_string(), "there is no plan or model at owner-of/some-model");
        assert!(error.hint().is_some_and(|h| h.contains("hf download owner-of/some-model")));
    }

    #[cfg(unix)]
    #[test]
    fn a_path_that_cannot_be_followed_is_called_neither_missing_nor_a_model() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = PlanFile::open(&file.path().join("model.onnx")).unwrap_err();
        assert!(matches!(error, PlanFileError::Read { .. }), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn an_endless_device_is_not_a_plan() {
        let error = PlanFile::open(Path::new("/dev/zero")).unwrap_err();
        assert!(matches!(error, PlanFileError::NotAPlan { .. }), "{error}");
    }

    #[test]
    fn a_directory_stands_for_its_plan() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(PLAN_NAME), b"not: a plan").unwrap();
        assert!(matches!(PlanFile::open(dir.path()), Err(PlanFileError::Parse { .. })));
    }
}
