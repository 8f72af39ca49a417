//! What a file would hold that is not written: ranges of memory and of other files, and zeros between them.

use bytes::Bytes;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Files that are not written, by location.
pub type Made = BTreeMap<String, Contents>;

/// What a file would hold.
#[derive(Clone, Debug, Default)]
pub struct Contents {
    /// In order; they do not overlap.
    pieces: Vec<Piece>,
    bytes: u64,
}

#[derive(Clone, Debug)]
struct Piece {
    /// Where it begins in the file, bytes.
    at: u64,
    length: u64,
    from: From,
}

#[derive(Clone, Debug)]
enum From {
    Memory(Bytes),
    /// A file, and where the piece begins there, bytes.
    File(PathBuf, u64),
}

impl Contents {
    /// Those of a file that is there.
    pub fn of_file(path: &Path) -> io::Result<Self> {
        let mut contents = Contents::default();
        contents.put_file(0, path, 0, fs::metadata(path)?.len());
        Ok(contents)
    }

    /// Length of the file, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Puts bytes behind what is there.
    pub(super) fn put_bytes(&mut self, at: u64, bytes: Bytes) {
        self.put(Piece { at, length: bytes.len() as u64, from: From::Memory(bytes) });
    }

    /// Puts a range of a file behind what is there.
    pub(super) fn put_file(&mut self, at: u64, path: &Path, offset: u64, length: u64) {
        self.put(Piece { at, length, from: From::File(path.to_owned(), offset) });
    }

    /// Puts a range of other contents behind what is there.
    pub(super) fn put_part(&mut self, at: u64, of: &Contents, offset: u64, length: u64) {
        for piece in &of.pieces {
            let (start, end) = (piece.at.max(offset), (piece.at + piece.length).min(offset + length));
            if start < end {
                let skipped = start - piece.at;
                let from = match &piece.from {
                    From::Memory(bytes) => From::Memory(bytes.slice(skipped as usize..(end - piece.at) as usize)),
                    From::File(path, begins) => From::File(path.clone(), begins + skipped),
                };
                self.put(Piece { at: at + start - offset, length: end - start, from });
            }
        }
        self.bytes = self.bytes.max(at + length);
    }

    fn put(&mut self, piece: Piece) {
        debug_assert!(piece.at >= self.bytes);
        self.bytes = piece.at + piece.length;
        self.pieces.push(piece);
    }

    /// To be read like a file.
    pub fn reader(&self) -> Reader<'_> {
        Reader { contents: self, position: 0, open: None }
    }
}

impl<T: Into<Bytes>> std::convert::From<T> for Contents {
    fn from(bytes: T) -> Self {
        let mut contents = Contents::default();
        contents.put_bytes(0, bytes.into());
        contents
    }
}

/// Reads contents.
pub struct Reader<'a> {
    contents: &'a Contents,
    position: u64,
    /// The last file used stays open.
    open: Option<(&'a Path, File)>,
}

impl Reader<'_> {
    fn read_piece(&mut self, piece: usize, buffer: &mut [u8]) -> io::Result<usize> {
        let contents = self.contents;
        let Piece { at, from, .. } = &contents.pieces[piece];
        let (path, offset) = match from {
            From::Memory(bytes) => {
                let from = (self.position - at) as usize;
                buffer.copy_from_slice(&bytes[from..from + buffer.len()]);
                return Ok(buffer.len());
            }
            From::File(path, offset) => (path.as_path(), offset + self.position - at),
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

impl Read for Reader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Contents { pieces, bytes } = self.contents;
        let next = pieces.partition_point(|piece| piece.at + piece.length <= self.position);
        let piece = pieces.get(next);
        let within = piece.filter(|piece| piece.at <= self.position);
        let until = match (within, piece) {
            (Some(piece), _) => piece.at + piece.length,
            (None, Some(next)) => next.at,
            (None, None) => *bytes,
        };
        let most = until.saturating_sub(self.position).min(buffer.len() as u64) as usize;
        let read = match within {
            Some(_) if most > 0 => self.read_piece(next, &mut buffer[..most])?,
            _ => {
                buffer[..most].fill(0);
                most
            }
        };
        self.position += read as u64;
        Ok(read)
    }
}

impl Seek for Reader<'_> {
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

    /// Contents made of memory, a file, parts of other contents and gaps, and the same bytes.
    fn made(lengths: &[(u8, u8)], file: &Path) -> (Contents, Vec<u8>) {
        let (mut contents, mut bytes) = (Contents::default(), Vec::new());
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
            let (contents, bytes) = made(&lengths, &file);
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
