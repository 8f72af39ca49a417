//! A weight file, and detection of writes to it: its length and mtime must stay what they were when it was opened.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Offsets, lengths and addresses of direct reads are multiples of this.
pub(crate) const SECTOR: u64 = 4096;

/// A weight file open for reading.
#[derive(Debug)]
pub(super) struct WeightFile {
    path: PathBuf,
    file: File,
    /// Whether reads bypass the page cache.
    direct: bool,
    /// Its length when it was opened.
    bytes: u64,
    opened_as: FileVersion,
}

/// The attributes of a file that change when it is written to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct FileVersion {
    bytes: u64,
    modified: Option<SystemTime>,
}

impl WeightFile {
    /// Opens a file for reads through the page cache.
    pub fn open_buffered(path: &Path) -> io::Result<Self> {
        Self::new(path, File::open(path)?, false)
    }

    /// Opens a file for direct reads, or for buffered ones if its file system has no direct reads.
    #[cfg(target_os = "linux")]
    pub fn open(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        match std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path) {
            Ok(file) => Self::new(path, file, true),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Self::open_buffered(path),
            Err(error) => Err(error),
        }
    }

    fn new(path: &Path, file: File, direct: bool) -> io::Result<Self> {
        let opened_as = version(&file)?;
        Ok(WeightFile { path: path.to_owned(), file, direct, bytes: opened_as.bytes, opened_as })
    }

    /// For tests: a file with a false length. Reads past its real end are short; reads of `/proc/self/mem` fail where this process has no
    /// memory, as a disk does at a broken sector.
    #[cfg(all(test, target_os = "linux"))]
    pub fn with_length(path: &Path, bytes: u64) -> Self {
        WeightFile { bytes, ..Self::open_buffered(path).unwrap() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether reads bypass the page cache.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only Linux reads directly"))]
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    #[cfg(target_os = "linux")]
    pub fn descriptor(&self) -> std::os::fd::RawFd {
        std::os::fd::AsRawFd::as_raw_fd(&self.file)
    }

    /// Bytes that a read of `length` at `offset` returns: fewer than `length` at the end of the file.
    pub fn expected(&self, offset: u64, length: usize) -> usize {
        usize::try_from(self.bytes.saturating_sub(offset)).map_or(length, |left| left.min(length))
    }

    /// Reads up to `bytes.len()` bytes at an offset.
    pub fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        read_at(&self.file, bytes, offset)
    }

    /// Fills `bytes` from an offset on. An error if the file has changed since it was opened. `drop_cached` drops what was read from
    /// the page cache.
    pub fn read_exact(&self, offset: u64, bytes: &mut [u8], drop_cached: bool) -> Result<(), String> {
        let mut done = 0;
        while done < bytes.len() {
            match self.read_at(&mut bytes[done..], offset + done as u64) {
                Ok(0) => return Err(self.cannot_read(offset, &io::ErrorKind::UnexpectedEof.into())),
                Ok(more) => done += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.cannot_read(offset, &error)),
            }
        }
        if drop_cached {
            self.drop_cached(offset, bytes.len());
        }
        self.check().map_err(|error| error.to_string())
    }

    /// The message of a failed read.
    pub fn cannot_read(&self, offset: u64, error: &io::Error) -> String {
        let path = self.path.display();
        format!("cannot read {path} at {offset}: {error}; restore it, or make the plan again")
    }

    /// Drops a range from the page cache. Does nothing for direct reads, which do not fill it.
    pub fn drop_cached(&self, offset: u64, length: usize) {
        if !self.direct {
            crate::os::drop_cached(&self.file, offset, length as u64);
        }
    }

    /// An error if the file was written to since it was opened.
    pub fn check(&self) -> io::Result<()> {
        let now = version(&self.file)?;
        if now == self.opened_as { Ok(()) } else { Err(changed(&self.path, self.opened_as, now)) }
    }

    /// The version that was opened.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only Linux reopens files"))]
    pub fn version(&self) -> FileVersion {
        self.opened_as
    }

    /// The error of a file that was no longer the version `before` when it was opened.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only Linux reopens files"))]
    pub fn changed_since(&self, before: FileVersion) -> io::Error {
        changed(&self.path, before, self.opened_as)
    }
}

#[cfg(unix)]
fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, bytes, offset)
}

#[cfg(windows)]
fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, bytes, offset)
}

fn version(file: &File) -> io::Result<FileVersion> {
    let metadata = file.metadata()?;
    Ok(FileVersion { bytes: metadata.len(), modified: metadata.modified().ok() })
}

fn changed(path: &Path, before: FileVersion, now: FileVersion) -> io::Error {
    io::Error::other(format!(
        "{} was changed while it was in use (it had {} bytes and has {}); restore it, or make the plan again",
        path.display(),
        before.bytes,
        now.bytes
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_change_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        std::fs::write(&path, vec![7; 10_000]).unwrap();
        let file = WeightFile::open_buffered(&path).unwrap();
        file.check().unwrap();
        assert_eq!(file.expected(8192, 4096), 10_000 - 8192);
        assert_eq!(file.expected(0, 4096), 4096);
        assert_eq!(file.expected(12_288, 4096), 0);
        std::fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"more").unwrap();
        let error = file.check().unwrap_err().to_string();
        assert!(error.contains("had 10000 bytes and has 10004"), "{error}");
    }
}
