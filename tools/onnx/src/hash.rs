//! Hashes of files: BLAKE3 over everything, and over the samples that `hpp_schema::sample_ranges` names.

use crate::store::Contents;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Bytes read at a time; large enough for several threads to hash one piece.
const CHUNK: usize = 4 << 20;

/// A file could not be read to its end.
#[derive(Debug, thiserror::Error)]
#[error("cannot hash {path}")]
pub struct HashError {
    /// The file.
    pub path: PathBuf,
    /// What went wrong.
    pub source: io::Error,
}

/// BLAKE3 of a whole file, in hexadecimal, in bounded memory and on every core for large files.
pub fn full(path: &Path) -> Result<String, HashError> {
    let hash = File::open(path).and_then(|mut file| {
        let bytes = file.metadata()?.len();
        range_of(&mut file, 0..bytes)
    });
    said(path, hash)
}

fn said(path: &Path, hash: io::Result<blake3::Hash>) -> Result<String, HashError> {
    hash.map(|hash| hash.to_hex().to_string()).map_err(|source| HashError { path: path.to_owned(), source })
}

/// The sampled hash of a file, in hexadecimal: the same time whatever its length.
pub fn sampled(path: &Path) -> Result<String, HashError> {
    let hash = File::open(path).and_then(|mut file| {
        let bytes = file.metadata()?.len();
        samples_of(&mut file, bytes)
    });
    said(path, hash)
}

/// What [`full`] says of a file called `path` that holds this.
pub fn full_of(contents: &Contents, path: &Path) -> Result<String, HashError> {
    said(path, range_of(&mut contents.reader(), 0..contents.bytes()))
}

/// What [`sampled`] says of it.
pub fn sampled_of(contents: &Contents, path: &Path) -> Result<String, HashError> {
    said(path, samples_of(&mut contents.reader(), contents.bytes()))
}

fn samples_of(file: &mut (impl Read + Seek), bytes: u64) -> io::Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&bytes.to_le_bytes());
    for (offset, length) in hpp_schema::sample_ranges(bytes) {
        feed(&mut hasher, file, offset..offset + length)?;
    }
    Ok(hasher.finalize())
}

/// BLAKE3 of one range of an open file.
pub fn range_of(file: &mut (impl Read + Seek), range: Range<u64>) -> io::Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    feed(&mut hasher, file, range)?;
    Ok(hasher.finalize())
}

fn feed(hasher: &mut blake3::Hasher, file: &mut (impl Read + Seek), range: Range<u64>) -> io::Result<()> {
    file.seek(SeekFrom::Start(range.start))?;
    let mut left = range.end - range.start;
    let mut buffer = vec![0; CHUNK.min(left.try_into().unwrap_or(CHUNK))];
    while left > 0 {
        let piece = &mut buffer[..CHUNK.min(left.try_into().unwrap_or(CHUNK))];
        file.read_exact(piece)?;
        left -= piece.len() as u64;
        // Below this, waking threads costs more than hashing.
        if piece.len() >= 256 << 10 {
            hasher.update_rayon(piece)
        } else {
            hasher.update(piece)
        };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn both_hashes_see_a_change() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![7u8; 9 << 20]).unwrap();
        let (whole, some) = (full(file.path()).unwrap(), sampled(file.path()).unwrap());
        assert_eq!(whole, blake3::hash(&vec![7u8; 9 << 20]).to_hex().as_str());
        file.as_file().set_len((9 << 20) - 1).unwrap();
        assert_ne!(sampled(file.path()).unwrap(), some);
        assert_ne!(full(file.path()).unwrap(), whole);
    }

    #[test]
    fn a_short_file_is_length_then_contents() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"abc").unwrap();
        let expected = blake3::hash(b"\x03\0\0\0\0\0\0\0abc");
        assert_eq!(sampled(file.path()).unwrap(), expected.to_hex().as_str());
    }

    #[test]
    fn sixty_sparse_gigabytes_take_no_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(60 << 30).unwrap();
        let start = std::time::Instant::now();
        sampled(file.path()).unwrap();
        assert!(start.elapsed().as_millis() < 500);
    }
}
