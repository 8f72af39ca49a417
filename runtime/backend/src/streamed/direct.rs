//! Direct reads for whoever waits for them at once: several under way, past the page cache.

use super::chunks::CHUNK;
use super::file::{SECTOR, WeightFile};
use super::open_files::ReadFrom;
use super::reader::{Reader, To};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// What reads, for several files and threads, one after the other.
#[derive(Default)]
pub(crate) struct DirectReads(Mutex<Option<Reader>>);

/// A file of weights that is read past the page cache, and that must stay what it was.
pub(crate) struct DirectFile {
    file: ReadFrom,
    reads: Arc<DirectReads>,
}

impl DirectFile {
    /// Opens a file; `None` where its file system has no direct reads.
    pub fn open(path: &Path, reads: &Arc<DirectReads>) -> io::Result<Option<Self>> {
        let file = WeightFile::open(path)?;
        Ok(file.is_direct().then(|| DirectFile { file: ReadFrom::Open(Arc::new(file)), reads: Arc::clone(reads) }))
    }

    /// Whether bytes at this offset can be read to this address: both at whole sectors.
    pub fn reads_to(offset: u64, address: *const u8) -> bool {
        offset.is_multiple_of(SECTOR) && (address as u64).is_multiple_of(SECTOR)
    }

    /// Fills `bytes`, of which there are whole sectors, from an offset on; as far as the file goes, which must be what it was.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut reader = self.reads.0.lock().unwrap_or_else(PoisonError::into_inner);
        if reader.is_none() {
            *reader = Some(Reader::start()?);
        }
        let Some(reader) = reader.as_ref() else { return Ok(()) };
        let begin = |(number, piece): (usize, &mut [u8])| {
            let at = offset + number as u64 * CHUNK;
            // SAFETY: `bytes` is borrowed alone until all reads have been waited for, below.
            unsafe { reader.read(&self.file, at, piece.len(), To::Memory(piece.as_mut_ptr() as usize)) }
        };
        let tickets: Vec<_> = bytes.chunks_mut(CHUNK as usize).enumerate().map(begin).collect();
        // Each is waited for, whatever became of the others.
        let ends: Vec<io::Result<_>> = tickets.into_iter().map(|ticket| reader.wait(ticket)).collect();
        ends.into_iter().collect::<io::Result<Vec<_>>>().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::Pages;

    #[test]
    fn what_is_read_is_what_is_there_and_a_change_is_an_error() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("weights");
        let contents: Vec<u8> = (0..5_000_003_u32).map(|at| (at % 249) as u8).collect();
        std::fs::write(&path, &contents).unwrap();
        let Some(file) = DirectFile::open(&path, &Arc::default()).unwrap() else {
            return eprintln!("SKIPPED: this file system has no direct reads");
        };
        let pages = Pages::reserve(contents.len().next_multiple_of(SECTOR as usize)).unwrap();
        assert!(DirectFile::reads_to(SECTOR, pages.address()));
        assert!(!DirectFile::reads_to(SECTOR + 16, pages.address()) && !DirectFile::reads_to(0, 8 as *const u8));
        // SAFETY: the pages live and nobody else looks at them.
        let bytes = unsafe { std::slice::from_raw_parts_mut(pages.address(), pages.len() - SECTOR as usize) };
        file.read(SECTOR, bytes).unwrap();
        assert!(bytes[..contents.len() - SECTOR as usize] == contents[SECTOR as usize..]);
        std::fs::write(&path, &contents[..9000]).unwrap();
        let error = file.read(0, bytes).unwrap_err().to_string();
        assert!(error.contains("was changed while it was in use"), "{error}");
    }
}
