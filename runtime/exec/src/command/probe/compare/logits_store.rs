//! Rows of logits in an unnamed temporary file: with a vocabulary of 128 Ki a row has half a megabyte.

use crate::error::ExecError;
use hpp_io::FileWriteError;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};

/// Rows of float32 numbers in the order in which they were added.
pub(in crate::command) struct LogitsStore {
    file: BufWriter<File>,
    /// Length of each row.
    rows: Vec<usize>,
}

impl LogitsStore {
    /// An empty store.
    pub fn new() -> Result<Self, ExecError> {
        Ok(LogitsStore { file: BufWriter::new(tempfile::tempfile().map_err(failed)?), rows: Vec::new() })
    }

    /// Adds a row.
    pub fn push(&mut self, row: &[f32]) -> Result<(), ExecError> {
        let bytes: Vec<u8> = row.iter().flat_map(|logit| logit.to_le_bytes()).collect();
        self.file.write_all(&bytes).map_err(failed)?;
        self.rows.push(row.len());
        Ok(())
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Drops all rows but the first `rows`.
    pub fn truncate(&mut self, rows: usize) -> Result<(), ExecError> {
        self.rows.truncate(rows);
        let end: usize = self.rows.iter().sum();
        self.file.seek(SeekFrom::Start(end as u64 * 4)).map(drop).map_err(failed)
    }

    /// Reads all rows from the first on.
    pub fn read(&mut self) -> Result<StoredRows<'_>, ExecError> {
        self.file.seek(SeekFrom::Start(0)).map_err(failed)?;
        let file = BufReader::new(self.file.get_mut());
        Ok(StoredRows { file, lengths: self.rows.iter(), bytes: Vec::new(), row: Vec::new() })
    }
}

/// Reads the rows of a [`LogitsStore`] one after another.
pub(in crate::command) struct StoredRows<'a> {
    file: BufReader<&'a mut File>,
    lengths: std::slice::Iter<'a, usize>,
    bytes: Vec<u8>,
    row: Vec<f32>,
}

impl StoredRows<'_> {
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
    FileWriteError { path: std::env::temp_dir(), source }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_can_be_read_repeatedly() {
        let mut store = LogitsStore::new().unwrap();
        store.push(&[1.0, -2.0]).unwrap();
        let mark = store.len();
        store.push(&[9.0; 1000]).unwrap();
        store.truncate(mark).unwrap();
        store.push(&[f32::INFINITY]).unwrap();
        for _ in 0..2 {
            let mut rows = store.read().unwrap();
            assert_eq!(rows.next().unwrap(), [1.0, -2.0]);
            assert_eq!(rows.next().unwrap(), [f32::INFINITY]);
            assert!(rows.next().is_err(), "there are two rows");
        }
    }
}
