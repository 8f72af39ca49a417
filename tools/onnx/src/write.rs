//! Writes files atomically: to `.partial` in the same directory, flushed to disk, then renamed. A name never holds half
//! a file.

use crate::proto::ModelProto;
use prost::Message;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Maximum size of a protobuf message.
const MAX_PROTO: u64 = (1 << 31) - 1;

/// The reason why a file could not be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum WriteError {
    #[error("cannot write {path}: the disk is full. Nothing was left under that name; free some space and run again")]
    DiskFull { path: PathBuf },
    #[error(
        "cannot write {path}: the process may write no file that large. Nothing was left under that name; raise the limit (ulimit -f) and run again"
    )]
    OverFileSizeLimit { path: PathBuf },
    #[error("cannot write {path}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path} would take {bytes} bytes, but no program reads an ONNX file over 2 GiB; keep its weights external")]
    TooLarge { path: PathBuf, bytes: u64 },
}

impl WriteError {
    /// Wraps an I/O error. A full disk and a limit on file sizes have errors of their own.
    pub fn new(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => WriteError::DiskFull { path },
            io::ErrorKind::FileTooLarge => WriteError::OverFileSizeLimit { path },
            _ => WriteError::Io { path, source },
        }
    }
}

/// Writes a model atomically. Returns the length of the file in bytes.
pub fn write_model(path: &Path, model: &ModelProto) -> Result<u64, WriteError> {
    let bytes = encode(path, model)?;
    write_bytes(path, &bytes)?;
    Ok(bytes.len() as u64)
}

/// Encodes a model for the file `path`, which the error names.
pub fn encode(path: &Path, model: &ModelProto) -> Result<Vec<u8>, WriteError> {
    let bytes = model.encoded_len() as u64;
    match bytes > MAX_PROTO {
        true => Err(WriteError::TooLarge { path: path.to_owned(), bytes }),
        false => Ok(model.encode_to_vec()),
    }
}

/// Writes a file atomically.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    write_whole(path, bytes).map_err(|source| WriteError::new(path, source))
}

/// Writes a file; an existing one stays until the new one is complete. Only for directories that this program created:
/// paths that a user names go through `hpp-io`, which handles symbolic links and devices.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let partial = partial_of(path);
    let written = File::create(&partial).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.and_then(|()| fs::rename(&partial, path)).inspect_err(|_| {
        let _ = fs::remove_file(&partial);
    })
}

/// The name of a file until it is complete.
pub fn partial_of(path: &Path) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub").join("model.onnx");
        assert!(matches!(write_bytes(&path, b"x"), Err(WriteError::Io { .. })));
        let occupied = dir.path().join("occupied");
        fs::create_dir(&occupied).unwrap();
        assert!(write_bytes(&occupied, b"x").is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "only the directory itself");
        assert!(fs::metadata(&occupied).unwrap().is_dir());
    }

    #[test]
    fn a_file_is_replaced_in_one_step() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        for text in ["old", "new"] {
            write_whole(&path, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        fs::create_dir(dir.path().join("x.json.partial")).unwrap();
        assert!(write_whole(&path, b"newer").is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "new", "what was there stays");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_called_so() {
        let error = File::options().write(true).open("/dev/full").and_then(|mut f| f.write_all(b"x")).unwrap_err();
        assert!(matches!(WriteError::new(Path::new("p"), error), WriteError::DiskFull { .. }));
    }
}
