//! Source files for packing and rounding: an index by location, and the error of a range that cannot be read.

use crate::quantize::NotFiniteError;
use crate::weights::{FileRange, WeightFile, Weights};
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;

/// Indices of [`Weights::files`] by location.
pub(super) type FileIndex<'a> = HashMap<&'a str, usize>;

/// Indexes the files of these weights.
pub(super) fn index_files(weights: &Weights) -> FileIndex<'_> {
    weights.files.iter().enumerate().map(|(index, file)| (file.location.as_str(), index)).collect()
}

/// A range of a weight file could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {length} bytes at offset {offset} of {path}")]
pub struct RangeReadError {
    /// The file.
    pub path: PathBuf,
    /// Offset of the range, bytes.
    pub offset: u64,
    /// Length of the range, bytes.
    pub length: u64,
    /// The cause.
    pub source: io::Error,
}

impl RangeReadError {
    pub(super) fn new(file: &WeightFile, range: FileRange, source: io::Error) -> Self {
        RangeReadError { path: file.path.clone(), offset: range.offset, length: range.length, source }
    }

    /// The number that cannot be quantized, if that is the cause.
    pub(super) fn not_finite(&self) -> Option<NotFiniteError> {
        self.source.get_ref()?.downcast_ref::<NotFiniteError>().cloned()
    }

    /// The file ends before the range does.
    pub(super) fn short(file: &WeightFile, range: FileRange) -> Self {
        Self::new(file, range, io::ErrorKind::UnexpectedEof.into())
    }
}
