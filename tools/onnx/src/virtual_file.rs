//! A virtual file: the contents of a file that is not written. It consists of ranges of memory and of other files, and computed ranges, with zeros
//! between them.

use bytes::Bytes;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Virtual files by location.
pub type VirtualFiles = BTreeMap<String, VirtualFile>;

/// The contents of a file that does not exist on disk.
#[derive(Clone, Debug, Default)]
pub struct VirtualFile {
    /// Ranges in order. Invariant: they do not overlap.
    pieces: Vec<Piece>,
    bytes: u64,
}

#[derive(Clone, Debug)]
struct Piece {
    /// Offset in the virtual file, bytes.
    at: u64,
    length: u64,
    source: PieceSource,
}

#[derive(Clone, Debug)]
enum PieceSource {
    Memory(Bytes),
    /// A file, and the offset of the piece in it, bytes.
    File(PathBuf, u64),
    /// Computed bytes, and the offset of the piece in them.
    Computed(Arc<dyn Computed>, u64),
}

/// Bytes that are computed when they are read.
pub(crate) trait Computed: std::fmt::Debug + Send + Sync {
    /// Reads some bytes from `offset` on, at least one if the buffer is not empty. The same offset always gives the same bytes.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;
}

impl VirtualFile {
    /// The contents of an existing file.
    pub fn of_file(path: &Path) -> io::Result<Self> {
        let mut file = VirtualFile::default();
        file.put_file(0, path, 0, fs::metadata(path)?.len());
        Ok(file)
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends bytes at offset `at`.
    pub(crate) fn put_bytes(&mut self, at: u64, bytes: Bytes) {
        self.put(Piece { at, length: bytes.len() as u64, source: PieceSource::Memory(bytes) });
    }

    /// Appends a range of a file at offset `at`.
    pub(crate) fn put_file(&mut self, at: u64, path: &Path, offset: u64, length: u64) {
        self.put(Piece { at, length, source: PieceSource::File(path.to_owned(), offset) });
    }

    /// Appends computed bytes at offset `at`.
    pub(crate) fn put_computed(&mut self, at: u64, contents: Arc<dyn Computed>, length: u64) {
        self.put(Piece { at, length, source: PieceSource::Computed(contents, 0) });
    }

    /// Appends a range of another virtual file at offset `at`.
    pub(crate) fn put_part(&mut self, at: u64, of: &VirtualFile, offset: u64, length: u64) {
        for piece in &of.pieces {
            let (start, end) = (piece.at.max(offset), (piece.at + piece.length).min(offset + length));
            if start < end {
                let skipped = start - piece.at;
                let source = match &piece.source {
                    PieceSource::Memory(bytes) => {
                        PieceSource::Memory(bytes.slice(skipped as usize..(end - piece.at) as usize))
                    }
                    PieceSource::File(path, begins) => PieceSource::File(path.clone(), begins + skipped),
                    PieceSource::Computed(of, begins) => PieceSource::Computed(of.clone(), begins + skipped),
                };
                self.put(Piece { at: at + start - offset, length: end - start, source });
            }
        }
        self.bytes = self.bytes.max(at + length);
    }

    fn put(&mut self, piece: Piece) {
        debug_assert!(piece.at >= self.bytes);
        self.bytes = piece.at + piece.length;
        self.pieces.push(piece);
    }

    /// A reader that starts at the beginning.
    pub fn reader(&self) -> VirtualFileReader<'_> {
        VirtualFileReader { contents: self, position: 0, open: None }
    }
}

impl<T: Into<Bytes>> From<T> for VirtualFile {
    fn from(bytes: T) -> Self {
        let mut file = VirtualFile::default();
        file.put_bytes(0, bytes.into());
        file
    }
}

/// Reads a virtual file.
pub struct VirtualFileReader<'a> {
    contents: &'a VirtualFile,
    position: u64,
    /// The last source file that was read.
    open: Option<(&'a Path, File)>,
}

impl VirtualFileReader<'_> {
    fn read_piece(&mut self, piece: usize, buffer: &mut [u8]) -> io::Result<usize> {
        let contents = self.contents;
        let Piece { at, source, .. } = &contents.pieces[piece];
        let (path, offset) = match source {
            PieceSource::Memory(bytes) => {
                let start = (self.position - at) as usize;
                buffer.copy_from_slice(&bytes[start..start + buffer.len()]);
                return Ok(buffer.len());
            }
            PieceSource::Computed(of, offset) => return of.read_at(offset + self.position - at, buffer),
            PieceSource::File(path, offset) => (path.as_path(), offset + self.position - at),
        };
        let file = match self.open.take() {
            Some((open, file)) if open == path => file,
            _ => File::open(path)?,
        };
        let (_, file) = self.open.insert((path, file));
        file.seek(SeekFrom::Start(offset))?;
        file.read(buffer)
    }
}

impl Read for VirtualFileReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let VirtualFile { pieces, bytes } = self.contents;
        let next = pieces.partition_point(|piece| piece.at + piece.length <= self.position);
        let piece = pieces.get(next);
        let within = piece.filter(|piece| piece.at <= self.position);
        let until = match (within, piece) {
            (Some(piece), _) => piece.at + piece.length,
            (None, Some(next)) => next.at,
            (None, None) => *bytes,
        };
        let length = until.saturating_sub(self.position).min(buffer.len() as u64) as usize;
        let read = match within {
            Some(_) if length > 0 => self.read_piece(next, &mut buffer[..length])?,
            _ => {
                buffer[..length].fill(0);
                length
            }
        };
        self.position += read as u64;
        Ok(read)
    }
}

impl Seek for VirtualFileReader<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
            SeekFrom::End(by) => self.contents.bytes.checked_add_signed(by),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A virtual file of memory, a file, parts of other virtual files and gaps, and its bytes.
    fn example(lengths: &[(u8, u8)], file: &Path) -> (VirtualFile, Vec<u8>) {
        let (mut contents, mut bytes) = (VirtualFile::default(), Vec::new());
        let all = fs::read(file).unwrap();
        for (number, (gap, length)) in lengths.iter().enumerate() {
            bytes.resize(bytes.len() + usize::from(*gap), 0);
            let (at, length) = (bytes.len() as u64, usize::from(*length));
            match number % 3 {
                0 => contents.put_bytes(at, all[..length].to_vec().into()),
                1 => contents.put_file(at, file, 7, length as u64),
                _ => contents.put_part(at, &contents.clone(), 3, (length as u64).min(at.saturating_sub(3))),
            }
            let part = match number % 3 {
                0 => all[..length].to_vec(),
                1 => all[7..7 + length].to_vec(),
                _ => bytes[3.min(bytes.len())..(3 + length).min(bytes.len()).max(3.min(bytes.len()))].to_vec(),
            };
            bytes.extend(part);
        }
        (contents, bytes)
    }

    proptest! {
        #[test]
        fn pieces_and_gaps_are_read_as_one_file(lengths in proptest::collection::vec((0u8..9, 0u8..40), 1..8), from in 0u64..50) {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("file");
            fs::write(&file, (1..=100).collect::<Vec<u8>>()).unwrap();
            let (contents, bytes) = example(&lengths, &file);
            let mut read = Vec::new();
            contents.reader().read_to_end(&mut read).unwrap();
            prop_assert_eq!(&read, &bytes);
            prop_assert_eq!(contents.bytes(), bytes.len() as u64);
            let mut reader = contents.reader();
            reader.seek(SeekFrom::Start(from)).unwrap();
            read.clear();
            reader.read_to_end(&mut read).unwrap();
            prop_assert_eq!(&read[..], bytes.get(from as usize..).unwrap_or_default());
        }
    }
}
