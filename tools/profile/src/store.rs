//! The profile's file: read to resume, replaced atomically after each measurement.

use hpp_io::is_stream;
use hpp_schema::{DocumentError, Finding, Profile};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Largest profile that is read, bytes; `hpp-schema` has the same limit.
const MOST_BYTES: u64 = 64 << 20;

/// Why the profile cannot be read, continued or written.
#[derive(Debug, thiserror::Error)]
pub enum ProfileStoreError {
    /// The file exists, and neither `--resume` nor `--force` was given.
    #[error("{} is there already", path.display())]
    Exists { path: PathBuf },
    #[error("{} is a directory, not a file", path.display())]
    Directory { path: PathBuf },
    #[error("there is no {} to continue", path.display())]
    Missing { path: PathBuf },
    #[error("cannot use {}{}", path.display(), listed(source.findings()))]
    Read { path: PathBuf, source: DocumentError },
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The failed action, a verb.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("cannot write the profile")]
    Write(#[source] DocumentError),
    #[error("cannot continue {}:{}", path.display(), lines(differences))]
    Other {
        path: PathBuf,
        differences: Vec<String>,
        /// What the user can do.
        hint: &'static str,
    },
}

fn listed(findings: &[Finding]) -> String {
    findings.iter().map(|finding| format!("\n  {finding}")).collect()
}

fn lines(texts: &[String]) -> String {
    texts.iter().map(|text| format!("\n  {text}")).collect()
}

impl ProfileStoreError {
    /// What the user can do.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            ProfileStoreError::Exists { .. } => {
                Some("continue it with --resume, replace it with --force, or choose another --out")
            }
            ProfileStoreError::Directory { .. } => Some("give the name of a file, in this directory or another"),
            ProfileStoreError::Missing { .. } => Some("leave --resume out to begin one"),
            ProfileStoreError::Read { .. } => {
                Some("choose another --out; a profile that is damaged is measured anew with --force")
            }
            ProfileStoreError::Other { hint, .. } => Some(hint),
            ProfileStoreError::Io { source, .. } if hpp_io::is_full_disk(source) => Some(
                "free space (or raise `ulimit -f`) and run the command again; add --resume if the profile exists: what it has is whole",
            ),
            _ => None,
        }
    }
}

/// The file of a profile.
#[derive(Clone, Debug)]
pub struct Store {
    path: PathBuf,
}

impl Store {
    pub fn new(path: &Path) -> Self {
        Store { path: path.to_owned() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses a directory, and a path where no file can be created. Neither `--resume` nor `--force` could help there.
    pub fn check_creatable(&self) -> Result<(), ProfileStoreError> {
        check_creatable(&self.path)
    }

    /// Refuses if the file exists. A device or a pipe is not overwritten.
    pub fn refuse_to_overwrite(&self) -> Result<(), ProfileStoreError> {
        match fs::symlink_metadata(&self.path) {
            Ok(_) if !is_stream(&self.path) => Err(ProfileStoreError::Exists { path: self.path.clone() }),
            _ => Ok(()),
        }
    }

    /// Refuses a file that is no profile. [`save`](Self::save) replaces whatever is there.
    pub fn refuse_another_kind(&self) -> Result<(), ProfileStoreError> {
        check_writable(&self.path, PROFILE_START)
    }

    /// Reads the existing profile.
    pub fn read(&self) -> Result<Profile, ProfileStoreError> {
        let path = || self.path.clone();
        let text = hpp_io::read_text(&self.path, MOST_BYTES).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => ProfileStoreError::Missing { path: path() },
            _ => ProfileStoreError::Io { action: "read", path: path(), source },
        })?;
        Profile::from_yaml(&text).map_err(|source| ProfileStoreError::Read { path: path(), source })
    }

    /// Replaces the file atomically. Does nothing for a stream, which takes a single profile from [`finish`](Self::finish).
    pub fn save(&self, profile: &Profile) -> Result<(), ProfileStoreError> {
        if is_stream(&self.path) { Ok(()) } else { self.write(profile) }
    }

    /// Writes the profile to a stream, which [`save`](Self::save) skips.
    pub fn finish(&self, profile: &Profile) -> Result<(), ProfileStoreError> {
        if is_stream(&self.path) { self.write(profile) } else { Ok(()) }
    }

    /// The message after Ctrl-C: what was saved and how to continue.
    pub fn after_an_interrupt(&self) -> String {
        let path = self.path.display();
        match is_stream(&self.path) {
            true => format!("interrupted; nothing was sent to {path}: a profile that can be continued needs a file"),
            false => format!("interrupted; the measurements so far are in {path}: continue with --resume"),
        }
    }

    fn write(&self, profile: &Profile) -> Result<(), ProfileStoreError> {
        let text = profile.to_yaml().map_err(ProfileStoreError::Write)?;
        hpp_io::write_file(&self.path, text.as_bytes()).map_err(not_written)
    }
}

/// Writes a file atomically, or writes the bytes to a stream. An existing file is replaced only if it begins with `start`.
pub fn write(path: &Path, bytes: &[u8], start: &[u8]) -> Result<(), ProfileStoreError> {
    hpp_io::write_file_as(path, bytes, start).map_err(not_written)
}

/// Refuses a directory, a path where no file can be created, and a file that [`write`] would not replace.
pub fn check_writable(path: &Path, start: &[u8]) -> Result<(), ProfileStoreError> {
    check_creatable(path)?;
    hpp_io::check_replaceable(path, start).map_err(not_written)
}

/// Refuses a directory, and a path where no file can be created.
fn check_creatable(path: &Path) -> Result<(), ProfileStoreError> {
    if path.is_dir() {
        return Err(ProfileStoreError::Directory { path: path.to_owned() });
    }
    hpp_io::check_creatable(path).map_err(not_written)
}

fn not_written(error: hpp_io::FileWriteError) -> ProfileStoreError {
    ProfileStoreError::Io { action: "write", path: error.path, source: error.source }
}

/// How a profile begins.
const PROFILE_START: &[u8] = b"hpp_profile:";

/// The directory a file lies in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(all(test, unix))]
mod tests;
