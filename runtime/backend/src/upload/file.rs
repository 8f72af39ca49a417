//! A weight file that is read by several threads, and that must stay what it was.

use crate::os;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A file open for reading.
#[derive(Debug)]
pub(super) struct WeightFile {
    path: PathBuf,
    file: File,
    was: (u64, Option<SystemTime>),
}

impl WeightFile {
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let was = identity(&file)?;
        Ok(WeightFile { path: path.to_owned(), file, was })
    }

    /// Fills `bytes` from an offset on, and fails where the file is not what it was when it was opened. `forget` tells the system
    /// not to keep them as well.
    pub fn read(&self, offset: u64, bytes: &mut [u8], forget: bool) -> Result<(), String> {
        let path = self.path.display();
        read_exact(&self.file, bytes, offset).map_err(|error| self.cannot_read(offset, &error))?;
        if forget {
            os::forget(&self.file, offset, bytes.len() as u64);
        }
        match identity(&self.file) {
            Ok(now) if now == self.was => Ok(()),
            _ => Err(format!("{path} was changed while it was in use; restore it, or make the plan again")),
        }
    }

    /// Why nothing could be read at an offset.
    pub fn cannot_read(&self, offset: u64, error: &io::Error) -> String {
        let path = self.path.display();
        format!("cannot read {path} at {offset}: {error}; restore it, or make the plan again")
    }
}

fn identity(file: &File) -> io::Result<(u64, Option<SystemTime>)> {
    let about = file.metadata()?;
    Ok((about.len(), about.modified().ok()))
}

#[cfg(unix)]
fn read_exact(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

#[cfg(windows)]
fn read_exact(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, bytes, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => {
                bytes = &mut bytes[read..];
                offset += read as u64;
            }
        }
    }
    Ok(())
}
