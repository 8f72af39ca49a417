//! Blocking direct reads: several in flight, bypassing the page cache.

use super::chunks::MAX_READ;
use super::open_files::ReadFrom;
use super::reader::{ReadTarget, Reader};
use crate::weights::file::{SECTOR, WeightFile};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The reader, shared by all files; serves one caller at a time.
#[derive(Default)]
pub(crate) struct DirectReads(Mutex<Option<Reader>>);

/// A weight file that is read directly.
pub(crate) struct DirectFile {
    file: ReadFrom,
    reads: Arc<DirectReads>,
}

impl DirectFile {
    /// Opens a file; `None` if its file system has no direct reads.
    pub fn open(path: &Path, reads: &Arc<DirectReads>) -> io::Result<Option<Self>> {
        let file = WeightFile::open(path)?;
        Ok(file.is_direct().then(|| DirectFile { file: ReadFrom::Open(Arc::new(file)), reads: Arc::clone(reads) }))
    }

    /// Whether an offset and an address are aligned for direct reads.
    pub fn is_aligned(offset: u64, address: *const u8) -> bool {
        offset.is_multiple_of(SECTOR) && (address as u64).is_multiple_of(SECTOR)
    }

    /// Fills `bytes`, whole sectors, from an offset to the end of the file at most. An error if the file has changed.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut reader = self.reads.0.lock().unwrap_or_else(PoisonError::into_inner);
        if reader.is_none() {
            *reader = Some(Reader::start()?);
        }
        let Some(reader) = reader.as_ref() else { return Ok(()) };
        let begin = |(number, piece): (usize, &mut [u8])| {
            let at = offset + number as u64 * MAX_READ;
            // SAFETY: `bytes` is borrowed mutably until all reads have been waited for, below.
            unsafe { reader.read(&self.file, at, piece.len(), ReadTarget::Memory(piece.as_mut_ptr() as usize)) }
        };
        let tickets: Vec<_> = bytes.chunks_mut(MAX_READ as usize).enumerate().map(begin).collect();
        // All are waited for, even if some fail.
        let ends: Vec<io::Result<_>> = tickets.into_iter().map(|ticket| reader.wait(ticket)).collect();
        ends.into_iter().collect::<io::Result<Vec<_>>>().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::Pages;

    #[test]
    fn direct_reads_return_the_contents_and_detect_a_change() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("weights");
        let contents: Vec<u8> = (0..5_000_003_u32).map(|at| (at % 249) as u8).collect();
        std::fs::write(&path, &contents).unwrap();
        let Some(file) = DirectFile::open(&path, &Arc::default()).unwrap() else {
            return eprintln!("SKIPPED: this file system has no direct reads");
        };
        let pages = Pages::reserve(contents.len().next_multiple_of(SECTOR as usize)).unwrap();
        assert!(DirectFile::is_aligned(SECTOR, pages.address()));
        assert!(!DirectFile::is_aligned(SECTOR + 16, pages.address()) && !DirectFile::is_aligned(0, 8 as *const u8));
        // SAFETY: the pages live, and only this test uses them.
        let bytes = unsafe { std::slice::from_raw_parts_mut(pages.address(), pages.len() - SECTOR as usize) };
        file.read(SECTOR, bytes).unwrap();
        assert!(bytes[..contents.len() - SECTOR as usize] == contents[SECTOR as usize..]);
        std::fs::write(&path, &contents[..9000]).unwrap();
        let error = file.read(0, bytes).unwrap_err().to_string();
        assert!(error.contains("was changed while it was in use"), "{error}");
    }
}
