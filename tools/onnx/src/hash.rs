//! Hashes files with BLAKE3: whole files, and the samples that `hpp_schema::sample_ranges` defines.

use crate::quantize::NotFiniteError;
use crate::virtual_file::VirtualFile;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Bytes per read: enough for several threads to hash one chunk.
const CHUNK: usize = 4 << 20;

/// A file could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot hash {path}")]
pub struct HashError {
    /// The file.
    pub path: PathBuf,
    /// The cause.
    pub source: io::Error,
}

impl HashError {
    /// The number that cannot be quantized, if that is the cause. Then the file is virtual and its path does not exist.
    pub fn not_finite(&self) -> Option<NotFiniteError> {
        self.source.get_ref()?.downcast_ref::<NotFiniteError>().cloned()
    }
}

/// Hash of a whole file, in hexadecimal. Uses bounded memory, and all cores for large files.
pub fn full(path: &Path) -> Result<String, HashError> {
    let hash = File::open(path).and_then(|mut file| {
        let bytes = file.metadata()?.len();
        range_of(&mut file, 0..bytes)
    });
    to_hex(path, hash)
}

fn to_hex(path: &Path, hash: io::Result<blake3::Hash>) -> Result<String, HashError> {
    hash.map(|hash| hash.to_hex().to_string()).map_err(|source| HashError { path: path.to_owned(), source })
}

/// Hash of samples of a file and its length, in hexadecimal. The time does not depend on the length.
pub fn sampled(path: &Path) -> Result<String, HashError> {
    let hash = File::open(path).and_then(|mut file| {
        let bytes = file.metadata()?.len();
        samples_of(&mut file, bytes)
    });
    to_hex(path, hash)
}

/// Same as [`full`], for a virtual file. `path` is for error messages.
pub fn full_virtual(file: &VirtualFile, path: &Path) -> Result<String, HashError> {
    to_hex(path, range_of(&mut file.reader(), 0..file.bytes()))
}

/// Same as [`sampled`], for a virtual file. `path` is for error messages.
pub fn sampled_virtual(file: &VirtualFile, path: &Path) -> Result<String, HashError> {
    to_hex(path, samples_of(&mut file.reader(), file.bytes()))
}

fn samples_of(file: &mut (impl Read + Seek), bytes: u64) -> io::Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&bytes.to_le_bytes());
    for (offset, length) in hpp_schema::sample_ranges(bytes) {
        feed(&mut hasher, file, offset..offset + length)?;
    }
    Ok(hasher.finalize())
}

/// Hash of one range of an open file.
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
        // For shorter chunks, waking threads costs more than hashing.
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
    fn sampling_60_sparse_gigabytes_is_fast() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(60 << 30).unwrap();
        let start = std::time::Instant::now();
        sampled(file.path()).unwrap();
        assert!(start.elapsed().as_millis() < 500);
    }
}
