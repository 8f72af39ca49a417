//! Files that appear complete or not at all: written beside their place, then moved there.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A file being written. Dropping it leaves nothing behind.
pub struct AtomicFile {
    temporary: NamedTempFile,
    path: PathBuf,
}

/// Why a file could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}", path.display())]
pub struct WriteError {
    /// The file.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

impl AtomicFile {
    /// Begins a file that will appear at `path`.
    pub fn create(path: &Path) -> Result<Self, WriteError> {
        let error = |source| WriteError { path: path.to_owned(), source };
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if path.is_dir() {
            return Err(error(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory")));
        }
        let mut builder = tempfile::Builder::new();
        builder.prefix(".hpp-").suffix(".partial");
        ordinary_permissions(&mut builder);
        let temporary = builder.tempfile_in(directory).map_err(error)?;
        Ok(Self { temporary, path: path.to_owned() })
    }

    /// Where the bytes go meanwhile.
    pub fn file(&mut self) -> &mut File {
        self.temporary.as_file_mut()
    }

    /// Where the file will appear.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the file in its place.
    pub fn finish(self) -> Result<(), WriteError> {
        let path = self.path;
        self.temporary.persist(&path).map(drop).map_err(|e| WriteError { path, source: e.error })
    }
}

/// Temporary files are private; what becomes a result is as readable as any file the user makes.
#[cfg(unix)]
fn ordinary_permissions(builder: &mut tempfile::Builder<'_, '_>) {
    use std::os::unix::fs::PermissionsExt;
    builder.permissions(std::fs::Permissions::from_mode(0o666));
}

#[cfg(not(unix))]
fn ordinary_permissions(_: &mut tempfile::Builder<'_, '_>) {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn nothing_appears_until_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let mut file = AtomicFile::create(&path).unwrap();
        file.file().write_all(b"half").unwrap();
        assert!(!path.exists());
        drop(file);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

        let mut file = AtomicFile::create(&path).unwrap();
        file.file().write_all(b"whole").unwrap();
        file.finish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"whole");
    }

    #[test]
    fn a_missing_directory_is_named() {
        let error = AtomicFile::create(Path::new("no/such/dir/x.npy")).err().unwrap();
        assert!(error.to_string().contains("no/such/dir/x.npy"));
    }
}
