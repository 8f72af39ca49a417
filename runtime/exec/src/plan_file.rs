//! Finding and reading the plan a person names.

use hpp_schema::{Plan, PlanError};
use std::io;
use std::path::{Path, PathBuf};

/// What a plan is called in its directory.
pub const PLAN_NAME: &str = "plan.yaml";

/// Largest file read as a plan, the same as `hpp-schema` parses; the largest real ones are a few megabytes.
const MOST_BYTES: u64 = 64 << 20;

/// A plan and the directory its paths are relative to.
#[derive(Debug)]
pub struct PlanFile {
    /// The plan.
    pub plan: Plan,
    /// The directory it lies in.
    pub dir: PathBuf,
    /// The file.
    pub path: PathBuf,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanFileError {
    /// The directory holds none.
    #[error("there is neither a {PLAN_NAME} nor a model in {}", dir.display())]
    NoPlanInside {
        /// The directory.
        dir: PathBuf,
    },
    /// What was named is a model, which has to be split first.
    #[error("{} is a model, not a plan", path.display())]
    IsModel {
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be read.
    #[error("cannot read the plan {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is not a plan this build can obey.
    #[error("cannot use the plan {}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<PlanError>,
    },
}

impl PlanFileError {
    /// The next step for a person.
    pub fn hint(&self) -> Option<String> {
        match self {
            PlanFileError::NoPlanInside { .. } => {
                Some("give a directory that hpp-split wrote, or a model: a directory with an .onnx file".to_owned())
            }
            PlanFileError::IsModel { .. } => Some("make a plan first: hpp-split MODEL --vram 24G --out DIR".to_owned()),
            PlanFileError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Some("give the plan.yaml that hpp-split wrote, its directory, or a model".to_owned())
            }
            PlanFileError::Read { .. } => None,
            PlanFileError::Parse { source, .. } => source.hint().map(str::to_owned),
        }
    }
}

impl PlanFile {
    /// Reads the plan at `path`, or inside it where it is a directory.
    pub fn open(path: &Path) -> Result<Self, PlanFileError> {
        let path = find(path)?;
        let read = |source| PlanFileError::Read { path: path.clone(), source };
        let text = hpp_io::read_text(&path, MOST_BYTES).map_err(read)?;
        let plan = Plan::from_sealed_yaml(&text)
            .map_err(|e| PlanFileError::Parse { path: path.clone(), source: Box::new(e) })?;
        let dir = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        Ok(Self { plan, dir, path })
    }

    /// A file the plan names.
    pub fn resolve(&self, file: &str) -> PathBuf {
        self.dir.join(file)
    }
}

fn find(path: &Path) -> Result<PathBuf, PlanFileError> {
    if path.is_dir() {
        let inside = path.join(PLAN_NAME);
        let missing = PlanFileError::NoPlanInside { dir: path.to_owned() };
        return if inside.is_file() { Ok(inside) } else { Err(missing) };
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
    fn what_is_not_a_plan_gets_a_next_step() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model.onnx");
        std::fs::write(&model, b"").unwrap();
        for path in [dir.path(), &model, &dir.path().join("none.yaml")] {
            let error = PlanFile::open(path).unwrap_err();
            assert!(error.hint().is_some_and(|h| h.contains("hpp-split")), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_device_without_an_end_is_no_plan() {
        let error = PlanFile::open(Path::new("/dev/zero")).unwrap_err();
        assert!(matches!(&error, PlanFileError::Read { source, .. } if source.kind() == io::ErrorKind::FileTooLarge));
    }

    #[test]
    fn a_directory_means_the_plan_inside() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(PLAN_NAME), b"not: a plan").unwrap();
        assert!(matches!(PlanFile::open(dir.path()), Err(PlanFileError::Parse { .. })));
    }
}
