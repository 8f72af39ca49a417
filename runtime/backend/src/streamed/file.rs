//! A weight file that is read past the page cache, and that must stay what it was.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Offsets, lengths and addresses of direct reads are multiples of this.
pub(crate) const SECTOR: u64 = 4096;

/// A file open for reading.
#[derive(Debug)]
pub(super) struct WeightFile {
    path: PathBuf,
    file: File,
    /// Whether reads go past the page cache.
    direct: bool,
    /// Bytes it had when it was opened.
    bytes: u64,
    was: Identity,
}

/// What shows that a file was written to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Identity {
    bytes: u64,
    seconds: i64,
    nanoseconds: i64,
}

impl WeightFile {
    /// Opens a file for direct reads, or for ordinary ones where its file system knows no others.
    pub fn open(path: &Path) -> io::Result<Self> {
        let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
        let (file, direct) = match direct {
            Ok(file) => (file, true),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => (File::open(path)?, false),
            Err(error) => return Err(error),
        };
        let was = identity(&file)?;
        Ok(WeightFile { path: path.to_owned(), file, direct, bytes: was.bytes, was })
    }

    /// A file that says it has so many bytes, whatever is behind it: with nothing there, reads end early; `/proc/self/mem` fails
    /// where this process has no memory, as a disk does where it has a broken sector.
    #[cfg(test)]
    pub fn pretending(path: &Path, bytes: u64) -> Self {
        let file = File::open(path).unwrap();
        let was = identity(&file).unwrap();
        WeightFile { path: path.to_owned(), file, direct: false, bytes, was }
    }

    /// Whether reads go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    pub fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Bytes that a read of `length` at `offset` must bring: less than asked for at the end of the file.
    pub fn expected(&self, offset: u64, length: usize) -> usize {
        usize::try_from(self.bytes.saturating_sub(offset)).map_or(length, |left| left.min(length))
    }

    /// Reads at an offset; fewer bytes at the end of the file.
    pub fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(bytes, offset)
    }

    /// What was read is not kept a second time by the system.
    pub fn forget(&self, offset: u64, length: usize) {
        if !self.direct {
            crate::os::forget(&self.file, offset, length as u64);
        }
    }

    /// Fails where somebody has written to the file since it was opened.
    pub fn check(&self) -> io::Result<()> {
        let now = identity(&self.file)?;
        if now == self.was { Ok(()) } else { Err(changed(&self.path, self.was, now)) }
    }

    /// What it was when it was opened.
    pub fn identity(&self) -> Identity {
        self.was
    }

    /// The error of a file that was something else before it was opened.
    pub fn changed_since(&self, was: Identity) -> io::Error {
        changed(&self.path, was, self.was)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn changed(path: &Path, was: Identity, now: Identity) -> io::Error {
    io::Error::other(format!(
        "{} was changed while it was in use (it had {} bytes and has {}); restore it, or make the plan again",
        path.display(),
        was.bytes,
        now.bytes
    ))
}

fn identity(file: &File) -> io::Result<Identity> {
    let now = file.metadata()?;
    Ok(Identity { bytes: now.len(), seconds: now.mtime(), nanoseconds: now.mtime_nsec() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_change_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        std::fs::write(&path, vec![7; 10_000]).unwrap();
        let file = WeightFile::open(&path).unwrap();
        file.check().unwrap();
        assert_eq!(file.expected(8192, 4096), 10_000 - 8192);
        assert_eq!(file.expected(0, 4096), 4096);
        assert_eq!(file.expected(12_288, 4096), 0);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"more").unwrap();
        let error = file.check().unwrap_err().to_string();
        assert!(error.contains("had 10000 bytes and has 10004"), "{error}");
    }
}
