//! Maps a file read-only as zero-copy [`Bytes`].
//!
//! Uses mmap-io because the mapping functions of memmap2, fmmap and rustix are `unsafe`, which the workspace allows in
//! `hpp-backend` only. As with any map, access to a file that was truncated after mapping raises SIGBUS.

use bytes::Bytes;
use mmap_io::MemoryMappedFile;
use std::io;
use std::path::Path;

struct Mapped {
    file: MemoryMappedFile,
    len: u64,
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        self.file.as_slice_bytes(0, self.len).unwrap_or_default()
    }
}

/// Maps a file. The map lives as long as any slice of the result. An empty file gives empty bytes.
pub fn map_file(path: &Path) -> io::Result<Bytes> {
    let metadata = std::fs::metadata(path)?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if metadata.len() == 0 {
        return Ok(Bytes::new());
    }
    let file = MemoryMappedFile::open_ro(path).map_err(|error| match error {
        mmap_io::MmapIoError::Io(error) => error,
        other => io::Error::other(other),
    })?;
    let len = file.len();
    Ok(Bytes::from_owner(Mapped { file, len }))
}

/// The offset of `part` in `whole`, if it is a slice of it.
pub fn position_in(whole: &Bytes, part: &[u8]) -> Option<u64> {
    let start = (part.as_ptr() as usize).checked_sub(whole.as_ptr() as usize)?;
    (start + part.len() <= whole.len()).then_some(start as u64)
}
