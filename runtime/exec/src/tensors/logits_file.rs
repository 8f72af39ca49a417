//! Writes the logits of each step, float32 `[steps, vocab]`, to a `.npy` file that appears once it is complete.

use super::npy_header::{MAGIC, NpyHeader};
use hpp_io::{FileWriteError, OutputFile};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

/// Bytes reserved for the header, which is rewritten once the number of rows is known.
const HEADER_BYTES: usize = 128;

/// A growing table of logits.
pub struct LogitsFile {
    file: OutputFile,
    rows: u64,
    vocab: Option<usize>,
}

impl LogitsFile {
    /// Starts a file that will appear at `path`.
    pub fn create(path: &Path) -> Result<Self, FileWriteError> {
        Ok(Self { file: OutputFile::create_as(path, MAGIC)?, rows: 0, vocab: None })
    }

    /// Adds the logits of one step.
    pub fn push(&mut self, logits: &[f32]) -> Result<(), FileWriteError> {
        self.try_push(logits).map_err(|source| self.error(source))
    }

    /// Completes the file and makes it appear. Without a step its shape is `(0, vocab)`.
    pub fn finish(mut self, vocab: usize) -> Result<(), FileWriteError> {
        let header = self.header(vocab);
        let file = self.file.file();
        let written = file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&header));
        written.map_err(|source| self.error(source))?;
        self.file.finish()
    }

    fn try_push(&mut self, logits: &[f32]) -> io::Result<()> {
        let vocab = match self.vocab {
            Some(vocab) => vocab,
            None => {
                let header = self.header(logits.len());
                self.file.file().write_all(&header)?;
                *self.vocab.insert(logits.len())
            }
        };
        if vocab != logits.len() {
            let why = format!("{} logits after rows of {vocab}", logits.len());
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let mut out = BufWriter::new(self.file.file());
        for logit in logits {
            out.write_all(&logit.to_le_bytes())?;
        }
        out.flush()?;
        self.rows += 1;
        Ok(())
    }

    fn header(&self, vocab: usize) -> Vec<u8> {
        let shape = vec![self.rows, self.vocab.unwrap_or(vocab) as u64];
        NpyHeader { descr: "<f4".to_owned(), fortran_order: false, shape }.to_bytes(HEADER_BYTES)
    }

    fn error(&self, source: io::Error) -> FileWriteError {
        FileWriteError { path: self.file.path().to_owned(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::read_npy;
    use hpp_engine::HostTensor;

    #[test]
    fn rows_become_a_table() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logits.npy");
        let mut file = LogitsFile::create(&path).unwrap();
        for step in 0..3 {
            file.push(&[step as f32, 0.5]).unwrap();
        }
        assert!(!path.exists());
        file.finish(2).unwrap();
        assert_eq!(read_npy(&path).unwrap(), HostTensor::from_f32(&[3, 2], &[0.0, 0.5, 1.0, 0.5, 2.0, 0.5]));
    }

    #[test]
    fn without_a_step_the_table_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logits.npy");
        LogitsFile::create(&path).unwrap().finish(7).unwrap();
        assert_eq!(read_npy(&path).unwrap().shape, [0, 7]);
    }

    #[test]
    fn rows_of_another_length_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = LogitsFile::create(&dir.path().join("logits.npy")).unwrap();
        file.push(&[1.0]).unwrap();
        assert!(file.push(&[1.0, 2.0]).is_err());
    }
}
