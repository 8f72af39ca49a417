//! The scores of each step as they come, float32 `[steps, vocab]`, in a `.npy` that appears when it is complete.

use super::npy_header::Header;
use hpp_io::{OutputFile, WriteError};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

/// Room for the header, so that it can be replaced when the number of rows is known.
const HEADER: usize = 128;

/// A growing table of scores.
pub struct ScoreFile {
    file: OutputFile,
    rows: u64,
    vocab: Option<usize>,
}

impl ScoreFile {
    /// Begins a file that will appear at `path`.
    pub fn create(path: &Path) -> Result<Self, WriteError> {
        Ok(Self { file: OutputFile::create(path)?, rows: 0, vocab: None })
    }

    /// Adds the scores of one step.
    pub fn push(&mut self, scores: &[f32]) -> Result<(), WriteError> {
        self.try_push(scores).map_err(|source| self.error(source))
    }

    /// Puts the file in its place. Without a step its shape is `(0, vocab)`.
    pub fn finish(mut self, vocab: usize) -> Result<(), WriteError> {
        let header = self.header(vocab);
        let file = self.file.file();
        let written = file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&header));
        written.map_err(|source| self.error(source))?;
        self.file.finish()
    }

    fn try_push(&mut self, scores: &[f32]) -> io::Result<()> {
        let vocab = match self.vocab {
            Some(vocab) => vocab,
            None => {
                let header = self.header(scores.len());
                self.file.file().write_all(&header)?;
                *self.vocab.insert(scores.len())
            }
        };
        if vocab != scores.len() {
            let why = format!("{} scores after rows of {vocab}", scores.len());
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let mut out = BufWriter::new(self.file.file());
        for score in scores {
            out.write_all(&score.to_le_bytes())?;
        }
        out.flush()?;
        self.rows += 1;
        Ok(())
    }

    fn header(&self, vocab: usize) -> Vec<u8> {
        let shape = vec![self.rows, self.vocab.unwrap_or(vocab) as u64];
        Header { descr: "<f4".to_owned(), fortran_order: false, shape }.to_bytes(HEADER)
    }

    fn error(&self, source: io::Error) -> WriteError {
        WriteError { path: self.file.path().to_owned(), source }
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
        let path = dir.path().join("scores.npy");
        let mut file = ScoreFile::create(&path).unwrap();
        for step in 0..3 {
            file.push(&[step as f32, 0.5]).unwrap();
        }
        assert!(!path.exists());
        file.finish(2).unwrap();
        assert_eq!(read_npy(&path).unwrap(), HostTensor::from_f32(&[3, 2], &[0.0, 0.5, 1.0, 0.5, 2.0, 0.5]));
    }

    #[test]
    fn no_step_is_an_empty_table() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("scores.npy");
        ScoreFile::create(&path).unwrap().finish(7).unwrap();
        assert_eq!(read_npy(&path).unwrap().shape, [0, 7]);
    }

    #[test]
    fn rows_of_another_length_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = ScoreFile::create(&dir.path().join("scores.npy")).unwrap();
        file.push(&[1.0]).unwrap();
        assert!(file.push(&[1.0, 2.0]).is_err());
    }
}
