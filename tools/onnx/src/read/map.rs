//! A whole file as zero-copy [`Bytes`] over a read-only memory map.

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

/// Maps a file; the map lives as long as any slice of the result. An empty file gives empty bytes.
pub fn map_file(path: &Path) -> io::Result<Bytes> {
    let about = std::fs::metadata(path)?;
    if about.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if about.len() == 0 {
        return Ok(Bytes::new());
    }
    let file = MemoryMappedFile::open_ro(path).map_err(|error| match error {
        mmap_io::MmapIoError::Io(error) => error,
        other => io::Error::other(other),
    })?;
    let len = file.len();
    Ok(Bytes::from_owner(Mapped { file, len }))
}

/// Where `part` begins inside `whole`, if it is a slice of it.
pub fn position_in(whole: &Bytes, part: &[u8]) -> Option<u64> {
    let start = (part.as_ptr() as usize).checked_sub(whole.as_ptr() as usize)?;
    (start + part.len() <= whole.len()).then_some(start as u64)
}
