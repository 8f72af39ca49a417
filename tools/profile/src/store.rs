//! The profile's file: read to be continued, written whole or not at all after each measurement.

use hpp_schema::{DocumentError, Finding, Profile};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Why the profile cannot be read, continued or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is one, and nobody said what to do with it.
    #[error("{} is there already", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// There is none to continue.
    #[error("there is no {} to continue", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// What is there is no good profile.
    #[error("cannot use {}{}", path.display(), listed(source.findings()))]
    Read {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: DocumentError,
    },
    /// The file cannot be read or written.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// What was measured cannot be written down.
    #[error("cannot write the profile")]
    Write(#[source] DocumentError),
    /// It is of something else.
    #[error("cannot continue {}:{}", path.display(), lines(differences))]
    Other {
        /// The file.
        path: PathBuf,
        /// Everything that differs.
        differences: Vec<String>,
        /// What to do.
        hint: &'static str,
    },
}

fn listed(findings: &[Finding]) -> String {
    findings.iter().map(|finding| format!("\n  {finding}")).collect()
}

fn lines(texts: &[String]) -> String {
    texts.iter().map(|text| format!("\n  {text}")).collect()
}

impl StoreError {
    /// What to do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            StoreError::Exists { .. } => {
                Some("continue it with --resume, replace it with --force, or choose another --out")
            }
            StoreError::Missing { .. } => Some("leave --resume out to begin one"),
            StoreError::Read { .. } => Some("measure anew with --force"),
            StoreError::Other { hint, .. } => Some(hint),
            StoreError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Some("free space and continue with --resume: what was saved before is whole")
            }
            _ => None,
        }
    }
}

/// Where a profile is kept.
#[derive(Clone, Debug)]
pub struct Store {
    path: PathBuf,
}

impl Store {
    /// At this path; nothing is opened yet.
    pub fn new(path: &Path) -> Self {
        Store { path: path.to_owned() }
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses where a file would be overwritten that nobody said may be.
    pub fn refuse_to_overwrite(&self) -> Result<(), StoreError> {
        match fs::symlink_metadata(&self.path) {
            Ok(_) => Err(StoreError::Exists { path: self.path.clone() }),
            Err(_) => Ok(()),
        }
    }

    /// Reads the profile that is there.
    pub fn read(&self) -> Result<Profile, StoreError> {
        let path = || self.path.clone();
        let text = fs::read_to_string(&self.path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => StoreError::Missing { path: path() },
            _ => StoreError::Io { action: "read", path: path(), source },
        })?;
        Profile::from_yaml(&text).map_err(|source| StoreError::Read { path: path(), source })
    }

    /// Replaces the file by this profile, in one step.
    pub fn save(&self, profile: &Profile) -> Result<(), StoreError> {
        let text = profile.to_yaml().map_err(StoreError::Write)?;
        write(&self.path, text.as_bytes())
    }
}

/// Writes a file, whole or not at all.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let failed = |source| StoreError::Io { action: "write", path: path.to_owned(), source };
    hpp_onnx::write_whole(path, bytes).map_err(failed)
}

/// The directory a file lies in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
