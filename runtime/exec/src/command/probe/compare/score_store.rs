//! Rows of scores in a nameless temporary file: a vocabulary of 128 Ki takes half a megabyte a position.

use crate::error::ExecError;
use hpp_io::WriteError;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};

/// Rows, in the order they were added.
pub(super) struct ScoreStore {
    file: BufWriter<File>,
    /// Length of each row.
    rows: Vec<usize>,
}

impl ScoreStore {
    /// An empty one.
    pub fn new() -> Result<Self, ExecError> {
        Ok(ScoreStore { file: BufWriter::new(tempfile::tempfile().map_err(failed)?), rows: Vec::new() })
    }

    /// Adds a row.
    pub fn push(&mut self, row: &[f32]) -> Result<(), ExecError> {
        let bytes: Vec<u8> = row.iter().flat_map(|score| score.to_le_bytes()).collect();
        self.file.write_all(&bytes).map_err(failed)?;
        self.rows.push(row.len());
        Ok(())
    }

    /// How many rows there are.
    pub fn mark(&self) -> usize {
        self.rows.len()
    }

    /// Takes back the rows since a mark.
    pub fn forget_from(&mut self, mark: usize) -> Result<(), ExecError> {
        self.rows.truncate(mark);
        let end: usize = self.rows.iter().sum();
        self.file.seek(SeekFrom::Start(end as u64 * 4)).map(drop).map_err(failed)
    }

    /// The rows from the first on.
    pub fn read(&mut self) -> Result<Rows<'_>, ExecError> {
        self.file.seek(SeekFrom::Start(0)).map_err(failed)?;
        let file = BufReader::new(self.file.get_mut());
        Ok(Rows { file, lengths: self.rows.iter(), bytes: Vec::new(), row: Vec::new() })
    }
}

/// Rows being read.
pub(super) struct Rows<'a> {
    file: BufReader<&'a mut File>,
    lengths: std::slice::Iter<'a, usize>,
    bytes: Vec<u8>,
    row: Vec<f32>,
}

impl Rows<'_> {
    /// The next row.
    pub fn next(&mut self) -> Result<&[f32], ExecError> {
        let length = *self.lengths.next().ok_or_else(|| failed(io::ErrorKind::UnexpectedEof.into()))?;
        self.bytes.resize(length * 4, 0);
        self.file.read_exact(&mut self.bytes).map_err(failed)?;
        self.row.clear();
        self.row.extend(self.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
        Ok(&self.row)
    }
}

fn failed(source: io::Error) -> ExecError {
    WriteError { path: std::env::temp_dir(), source }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_as_often_as_they_are_read() {
        let mut store = ScoreStore::new().unwrap();
        store.push(&[1.0, -2.0]).unwrap();
        let mark = store.mark();
        store.push(&[9.0; 1000]).unwrap();
        store.forget_from(mark).unwrap();
        store.push(&[f32::INFINITY]).unwrap();
        for _ in 0..2 {
            let mut rows = store.read().unwrap();
            assert_eq!(rows.next().unwrap(), [1.0, -2.0]);
            assert_eq!(rows.next().unwrap(), [f32::INFINITY]);
            assert!(rows.next().is_err(), "there are two");
        }
    }
}
