//! Where weights come from that are written anew: the files a model's locations lie in, and ranges of them that cannot be read.

use crate::weights::{Span, WeightFile, Weights};
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;

/// Weight files by location: indices among [`Weights::files`].
pub(super) type Files<'a> = HashMap<&'a str, usize>;

/// The files of these weights.
pub(super) fn files(weights: &Weights) -> Files<'_> {
    weights.files.iter().enumerate().map(|(index, file)| (file.location.as_str(), index)).collect()
}

/// A range of a weight file could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {length} bytes at offset {offset} of {path}")]
pub struct SourceError {
    /// The file.
    pub path: PathBuf,
    /// Where the range begins, bytes.
    pub offset: u64,
    /// How long it is, bytes.
    pub length: u64,
    /// What the system said.
    pub source: io::Error,
}

impl SourceError {
    pub(super) fn new(file: &WeightFile, span: Span, source: io::Error) -> Self {
        SourceError { path: file.path.clone(), offset: span.offset, length: span.length, source }
    }

    /// The file ends before the range does.
    pub(super) fn short(file: &WeightFile, span: Span) -> Self {
        Self::new(file, span, io::ErrorKind::UnexpectedEof.into())
    }
}
