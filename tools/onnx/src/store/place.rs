//! Makes a weight file visible beside the partitions without copying it: a clone that shares its blocks, or a hard link.

use crate::weights::WeightFile;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// How a weight file came to be visible.
#[derive(Clone, Debug, PartialEq)]
pub enum Placed {
    /// It was there already.
    AlreadyThere,
    /// A hard link to it.
    HardLink,
    /// A copy-on-write clone of it.
    Clone,
    /// Neither is possible (another file system, say): use the weights' own directory instead.
    NotLinkable {
        /// Why, for people.
        why: String,
    },
}

/// Why a weight file cannot be placed and its own directory cannot help.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum PlaceError {
    #[error("cannot make the directory {path}")]
    Directory { path: PathBuf, source: io::Error },
    #[error("cannot place the weights {from} at {path}: another file of that name is there")]
    Occupied { from: PathBuf, path: PathBuf },
}

/// Makes `file` visible in `dir` under its location.
pub fn place(file: &WeightFile, dir: &Path) -> Result<Placed, PlaceError> {
    let path = dir.join(&file.location);
    if path.exists() {
        return match same_file(&file.path, &path) {
            true => Ok(Placed::AlreadyThere),
            false => Err(PlaceError::Occupied { from: file.path.clone(), path }),
        };
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(|source| PlaceError::Directory { path: parent.to_owned(), source })?;
    }
    // A clone leaves the original as it was; some readers refuse weights with a second hard link (onnx#7686).
    let Err(no_clone) = reflink_copy::reflink(&file.path, &path) else { return Ok(Placed::Clone) };
    // A failed clone may leave an empty file.
    let _ = fs::remove_file(&path);
    let Err(no_link) = fs::hard_link(&file.path, &path) else { return Ok(Placed::HardLink) };
    Ok(Placed::NotLinkable { why: format!("no hard link ({no_link}) and no clone ({no_clone})") })
}

/// What placing `file` in a directory that is yet to be made comes to: it can be linked from a directory of the same file system.
/// File systems that link nothing are only found by trying.
pub fn place_of(file: &WeightFile, dir: &Path) -> Placed {
    let above = dir.ancestors().find(|above| above.exists()).unwrap_or(dir);
    match same_system(&file.path, above) {
        true => Placed::HardLink,
        false => Placed::NotLinkable { why: "it lies on another file system".to_owned() },
    }
}

/// Whether two paths lie on one file system.
fn same_system(a: &Path, b: &Path) -> bool {
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

/// Whether two paths lead to one file.
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
        let placed = place(&file, to.path()).unwrap();
        assert!(matches!(placed, Placed::HardLink | Placed::Clone));
        assert_eq!(fs::read(to.path().join("weights/model.data")).unwrap(), b"weights");
        if placed == Placed::HardLink {
            assert_eq!(place(&file, to.path()).unwrap(), Placed::AlreadyThere);
        }
    }

    #[test]
    fn another_file_is_never_replaced() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = weight_file(from.path(), "model.data");
        fs::write(to.path().join("model.data"), b"mine").unwrap();
        assert!(matches!(place(&file, to.path()), Err(PlaceError::Occupied { .. })));
        assert_eq!(fs::read(to.path().join("model.data")).unwrap(), b"mine");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn another_file_system_is_reported() {
        let file = WeightFile { location: "status".into(), path: "/proc/self/status".into(), bytes: 0 };
        let to = tempfile::tempdir().unwrap();
        assert!(matches!(place(&file, to.path()).unwrap(), Placed::NotLinkable { .. }));
        assert!(!to.path().join("status").exists());
    }
}
