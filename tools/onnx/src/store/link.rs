//! Makes a weight file available in the directory of the partitions without copying it: a copy-on-write clone or a hard
//! link.

use crate::weights::WeightFile;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// How a weight file was made available.
#[derive(Clone, Debug, PartialEq)]
pub enum LinkOutcome {
    /// The directory already contained the file.
    AlreadyThere,
    /// A hard link.
    HardLink,
    /// A copy-on-write clone.
    Clone,
    /// Neither is possible, for example across file systems. Refer to the weights in their own directory instead.
    NotLinkable {
        /// The reason, for messages.
        why: String,
    },
}

/// The reason why a weight file cannot be linked, although linking into another directory might succeed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum LinkError {
    #[error("cannot create the directory {path}")]
    Directory { path: PathBuf, source: io::Error },
    #[error("cannot link the weights {from} at {path}: another file of that name exists")]
    Occupied { from: PathBuf, path: PathBuf },
}

/// Makes `file` available in `dir` under its location.
pub fn link(file: &WeightFile, dir: &Path) -> Result<LinkOutcome, LinkError> {
    let path = dir.join(&file.location);
    if path.exists() {
        return match same_file(&file.path, &path) {
            true => Ok(LinkOutcome::AlreadyThere),
            false => Err(LinkError::Occupied { from: file.path.clone(), path }),
        };
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(|source| LinkError::Directory { path: parent.to_owned(), source })?;
    }
    // A clone does not change the original: some readers refuse weights with a second hard link (onnx#7686).
    let Err(no_clone) = reflink_copy::reflink(&file.path, &path) else { return Ok(LinkOutcome::Clone) };
    // A failed clone may leave an empty file.
    let _ = fs::remove_file(&path);
    let Err(no_link) = fs::hard_link(&file.path, &path) else { return Ok(LinkOutcome::HardLink) };
    Ok(LinkOutcome::NotLinkable { why: format!("no hard link ({no_link}) and no clone ({no_clone})") })
}

/// Predicts the outcome of linking `file` into a directory that may not exist yet: linking succeeds on the same file
/// system. Does not detect file systems without hard links.
pub fn predict_link(file: &WeightFile, dir: &Path) -> LinkOutcome {
    let existing = dir.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(dir);
    match same_file_system(&file.path, existing) {
        true => LinkOutcome::HardLink,
        false => LinkOutcome::NotLinkable { why: "it is on another file system".to_owned() },
    }
}

/// Whether two paths are on one file system.
fn same_file_system(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let system = |path: &Path| fs::metadata(path).map(|m| m.dev()).ok();
        system(a).is_some_and(|id| system(b) == Some(id))
    }
    #[cfg(not(unix))]
    {
        let root = |path: &Path| {
            path.canonicalize().ok().and_then(|path| path.components().next().map(|c| c.as_os_str().to_owned()))
        };
        root(a).is_some_and(|id| root(b) == Some(id))
    }
}

/// Whether two paths name one file.
fn same_file(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let identity = |path: &Path| fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
        identity(a).is_some_and(|id| identity(b) == Some(id))
    }
    #[cfg(not(unix))]
    {
        let real = |path: &Path| path.canonicalize().ok();
        real(a).is_some_and(|path| real(b) == Some(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weight_file(dir: &Path, location: &str) -> WeightFile {
        let path = dir.join("model.data");
        fs::write(&path, b"weights").unwrap();
        WeightFile { location: location.into(), path, bytes: 7 }
    }

    #[test]
    fn linked_once_and_found_again() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = weight_file(from.path(), "weights/model.data");
        let outcome = link(&file, to.path()).unwrap();
        assert!(matches!(outcome, LinkOutcome::HardLink | LinkOutcome::Clone));
        assert_eq!(fs::read(to.path().join("weights/model.data")).unwrap(), b"weights");
        if outcome == LinkOutcome::HardLink {
            assert_eq!(link(&file, to.path()).unwrap(), LinkOutcome::AlreadyThere);
        }
    }

    #[test]
    fn another_file_is_never_replaced() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = weight_file(from.path(), "model.data");
        fs::write(to.path().join("model.data"), b"mine").unwrap();
        assert!(matches!(link(&file, to.path()), Err(LinkError::Occupied { .. })));
        assert_eq!(fs::read(to.path().join("model.data")).unwrap(), b"mine");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn another_file_system_is_reported() {
        let file = WeightFile { location: "status".into(), path: "/proc/self/status".into(), bytes: 0 };
        let to = tempfile::tempdir().unwrap();
        assert!(matches!(link(&file, to.path()).unwrap(), LinkOutcome::NotLinkable { .. }));
        assert!(!to.path().join("status").exists());
    }
}
