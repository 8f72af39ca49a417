//! Reads small external tensors (axes, sizes) while the graph is built.

use crate::weights::{FileRange, WeightError, Weights};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// A reader that keeps only the last file open: a model with one file per weight must not exhaust file descriptors.
pub struct SmallReader<'a> {
    weights: &'a Weights,
    open: Option<(usize, File)>,
}

impl<'a> SmallReader<'a> {
    /// A reader of a model's weight files. Opens no file.
    pub fn new(weights: &'a Weights) -> Self {
        SmallReader { weights, open: None }
    }

    /// The bytes of a range. The caller guarantees that it is short.
    pub fn read(&mut self, name: &str, range: FileRange) -> Result<Vec<u8>, WeightError> {
        let path = &self.weights.files[range.file].path;
        let failed = |source| WeightError::Io { name: name.to_owned(), path: path.clone(), source };
        let file = match &mut self.open {
            Some((open, file)) if *open == range.file => file,
            slot => &mut slot.insert((range.file, File::open(path).map_err(failed)?)).1,
        };
        let mut bytes = vec![0; range.length as usize];
        file.seek(SeekFrom::Start(range.offset)).and_then(|_| file.read_exact(&mut bytes)).map_err(failed)?;
        Ok(bytes)
    }
}
